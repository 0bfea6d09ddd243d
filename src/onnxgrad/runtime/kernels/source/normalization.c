/* BatchNormalization with the statistics of the batch, and its cotangents.
 *
 * With d = x - mean, r = 1 / sqrt(variance + epsilon) and the sums over the n numbers of a channel,
 *
 *   bias  = sum g        scale = r * sum g*d        x = s*r * (g - sum g / n - d * r*r * sum g*d / n)
 *
 * in two passes over a channel, the second of which most likely finds it near the processor, after two for mean and
 * variance where these are not given. Where the output of a
 * ReLU y is given, g counts only where y is positive.
 */
#include <math.h>

#include "kernel.h"
#include "lanes.h"

enum { TOGETHER = 4096 }; /* numbers that are added up in float; sums of these are double */

typedef struct {
  const float *g, *x, *mean, *variance, *scale, *bias, *y;
  float *out, *batch_mean, *batch_variance; /* of BatchNormalization */
  float *centre, *gain, *shift;             /* the same as (x - centre) * gain + shift, by channel */
  float *dx, *d_scale, *d_bias, epsilon;    /* of its cotangent */
  int64_t images, channels, plane;
} Job;

/* g where y is positive, else g * 0: an infinity leaves a mark, as it does in the graph. */
INLINE lanes where_positive(lanes g, lanes y) { return g * (lanes)((lanes_mask)(lanes_of(1)) & (y > 0)); }
INLINE float one_where_positive(float g, float y) { return g * (y > 0 ? 1.0f : 0.0f); }

INLINE void sums_of(const int masked, const Job *j, int64_t c, float mean, double *sum_g, double *sum_gd) {
  const lanes means = lanes_of(mean);
  *sum_g = *sum_gd = 0;
  lanes total[4] = {{0}};
  for (int64_t n = 0, numbers = 0; n < j->images; n++) {
    const int64_t from = (n * j->channels + c) * j->plane;
    const float *g = j->g + from, *x = j->x + from, *y = masked ? j->y + from : NULL;
    int64_t k = 0;
    for (; k + 2 * LANES <= j->plane; k += 2 * LANES)
      for (int half = 0; half < 2; half++) {
        const int64_t at = k + half * LANES;
        lanes here = *(const lanes *)(g + at);
        if (masked) here = where_positive(here, *(const lanes *)(y + at));
        total[half] += here;
        total[2 + half] += here * (*(const lanes *)(x + at) - means);
      }
    float rest_g = 0, rest_gd = 0;
    for (; k < j->plane; k++) {
      const float here = masked ? one_where_positive(g[k], y[k]) : g[k];
      rest_g += here;
      rest_gd += here * (x[k] - mean);
    }
    *sum_g += rest_g;
    *sum_gd += rest_gd;
    if ((numbers += j->plane) < TOGETHER && n + 1 < j->images) continue;
    *sum_g += lanes_sum(total[0] + total[1]);
    *sum_gd += lanes_sum(total[2] + total[3]);
    for (int i = 0; i < 4; i++) total[i] = lanes_of(0);
    numbers = 0;
  }
}

