/* BatchNormalization with the statistics of the batch, GroupNormalization and InstanceNormalization, and their
 * cotangents.
 *
 * The numbers of a group share mean and variance: those of a channel in all images, or of some channels of one image.
 * With d = x - mean, r = 1 / sqrt(variance + epsilon) and the sums over the n numbers of a group,
 *
 *   x = r*s*g - r * sum s*g / n - r^3 * d * sum s*g*d / n        scale = sum r*g*d        bias = sum g
 *
 * where s and the last two are of a channel, or of the channels of a group. A group is runs of numbers that lie side by
 * side, and is most likely near the processor after the first pass over it. Where the output of a ReLU y is given, g
 * counts only where y is positive. Images are added up in double at the end, in their order.
 */
#include <math.h>
#include <string.h>

#include "kernel.h"
#include "lanes.h"
#include "moments.h"

typedef struct {
  const float *g, *x, *mean, *variance, *scale, *bias, *y;
  float *out, *dx, *d_scale, *d_bias, epsilon;
  float *means, *variances, *columns[3]; /* y as (x - centre) * gain + shift, by channel, `spread` times each */
  double *sums;                          /* of r*g*d and of g, by image and channel */
  int64_t images, groups, channels, plane, spread; /* channels of a group of one image */
  int across, per_channel;                         /* whether a group is of all images; a scale for each channel */
} Job;

/* A group: runs of a plane each, and the mean of all. */
typedef struct {
  int64_t runs, first, stride, number; /* of the group within an image */
  float mean, variance;
  double count;
} Group;

static Group group_of(const Job *j, int64_t index) {
  Group group = {j->channels, index * j->channels * j->plane, j->plane, index % j->groups, 0, 0, 0};
  if (j->across) group.runs = j->images, group.stride = j->groups * j->plane;
  const float *x = j->x + group.first;
  const int64_t runs = j->across ? group.runs : 1, plane = j->across ? j->plane : j->channels * j->plane;
  group.count = (double)group.runs * (double)j->plane;
  group.mean = j->mean ? j->mean[index] : (float)(power_sums(0, x, runs, group.stride, plane, 0) / group.count);
  group.variance = j->variance ? j->variance[index]
                               : (float)(power_sums(1, x, runs, group.stride, plane, group.mean) / group.count);
  return group;
}

/* The scale or bias of a run. */
INLINE int64_t parameter_of(const Job *j, const Group *group, int64_t run) {
  return j->across || !j->per_channel ? group->number : group->number * j->channels + run;
}

static void give_columns(const Job *j, int64_t at, float mean, float gain, float shift) {
  const float numbers[] = {mean, gain, shift};
  for (int i = 0; i < 3; i++)
    for (int64_t k = at * j->spread; k < (at + 1) * j->spread && j->columns[i]; k++) j->columns[i][k] = numbers[i];
}

static void forward(void *data, int64_t from, int64_t to) {
  const Job *j = data;
  for (int64_t index = from; index < to; index++) {
    const Group group = group_of(j, index);
    const float mean = group.mean, inverse = 1 / sqrtf(group.variance + j->epsilon);
    const lanes means = lanes_of(mean);
    if (j->means) j->means[index] = mean;
    if (j->variances) j->variances[index] = group.variance;
    if (j->across) give_columns(j, index, mean, j->scale[index] * inverse, j->bias[index]);
    for (int64_t run = 0; run < group.runs; run++) {
      const int64_t at = parameter_of(j, &group, run), start = group.first + run * group.stride;
      const float gain = j->scale[at] * inverse, bias = j->bias[at], *x = j->x + start;
      const lanes gains = lanes_of(gain), biases = lanes_of(bias);
      if (!j->across) give_columns(j, index * j->channels + run, mean, gain, bias);
      if (!j->out) continue;
      float *out = j->out + start;
      int64_t k = 0;
      for (; k + LANES <= j->plane; k += LANES) *(lanes *)(out + k) = (*(const lanes *)(x + k) - means) * gains + biases;
      for (; k < j->plane; k++) out[k] = (x[k] - mean) * gain + bias;
    }
  }
}

/* --- cotangents --------------------------------------------------------------------------------------------------- */

/* g where y is positive, else g * 0: an infinity leaves a mark, as it does in the graph. */
INLINE lanes where_positive(lanes g, lanes y) { return g * (lanes)((lanes_mask)(lanes_of(1)) & (y > 0)); }
INLINE float one_where_positive(float g, float y) { return g * (y > 0 ? 1.0f : 0.0f); }

/* The sums of g and of g*d: vectors until there are enough numbers in them. */
typedef struct {
  lanes total[4];
  int64_t numbers;
  double g, gd;
} Sums;

INLINE void settle(Sums *sums) {
  sums->g += lanes_sum(sums->total[0] + sums->total[1]);
  sums->gd += lanes_sum(sums->total[2] + sums->total[3]);
  for (int i = 0; i < 4; i++) sums->total[i] = lanes_of(0);
  sums->numbers = 0;
}

