/* The cotangents of LayerNormalization and RMSNormalization, and the latter itself.
 *
 * With x^ = (x - mean) * r, without the mean for RMSNormalization, and the means over the n numbers of a row,
 *
 *   x = r * (g*s - mean g*s - x^ * mean g*s*x^)        scale = sum g * x^        bias = sum g
 *
 * Rows are taken a few at a time: once for the cotangent of x, and once more, while they are near the processor, for
 * the sums over rows. Each band of rows has sums of its own, and these are added up in double.
 */
#include <math.h>
#include <string.h>

#include "kernel.h"
#include "lanes.h"
#include "moments.h"

enum {
  BLOCK = 8,   /* rows taken together */
  BAND = 64,   /* rows of a band, at most, */
  FEWEST = 16, /* and at least, where more than this many numbers make its sums large */
  SMALL = 1 << 20,
  PIECES = 16, /* bands that are enough for all threads */
};

typedef struct {
  const float *g, *x, *mean, *inverse, *scale;
  float *out, *dx, *d_scale, *d_bias, *inverses, *sums, epsilon;
  int64_t rows, length, band, bands;
  int centred;
} Job;

/* r of a row of RMSNormalization */
static float inverse_of(const Job *j, const float *x) {
  return 1 / sqrtf((float)(power_sum(1, x, j->length, 0) / (double)j->length) + j->epsilon);
}
/* The cotangent of x, of one row. */
INLINE void row_of(const int centred, const Job *j, int64_t row, float inverse) {
  const float *g = j->g + row * j->length, *x = j->x + row * j->length, *s = j->scale;
  const float mean = centred ? j->mean[row] : 0;
  const lanes means = lanes_of(mean), inverses = lanes_of(inverse);
  float *to = j->dx + row * j->length;
  double sum = 0, sum_x = 0;
  int64_t k = 0;
  for (int64_t start = 0; start < j->length; start += TOGETHER) {
    const int64_t end = least(start + TOGETHER, j->length);
    lanes total[4] = {{0}};
    for (; k + 2 * LANES <= end; k += 2 * LANES)
      for (int half = 0; half < 2; half++) {
        const int64_t at = k + half * LANES;
        const lanes here = *(const lanes *)(g + at) * *(const lanes *)(s + at);
        if (centred) total[half] += here;
        total[2 + half] += here * ((*(const lanes *)(x + at) - means) * inverses);
      }
    float rest = 0, rest_x = 0;
    for (; k < end; k++) {
      const float here = g[k] * s[k];
      rest += here;
      rest_x += here * ((x[k] - mean) * inverse);
    }
    if (centred) sum += lanes_sum(total[0] + total[1]) + rest;
    sum_x += lanes_sum(total[2] + total[3]) + rest_x;
  }
  const float shift = (float)(sum / (double)j->length), slope = (float)(sum_x / (double)j->length);
  const lanes shifts = lanes_of(shift), slopes = lanes_of(slope);
  for (k = 0; k + LANES <= j->length; k += LANES) {
    lanes here = *(const lanes *)(g + k) * *(const lanes *)(s + k);
    const lanes unit = (*(const lanes *)(x + k) - means) * inverses;
    if (centred) here -= shifts;
    *(lanes *)(to + k) = inverses * (here - unit * slopes);
  }
  for (; k < j->length; k++) {
    const float unit = (x[k] - mean) * inverse, here = g[k] * s[k];
    to[k] = inverse * ((centred ? here - shift : here) - unit * slope);
  }
}

/* The sums over some rows, added to those of their band. */
INLINE void columns_of(const int centred, const Job *j, int64_t from, int64_t to, float *d_scale, float *d_bias) {
  int64_t k = 0;
  for (; k + LANES <= j->length; k += LANES) {
    lanes scale = *(const lanes *)(d_scale + k), bias = *(const lanes *)(d_bias + k);
    for (int64_t row = from; row < to; row++) {
      const lanes here = *(const lanes *)(j->g + row * j->length + k);
      lanes x = *(const lanes *)(j->x + row * j->length + k);
      if (centred) x -= j->mean[row];
      scale += here * (x * j->inverse[row]);
      bias += here;
    }
    *(lanes *)(d_scale + k) = scale;
    *(lanes *)(d_bias + k) = bias;
  }
  for (; k < j->length; k++)
    for (int64_t row = from; row < to; row++) {
      const float here = j->g[row * j->length + k], x = j->x[row * j->length + k];
      d_scale[k] += here * ((centred ? x - j->mean[row] : x) * j->inverse[row]);
      d_bias[k] += here;
    }
}

static void band(void *data, size_t index) {
  const Job *j = data;
  const int64_t first = (int64_t)index * j->band, last = least(first + j->band, j->rows);
  float *sums = j->sums ? j->sums + 2 * (int64_t)index * j->length : NULL;
  if (sums) memset(sums, 0, 2 * j->length * sizeof(float));
  for (int64_t from = first; from < last; from += BLOCK) {
    const int64_t to = least(from + BLOCK, last);
    for (int64_t row = from; row < to; row++) {
      if (j->inverses) j->inverses[row] = inverse_of(j, j->x + row * j->length);
      if (!j->dx) continue;
      if (j->centred)
        row_of(1, j, row, j->inverse[row]);
      else
        row_of(0, j, row, j->inverse[row]);
    }
    if (!sums) continue;
    if (j->centred)
      columns_of(1, j, from, to, sums, sums + j->length);
    else
      columns_of(0, j, from, to, sums, sums + j->length);
  }
}

