/* The cotangents of LayerNormalization.
 *
 * With x^ = (x - mean) * r and the means over the n numbers of a row,
 *
 *   x = r * (g*s - mean g*s - x^ * mean g*s*x^)        scale = sum g * x^        bias = sum g
 *
 * Rows are taken a few at a time: once for the cotangent of x, and once more, while they are near the processor, for
 * the sums over rows. Each band of rows has sums of its own, and these are added up in double.
 */
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
  float *dx, *d_scale, *d_bias, *sums;
  int64_t rows, length, band, bands;
} Job;

/* The cotangent of x, of one row. */
static void row_of(const Job *j, int64_t row) {
  const float *g = j->g + row * j->length, *x = j->x + row * j->length, *s = j->scale;
  const float mean = j->mean[row], inverse = j->inverse[row];
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
        total[half] += here;
        total[2 + half] += here * ((*(const lanes *)(x + at) - means) * inverses);
      }
    float rest = 0, rest_x = 0;
    for (; k < end; k++) {
      const float here = g[k] * s[k];
      rest += here;
      rest_x += here * ((x[k] - mean) * inverse);
    }
    sum += lanes_sum(total[0] + total[1]) + rest;
    sum_x += lanes_sum(total[2] + total[3]) + rest_x;
  }
  const float shift = (float)(sum / (double)j->length), slope = (float)(sum_x / (double)j->length);
  const lanes shifts = lanes_of(shift), slopes = lanes_of(slope);
  for (k = 0; k + LANES <= j->length; k += LANES) {
    const lanes unit = (*(const lanes *)(x + k) - means) * inverses;
    *(lanes *)(to + k) = inverses * (*(const lanes *)(g + k) * *(const lanes *)(s + k) - shifts - unit * slopes);
  }
  for (; k < j->length; k++) {
    const float unit = (x[k] - mean) * inverse;
    to[k] = inverse * (g[k] * s[k] - shift - unit * slope);
  }
}

/* The sums over some rows, added to those of their band. */
static void columns_of(const Job *j, int64_t from, int64_t to, float *d_scale, float *d_bias) {
  int64_t k = 0;
  for (; k + LANES <= j->length; k += LANES) {
    lanes scale = *(const lanes *)(d_scale + k), bias = *(const lanes *)(d_bias + k);
    for (int64_t row = from; row < to; row++) {
      const lanes here = *(const lanes *)(j->g + row * j->length + k);
      scale += here * ((*(const lanes *)(j->x + row * j->length + k) - j->mean[row]) * j->inverse[row]);
      bias += here;
    }
    *(lanes *)(d_scale + k) = scale;
    *(lanes *)(d_bias + k) = bias;
  }
  for (; k < j->length; k++)
    for (int64_t row = from; row < to; row++) {
      const float here = j->g[row * j->length + k], x = j->x[row * j->length + k];
      d_scale[k] += here * ((x - j->mean[row]) * j->inverse[row]);
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
    for (int64_t row = from; row < to && j->dx; row++) row_of(j, row);
    if (sums) columns_of(j, from, to, sums, sums + j->length);
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

static void read(Attributes *from, void *settings) { *(int64_t *)settings = attribute_int(from, "axis"); }

/* Rows and their length; 0 where the scale is not as long. */
static int rows_of(Job *j, const Shape *x, const Shape *scale, int64_t axis) {
  if (axis < 0 || axis >= (int64_t)x->rank) return 0;
  j->rows = j->length = 1;
  for (int64_t i = 0; i < (int64_t)x->rank; i++)
    if (__builtin_mul_overflow(i < axis ? j->rows : j->length, x->dims[i], i < axis ? &j->rows : &j->length)) return 0;
  return scale->count == j->length && j->rows <= MOST_NUMBERS;
}

/* (g, x, mean, 1 / standard deviation, scale) to the cotangents of (x, scale, bias) */
static void compute(Call *call, const void *settings) {
  const Shape g = shape_of(call, 0), x = shape_of(call, 1), mean = shape_of(call, 2), inverse = shape_of(call, 3);
  const Shape scale = shape_of(call, 4);
  Job j = {.g = input(call, 0), .x = input(call, 1), .mean = input(call, 2), .inverse = input(call, 3),
           .scale = input(call, 4)};
  if (call->failed) return;
  if (!rows_of(&j, &x, &scale, *(const int64_t *)settings) || !same_shape(&g, &x) || mean.count != j.rows ||
      inverse.count != j.rows) {
    fail(call, "LayerNormGrad: operands do not belong together");
    return;
  }
  j.dx = output(call, 0, &x);
  j.d_scale = output(call, 1, &scale);
  j.d_bias = output(call, 2, &scale);
  if (!x.count) j.rows = 0;
  j.band = least((j.rows + PIECES - 1) / PIECES, BAND);
  if (j.band < FEWEST) j.band = x.count > SMALL ? FEWEST : j.band + !j.band;
  j.bands = (j.rows + j.band - 1) / j.band;
  if (j.d_scale || j.d_bias) j.sums = scratch(call, 2 * j.bands * j.length, sizeof(float));
  if (call->failed) return;
  parallel(call, (size_t)j.bands, band, &j);
  if (j.sums) parallel_ranges(call, j.length, 512, total, &j);
}

const Kernel row_norm_kernels[] = {
    {"LayerNormGrad", "fffff", "FFF", sizeof(int64_t), read, compute},
    {0},
};
