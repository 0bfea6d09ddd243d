/* GroupNormalization and InstanceNormalization, and their cotangents.
 *
 * Of each image, the channels of a group share mean and deviation. With d = x - mean, r = 1 / sqrt(variance + epsilon),
 * and the sums over the n numbers of a group,
 *
 *   x = r*s*g - r * sum s*g / n - r^3 * d * sum s*g*d / n        scale = sum r*g*d        bias = sum g
 *
 * where s and the last two are of a channel, or of a group. The numbers of a group lie side by side, and most likely
 * are near the processor after the first pass over them. Images are added up in double at the end, in their order.
 */
#include <math.h>
#include <string.h>

#include "kernel.h"
#include "lanes.h"
#include "moments.h"

typedef struct {
  const float *g, *x, *scale, *bias;
  float *out, *dx, *d_scale, *d_bias, epsilon;
  double *sums; /* of r*g*d and of g, by image and channel */
  int64_t images, groups, channels, plane; /* channels of a group */
  int per_channel;
  float *centre, *gain, *shift; /* y as (x - centre) * gain + shift, by image and channel, `spread` times each */
  int64_t spread;
} Job;

/* The scale or bias of channel `c`, counted over all groups. */
INLINE int64_t parameter_of(const Job *j, int64_t c) { return j->per_channel ? c : c / j->channels; }

static void forward(void *data, int64_t from, int64_t to) {
  const Job *j = data;
  const int64_t count = j->channels * j->plane;
  for (int64_t group = from; group < to; group++) {
    const float *x = j->x + group * count;
    const float mean = mean_of(x, count), inverse = 1 / sqrtf(variance_of(x, count, mean) + j->epsilon);
    const lanes means = lanes_of(mean);
    for (int64_t c = 0; c < j->channels; c++) {
      const int64_t at = parameter_of(j, group % j->groups * j->channels + c), start = group * count + c * j->plane;
      const float gain = j->scale[at] * inverse, bias = j->bias[at];
      const lanes gains = lanes_of(gain), biases = lanes_of(bias);
      const int64_t column = (group * j->channels + c) * j->spread;
      for (int64_t k = column; k < column + j->spread; k++) {
        if (j->centre) j->centre[k] = mean;
        if (j->gain) j->gain[k] = gain;
        if (j->shift) j->shift[k] = bias;
      }
      if (!j->out) continue;
      const float *here = j->x + start;
      float *out = j->out + start;
      int64_t k = 0;
      for (; k + LANES <= j->plane; k += LANES)
        *(lanes *)(out + k) = (*(const lanes *)(here + k) - means) * gains + biases;
      for (; k < j->plane; k++) out[k] = (here[k] - mean) * gain + bias;
    }
  }
}

/* The sums of g and g*d over a plane. */
INLINE void plane_sums(const float *g, const float *x, int64_t count, float mean, double *sum_g, double *sum_gd) {
  const lanes means = lanes_of(mean);
  int64_t k = 0;
  *sum_g = *sum_gd = 0;
  for (int64_t start = 0; start < count; start += TOGETHER) {
    const int64_t end = least(start + TOGETHER, count);
    lanes total[4] = {{0}};
    for (; k + 2 * LANES <= end; k += 2 * LANES)
      for (int half = 0; half < 2; half++) {
        const lanes here = *(const lanes *)(g + k + half * LANES);
        total[half] += here;
        total[2 + half] += here * (*(const lanes *)(x + k + half * LANES) - means);
      }
    float rest_g = 0, rest_gd = 0;
    for (; k < end; k++) {
      rest_g += g[k];
      rest_gd += g[k] * (x[k] - mean);
    }
    *sum_g += lanes_sum(total[0] + total[1]) + rest_g;
    *sum_gd += lanes_sum(total[2] + total[3]) + rest_gd;
  }
}

static void pull(void *data, int64_t from, int64_t to) {
  const Job *j = data;
  const int64_t count = j->channels * j->plane, all = j->groups * j->channels;
  for (int64_t group = from; group < to; group++) {
    const int64_t first = group % j->groups * j->channels; /* its first channel */
    const float *x = j->x + group * count, *g = j->g + group * count;
    const float mean = mean_of(x, count), inverse = 1 / sqrtf(variance_of(x, count, mean) + j->epsilon);
    double sum_g = 0, sum_gd = 0;
    for (int64_t c = 0; c < j->channels; c++) {
      double *kept = j->sums + 2 * (group / j->groups * all + first + c), here_g, here_gd;
      plane_sums(g + c * j->plane, x + c * j->plane, j->plane, mean, &here_g, &here_gd);
      const float scale = j->scale[parameter_of(j, first + c)];
      sum_g += scale * here_g;
      sum_gd += scale * here_gd;
      kept[0] = inverse * here_gd;
      kept[1] = here_g;
    }
    if (!j->dx) continue;
    const float constant = (float)(-inverse * sum_g / (double)count);
    const float slope = (float)(-(double)inverse * inverse * inverse * sum_gd / (double)count);
    const lanes means = lanes_of(mean), constants = lanes_of(constant), slopes = lanes_of(slope);
    for (int64_t c = 0; c < j->channels; c++) {
      const float gain = inverse * j->scale[parameter_of(j, first + c)];
      const lanes gains = lanes_of(gain);
      const float *here_x = x + c * j->plane, *here_g = g + c * j->plane;
      float *out = j->dx + group * count + c * j->plane;
      int64_t k = 0;
      for (; k + LANES <= j->plane; k += LANES) {
        const lanes d = *(const lanes *)(here_x + k) - means;
        *(lanes *)(out + k) = *(const lanes *)(here_g + k) * gains + d * slopes + constants;
      }
      for (; k < j->plane; k++) out[k] = here_g[k] * gain + (here_x[k] - mean) * slope + constant;
    }
  }
}