INLINE void add_run(const int masked, Sums *sums, const Job *j, int64_t from, float mean) {
  const float *g = j->g + from, *x = j->x + from, *y = masked ? j->y + from : NULL;
  const lanes means = lanes_of(mean);
  int64_t k = 0;
  for (int64_t start = 0; start < j->plane; start += TOGETHER) {
    const int64_t end = least(start + TOGETHER, j->plane);
    lanes total[4];
    for (int i = 0; i < 4; i++) total[i] = sums->total[i];
    for (; k + 2 * LANES <= end; k += 2 * LANES)
      for (int half = 0; half < 2; half++) {
        const int64_t at = k + half * LANES;
        lanes here = *(const lanes *)(g + at);
        if (masked) here = where_positive(here, *(const lanes *)(y + at));
        total[half] += here;
        total[2 + half] += here * (*(const lanes *)(x + at) - means);
      }
    for (int i = 0; i < 4; i++) sums->total[i] = total[i];
    float rest_g = 0, rest_gd = 0;
    for (; k < end; k++) {
      const float here = masked ? one_where_positive(g[k], y[k]) : g[k];
      rest_g += here;
      rest_gd += here * (x[k] - mean);
    }
    sums->g += rest_g;
    sums->gd += rest_gd;
    if ((sums->numbers += end - start) >= TOGETHER) settle(sums);
  }
}

INLINE void cotangent_of(const int masked, const Job *j, int64_t from, float mean, float a, float b, float constant) {
  const lanes means = lanes_of(mean), as = lanes_of(a), bs = lanes_of(b), constants = lanes_of(constant);
  const float *g = j->g + from, *x = j->x + from, *y = masked ? j->y + from : NULL;
  float *to = j->dx + from;
  int64_t k = 0;
  for (; k + LANES <= j->plane; k += LANES) {
    lanes here = *(const lanes *)(g + k);
    if (masked) here = where_positive(here, *(const lanes *)(y + k));
    *(lanes *)(to + k) = here * as + (*(const lanes *)(x + k) - means) * bs + constants;
  }
  for (; k < j->plane; k++) {
    const float here = masked ? one_where_positive(g[k], y[k]) : g[k];
    to[k] = here * a + (x[k] - mean) * b + constant;
  }
}

INLINE void pull_group(const int masked, const Job *j, int64_t index) {
  const Group group = group_of(j, index);
  const double inverse = 1 / sqrtf(group.variance + j->epsilon);
  Sums here = {{{0}}, 0, 0, 0};
  double sum_g = 0, sum_gd = 0;
  for (int64_t run = 0; run < group.runs; run++) {
    add_run(masked, &here, j, group.first + run * group.stride, group.mean);
    if (j->across) continue;
    const float scale = j->scale[parameter_of(j, &group, run)];
    double *kept = j->sums + 2 * (index * j->channels + run);
    settle(&here);
    sum_g += scale * here.g, sum_gd += scale * here.gd;
    kept[0] = inverse * here.gd, kept[1] = here.g;
    here.g = here.gd = 0;
  }
  if (j->across) {
    settle(&here);
    if (j->d_scale) j->d_scale[index] = (float)(inverse * here.gd);
    if (j->d_bias) j->d_bias[index] = (float)here.g;
    sum_g = j->scale[index] * here.g, sum_gd = j->scale[index] * here.gd;
  }
  const float constant = (float)(-inverse * sum_g / group.count);
  const float slope = (float)(-inverse * inverse * inverse * sum_gd / group.count);
  for (int64_t run = 0; run < group.runs && j->dx; run++) {
    const float gain = (float)inverse * j->scale[parameter_of(j, &group, run)];
    cotangent_of(masked, j, group.first + run * group.stride, group.mean, gain, slope, constant);
  }
}