static void total(void *data, int64_t from, int64_t to) {
  const Job *j = data;
  for (int64_t k = from; k < to; k++) {
    double scale = 0, bias = 0;
    for (int64_t i = 0; i < j->bands; i++) {
      scale += j->sums[2 * i * j->length + k];
      bias += j->sums[(2 * i + 1) * j->length + k];
    }
    if (j->d_scale) j->d_scale[k] = (float)scale;
    if (j->d_bias) j->d_bias[k] = (float)bias;
  }
}

typedef struct {
  int64_t axis;
  float epsilon;
} Settings;

static void read_axis(Attributes *from, void *settings) { ((Settings *)settings)->axis = attribute_int(from, "axis"); }

static void read_rms(Attributes *from, void *settings) {
  read_axis(from, settings);
  ((Settings *)settings)->epsilon = attribute_float(from, "epsilon");
}

/* Rows and their length; 0 where the scale is not as long. */
static int rows_of(Job *j, const Shape *x, const Shape *scale, int64_t axis) {
  if (axis < 0 || axis >= (int64_t)x->rank) return 0;
  j->rows = j->length = 1;
  for (int64_t i = 0; i < (int64_t)x->rank; i++)
    if (__builtin_mul_overflow(i < axis ? j->rows : j->length, x->dims[i], i < axis ? &j->rows : &j->length)) return 0;
  return scale->count == j->length && j->rows <= MOST_NUMBERS;
}

static void pull(Call *call, Job *j, const Shape *x, const Shape *scale) {
  j->dx = output(call, 0, x);
  j->d_scale = output(call, 1, scale);
  if (j->centred) j->d_bias = output(call, 2, scale);
  if (!x->count) j->rows = 0;
  j->band = least((j->rows + PIECES - 1) / PIECES, BAND);
  if (j->band < FEWEST) j->band = x->count > SMALL ? FEWEST : j->band + !j->band;
  j->bands = (j->rows + j->band - 1) / j->band;
  if (j->d_scale || j->d_bias) j->sums = scratch(call, 2 * j->bands * j->length, sizeof(float));
  if (!j->inverse) j->inverse = j->inverses = scratch(call, j->rows, sizeof(float));
  if (call->failed) return;
  parallel(call, (size_t)j->bands, band, j);
  if (j->sums) parallel_ranges(call, j->length, 512, total, j);
}

/* (g, x, mean, 1 / standard deviation, scale) to the cotangents of (x, scale, bias) */
static void compute_layer(Call *call, const void *settings) {
  const Shape g = shape_of(call, 0), x = shape_of(call, 1), mean = shape_of(call, 2), inverse = shape_of(call, 3);
  const Shape scale = shape_of(call, 4);
  Job j = {.g = input(call, 0), .x = input(call, 1), .mean = input(call, 2), .inverse = input(call, 3),
           .scale = input(call, 4), .centred = 1};
  if (call->failed) return;
  if (!rows_of(&j, &x, &scale, ((const Settings *)settings)->axis) || !same_shape(&g, &x) || mean.count != j.rows ||
      inverse.count != j.rows) {
    fail(call, "LayerNormGrad: operands do not belong together");
    return;
  }
  pull(call, &j, &x, &scale);
}

/* (g, x, scale) to the cotangents of (x, scale) */
static void compute_rms_grad(Call *call, const void *settings) {
  const Settings *s = settings;
  const Shape g = shape_of(call, 0), x = shape_of(call, 1), scale = shape_of(call, 2);
  Job j = {.g = input(call, 0), .x = input(call, 1), .scale = input(call, 2), .epsilon = s->epsilon};
  if (call->failed) return;
  if (!rows_of(&j, &x, &scale, s->axis) || !same_shape(&g, &x)) {
    fail(call, "RMSNormGrad: operands do not belong together");
    return;
  }
  pull(call, &j, &x, &scale);
}

static void forward(void *data, int64_t from, int64_t to) {
  const Job *j = data;
  for (int64_t row = from; row < to; row++) {
    const float *x = j->x + row * j->length, inverse = inverse_of(j, x);
    float *out = j->out + row * j->length;
    int64_t k = 0;
    for (; k + LANES <= j->length; k += LANES)
      *(lanes *)(out + k) = *(const lanes *)(x + k) * inverse * *(const lanes *)(j->scale + k);
    for (; k < j->length; k++) out[k] = x[k] * inverse * j->scale[k];
  }
}

/* (x, scale) to y */
static void compute_rms(Call *call, const void *settings) {
  const Settings *s = settings;
  const Shape x = shape_of(call, 0), scale = shape_of(call, 1);
  Job j = {.x = input(call, 0), .scale = input(call, 1), .epsilon = s->epsilon};
  if (call->failed) return;
  if (!rows_of(&j, &x, &scale, s->axis)) {
    fail(call, "RMSNorm: operands do not belong together");
    return;
  }
  j.out = output(call, 0, &x);
  if (!call->failed && x.count) parallel_ranges(call, j.rows, 4096 / j.length + 1, forward, &j);
}

const Kernel row_norm_kernels[] = {
    {"LayerNormGrad", "fffff", "FFF", sizeof(Settings), read_axis, compute_layer},
    {"RMSNorm", "ff", "f", sizeof(Settings), read_rms, compute_rms},
    {"RMSNormGrad", "fff", "FF", sizeof(Settings), read_rms, compute_rms_grad},
    {0},
};