INLINE void cotangent_of(const int masked, const Job *j, int64_t c, float mean, float a, float b, float constant) {
  const lanes means = lanes_of(mean), as = lanes_of(a), bs = lanes_of(b), constants = lanes_of(constant);
  for (int64_t n = 0; n < j->images; n++) {
    const int64_t from = (n * j->channels + c) * j->plane;
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
}

/* The mean of a channel, or, around a mean, its variance. */
static float moment_of(const Job *j, int64_t c, const float *mean) {
  const float around = mean ? *mean : 0;
  const lanes arounds = lanes_of(around);
  double sum = 0;
  lanes total[2] = {{0}};
  for (int64_t n = 0, numbers = 0; n < j->images; n++) {
    const float *x = j->x + (n * j->channels + c) * j->plane;
    float rest = 0;
    int64_t k = 0;
    for (; k + 2 * LANES <= j->plane; k += 2 * LANES)
      for (int half = 0; half < 2; half++) {
        const lanes d = *(const lanes *)(x + k + half * LANES) - arounds;
        if (mean)
          total[half] += d * d;
        else
          total[half] += d;
      }
    for (; k < j->plane; k++) rest += mean ? (x[k] - around) * (x[k] - around) : x[k];
    sum += rest;
    if ((numbers += j->plane) < TOGETHER && n + 1 < j->images) continue;
    sum += lanes_sum(total[0] + total[1]);
    total[0] = total[1] = lanes_of(0);
    numbers = 0;
  }
  return (float)(sum / ((double)j->images * j->plane));
}

static void channel(void *data, size_t index) {
  const Job *j = data;
  const int64_t c = (int64_t)index;
  const float mean = j->mean ? j->mean[c] : moment_of(j, c, NULL);
  const float variance = j->variance ? j->variance[c] : moment_of(j, c, &mean);
  const float inverse = 1 / sqrtf(variance + j->epsilon), gain = j->scale[c] * inverse;
  const double count = (double)j->images * j->plane;
  double sum_g, sum_gd;
  if (j->y)
    sums_of(1, j, c, mean, &sum_g, &sum_gd);
  else
    sums_of(0, j, c, mean, &sum_g, &sum_gd);
  if (j->d_scale) j->d_scale[c] = (float)(inverse * sum_gd);
  if (j->d_bias) j->d_bias[c] = (float)sum_g;
  if (!j->dx || !count) return;
  const float b = (float)(-(double)gain * inverse * inverse * sum_gd / count);
  const float constant = (float)(-gain * sum_g / count);
  if (j->y)
    cotangent_of(1, j, c, mean, gain, b, constant);
  else
    cotangent_of(0, j, c, mean, gain, b, constant);
}

static void forward(void *data, size_t index) {
  const Job *j = data;
  const int64_t c = (int64_t)index;
  const float mean = moment_of(j, c, NULL), variance = moment_of(j, c, &mean);
  const float gain = j->scale[c] / sqrtf(variance + j->epsilon), bias = j->bias[c];
  const lanes means = lanes_of(mean), gains = lanes_of(gain), biases = lanes_of(bias);
  if (j->batch_mean) j->batch_mean[c] = mean;
  if (j->batch_variance) j->batch_variance[c] = variance;
  if (j->centre) j->centre[c] = mean;
  if (j->gain) j->gain[c] = gain;
  if (j->shift) j->shift[c] = bias;
  for (int64_t n = 0; n < j->images && j->out; n++) {
    const int64_t from = (n * j->channels + c) * j->plane;
    const float *x = j->x + from;
    float *to = j->out + from;
    int64_t k = 0;
    for (; k + LANES <= j->plane; k += LANES) *(lanes *)(to + k) = (*(const lanes *)(x + k) - means) * gains + biases;
    for (; k < j->plane; k++) to[k] = (x[k] - mean) * gain + bias;
  }
}

static void sizes(Job *j, const Shape *shape) {
  j->images = shape->dims[0];
  j->channels = shape->dims[1];
  j->plane = 1;
  for (size_t i = 2; i < shape->rank; i++) j->plane *= shape->dims[i];
  if (!shape->count) j->images = 0; /* of nothing */
}

static void read(Attributes *from, void *settings) { *(float *)settings = attribute_float(from, "epsilon"); }

/* (g, x, mean, variance, scale, y of a ReLU) to the cotangents of (x, scale, bias) */
static void compute_grad(Call *call, const void *settings) {
  const Shape shape = shape_of(call, 1), given = shape_of(call, 0), masking = shape_of(call, 5);
  Job j = {.epsilon = *(const float *)settings};
  const float **operands[] = {&j.g, &j.x, &j.mean, &j.variance, &j.scale, &j.y};
  for (size_t i = 0; i < 6; i++) *operands[i] = input(call, i);
  if (call->failed) return;
  int sound = shape.rank >= 2 && same_shape(&shape, &given) && (!j.y || same_shape(&shape, &masking));
  for (size_t i = 2; i < 5; i++) {
    const Shape vector = shape_of(call, i);
    sound = sound && (!*operands[i] || (vector.rank == 1 && vector.count == shape.dims[1]));
  }
  if (!sound) {
    fail(call, "BatchNormGrad: operands do not belong together");
    return;
  }
  const Shape vector = {.rank = 1, .dims = {shape.dims[1]}, .count = shape.dims[1]};
  sizes(&j, &shape);
  j.dx = output(call, 0, &shape);
  j.d_scale = output(call, 1, &vector);
  j.d_bias = output(call, 2, &vector);
  parallel(call, (size_t)j.channels, channel, &j);
}

/* (x, scale, bias) to (y, mean, variance), and to what makes y of x, in as many axes as broadcast over the channels */
static void compute(Call *call, const void *settings) {
  const Shape shape = shape_of(call, 0), scale = shape_of(call, 1), bias = shape_of(call, 2);
  Job j = {.epsilon = *(const float *)settings, .x = input(call, 0), .scale = input(call, 1), .bias = input(call, 2)};
  if (call->failed) return;
  if (shape.rank < 2 || scale.rank != 1 || scale.count != shape.dims[1] || !same_shape(&scale, &bias)) {
    fail(call, "BatchNorm: operands do not belong together");
    return;
  }
  sizes(&j, &shape);
  j.out = output(call, 0, &shape);
  j.batch_mean = output(call, 1, &scale);
  j.batch_variance = output(call, 2, &scale);
  Shape column = {.rank = shape.rank - 1, .dims = {shape.dims[1]}, .count = shape.dims[1]};
  for (size_t i = 1; i < column.rank; i++) column.dims[i] = 1;
  j.centre = output(call, 3, &column);
  j.gain = output(call, 4, &column);
  j.shift = output(call, 5, &column);
  if (call->failed) return;
  parallel(call, (size_t)j.channels, forward, &j);
}

const Kernel normalization_kernels[] = {
    {"BatchNorm", "fff", "FFFFFF", sizeof(float), read, compute},
    {"BatchNormGrad", "ffFFfF", "FFF", sizeof(float), read, compute_grad},
    {0},
};