static void total(void *data, int64_t from, int64_t to) {
  const Job *j = data;
  const int64_t all = j->groups * j->channels, together = j->per_channel ? 1 : j->channels;
  for (int64_t i = from; i < to; i++) {
    double scale = 0, bias = 0;
    for (int64_t n = 0; n < j->images; n++)
      for (int64_t c = i * together; c < (i + 1) * together; c++) {
        scale += j->sums[2 * (n * all + c)];
        bias += j->sums[2 * (n * all + c) + 1];
      }
    if (j->d_scale) j->d_scale[i] = (float)scale;
    if (j->d_bias) j->d_bias[i] = (float)bias;
  }
}

typedef struct {
  int64_t groups;
  float epsilon;
  int64_t spread, rank; /* of centre, gain and shift: x is a view of that many times as many channels, and of that rank */
} Settings;

static void read_grad(Attributes *from, void *settings) {
  ((Settings *)settings)->groups = attribute_int(from, "groups");
  ((Settings *)settings)->epsilon = attribute_float(from, "epsilon");
}

static void read(Attributes *from, void *settings) {
  Settings *s = settings;
  read_grad(from, settings);
  s->spread = attribute_int(from, "spread");
  s->rank = attribute_int(from, "rank");
  if (s->spread < 1 || s->rank < 2 || s->rank > MOST_DIMS) attributes_fail(from, "GroupNorm: there is no such view");
}

/* How x is divided, into as many groups as channels where the attribute is 0; 0 where the scale does not fit. */
static int divided(Job *j, const Settings *s, const Shape *x, const Shape *scale) {
  if (x->rank < 2 || s->groups < 0 || scale->rank != 1) return 0;
  const int64_t all = x->dims[1];
  j->epsilon = s->epsilon;
  j->groups = s->groups ? s->groups : all;
  if (all && (j->groups > all || all % j->groups)) return 0;
  j->per_channel = scale->count == all;
  if (!j->per_channel && scale->count != j->groups) return 0;
  if (!all) j->groups = scale->count;
  j->channels = j->groups ? all / j->groups : 0;
  j->images = x->count ? x->dims[0] : 0;
  j->plane = 1;
  for (size_t i = 2; i < x->rank && x->count; i++) j->plane *= x->dims[i];
  return 1;
}

static void each_group(Call *call, Job *j, void (*body)(void *, int64_t, int64_t)) {
  if (j->images) parallel_ranges(call, j->images * j->groups, 4096 / (j->channels * j->plane) + 1, body, j);
}

/* (x, scale, bias) to y, and to what makes y of x */
static void compute(Call *call, const void *settings) {
  const Shape x = shape_of(call, 0), scale = shape_of(call, 1), bias = shape_of(call, 2);
  Job j = {.x = input(call, 0), .scale = input(call, 1), .bias = input(call, 2)};
  if (call->failed) return;
  if (!divided(&j, settings, &x, &scale) || !same_shape(&scale, &bias)) {
    fail(call, "GroupNorm: operands do not belong together");
    return;
  }
  const Settings *s = settings;
  Shape column = {.rank = (size_t)s->rank, .dims = {x.dims[0]}};
  if (__builtin_mul_overflow(x.dims[1], s->spread, &column.dims[1]) ||
      __builtin_mul_overflow(column.dims[0], column.dims[1], &column.count) || column.count > MOST_NUMBERS) {
    fail(call, "GroupNorm: a view has too many channels");
    return;
  }
  for (size_t i = 2; i < column.rank; i++) column.dims[i] = 1;
  j.spread = s->spread;
  j.out = output(call, 0, &x);
  j.centre = output(call, 1, &column);
  j.gain = output(call, 2, &column);
  j.shift = output(call, 3, &column);
  if (call->failed) return;
  float *columns[] = {j.centre, j.gain, j.shift};
  for (size_t i = 0; i < 3 && !j.images; i++) /* of nothing */
    if (columns[i]) memset(columns[i], 0, (size_t)column.count * sizeof **columns);
  each_group(call, &j, forward);
}

/* (g, x, scale) to the cotangents of (x, scale, bias) */
static void compute_grad(Call *call, const void *settings) {
  const Shape g = shape_of(call, 0), x = shape_of(call, 1), scale = shape_of(call, 2);
  Job j = {.g = input(call, 0), .x = input(call, 1), .scale = input(call, 2)};
  if (call->failed) return;
  if (!divided(&j, settings, &x, &scale) || !same_shape(&g, &x)) {
    fail(call, "GroupNormGrad: operands do not belong together");
    return;
  }
  j.dx = output(call, 0, &x);
  j.d_scale = output(call, 1, &scale);
  j.d_bias = output(call, 2, &scale);
  j.sums = scratch(call, 2 * j.images * j.groups * j.channels, sizeof(double));
  if (call->failed) return;
  each_group(call, &j, pull);
  parallel_ranges(call, scale.count, 1024, total, &j);
}

const Kernel group_norm_kernels[] = {
    {"GroupNorm", "fff", "FFFF", sizeof(Settings), read, compute},
    {"GroupNormGrad", "fff", "FFF", sizeof(Settings), read_grad, compute_grad},
    {0},
};