static void pull(void *data, int64_t from, int64_t to) {
  const Job *j = data;
  for (int64_t index = from; index < to; index++)
    if (j->y)
      pull_group(1, j, index);
    else
      pull_group(0, j, index);
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

/* --- kernels ------------------------------------------------------------------------------------------------------ */

enum { BATCH = -1 };

typedef struct {
  int64_t groups; /* of an image; 0 for as many as channels, or of the batch */
  float epsilon;
  int64_t spread, rank; /* of the columns: x is a view of that many times as many channels, and of that rank */
} Settings;

static void read_batch(Attributes *from, void *settings) {
  *(Settings *)settings = (Settings){BATCH, attribute_float(from, "epsilon"), 1, 0};
}

static void read_grad(Attributes *from, void *settings) {
  const int64_t groups = attribute_int(from, "groups");
  *(Settings *)settings = (Settings){groups, attribute_float(from, "epsilon"), 1, 0};
  if (groups < 0) attributes_fail(from, "GroupNorm: there are no such groups");
}

static void read(Attributes *from, void *settings) {
  Settings *s = settings;
  read_grad(from, settings);
  s->spread = attribute_int(from, "spread");
  s->rank = attribute_int(from, "rank");
  if (s->spread < 1 || s->rank < 2 || s->rank > MOST_DIMS) attributes_fail(from, "GroupNorm: there is no such view");
}

/* How x is divided; 0 where the scale does not fit. */
static int divided(Job *j, const Settings *s, const Shape *x, const Shape *scale) {
  if (x->rank < 2 || scale->rank != 1) return 0;
  const int64_t all = x->dims[1];
  j->across = s->groups == BATCH;
  j->epsilon = s->epsilon;
  j->spread = s->spread;
  j->groups = s->groups > 0 ? s->groups : all;
  if (all && (j->groups > all || all % j->groups)) return 0;
  j->per_channel = scale->count == all;
  if (!j->per_channel && (j->across || scale->count != j->groups)) return 0;
  if (!all) j->groups = scale->count;
  j->channels = j->groups ? all / j->groups : 0;
  j->images = x->count ? x->dims[0] : 0;
  j->plane = 1;
  for (size_t i = 2; i < x->rank && x->count; i++) j->plane *= x->dims[i];
  return 1;
}

static void each_group(Call *call, Job *j, void (*body)(void *, int64_t, int64_t)) {
  const int64_t runs = j->across ? j->images : j->channels, count = j->across ? j->groups : j->images * j->groups;
  if (count) parallel_ranges(call, count, 4096 / (runs * j->plane + 1) + 1, body, j);
}

/* (x, scale, bias) to y, of a batch also to (mean, variance), and to the columns, which make y of x */
static void compute(Call *call, const void *settings) {
  const Settings *s = settings;
  const Shape x = shape_of(call, 0), scale = shape_of(call, 1), bias = shape_of(call, 2);
  Job j = {.x = input(call, 0), .scale = input(call, 1), .bias = input(call, 2)};
  if (call->failed) return;
  if (!divided(&j, s, &x, &scale) || !same_shape(&scale, &bias)) {
    fail(call, "BatchNorm, GroupNorm: operands do not belong together");
    return;
  }
  Shape column = {.rank = j.across ? x.rank - 1 : (size_t)s->rank, .dims = {j.across ? x.dims[1] : x.dims[0]}};
  for (size_t i = 1; i < column.rank; i++) column.dims[i] = 1;
  column.count = column.dims[0];
  if (!j.across && (__builtin_mul_overflow(x.dims[1], s->spread, &column.dims[1]) ||
                    __builtin_mul_overflow(column.dims[0], column.dims[1], &column.count) || column.count > MOST_NUMBERS)) {
    fail(call, "GroupNorm: a view has too many channels");
    return;
  }
  j.out = output(call, 0, &x);
  if (j.across) j.means = output(call, 1, &scale), j.variances = output(call, 2, &scale);
  for (size_t i = 0; i < 3; i++) {
    j.columns[i] = output(call, (j.across ? 3 : 1) + i, &column);
    if (j.columns[i] && !j.images && !call->failed) /* of nothing */
      memset(j.columns[i], 0, (size_t)column.count * sizeof **j.columns);
  }
  if (!call->failed) each_group(call, &j, forward);
}

/* (g, x, scale), or (g, x, mean, variance, scale, y of a ReLU) of a batch, to the cotangents of (x, scale, bias) */
static void compute_grad(Call *call, const void *settings) {
  const Settings *s = settings;
  const size_t at = s->groups == BATCH ? 4 : 2;
  const Shape g = shape_of(call, 0), x = shape_of(call, 1), scale = shape_of(call, at);
  Job j = {.g = input(call, 0), .x = input(call, 1), .scale = input(call, at)};
  if (call->failed) return;
  int sound = divided(&j, s, &x, &scale) && same_shape(&g, &x);
  if (j.across) {
    const Shape mean = shape_of(call, 2), variance = shape_of(call, 3), y = shape_of(call, 5);
    j.mean = input(call, 2), j.variance = input(call, 3), j.y = input(call, 5);
    sound = sound && (!j.mean || same_shape(&mean, &scale)) && (!j.variance || same_shape(&variance, &scale));
    sound = sound && (!j.y || same_shape(&y, &x));
  }
  if (!sound) {
    fail(call, "BatchNormGrad, GroupNormGrad: operands do not belong together");
    return;
  }
  j.dx = output(call, 0, &x);
  j.d_scale = output(call, 1, &scale);
  j.d_bias = output(call, 2, &scale);
  if (!j.across) j.sums = scratch(call, 2 * j.images * j.groups * j.channels, sizeof(double));
  if (call->failed) return;
  each_group(call, &j, pull);
  if (!j.across) parallel_ranges(call, scale.count, 1024, total, &j);
}

const Kernel normalization_kernels[] = {
    {"BatchNorm", "fff", "FFFFFF", sizeof(Settings), read_batch, compute},
    {"BatchNormGrad", "ffFFfF", "FFF", sizeof(Settings), read_batch, compute_grad},
    {"GroupNorm", "fff", "FFFF", sizeof(Settings), read, compute},
    {"GroupNormGrad", "fff", "FFF", sizeof(Settings), read_grad, compute_grad},
    {0},
};
