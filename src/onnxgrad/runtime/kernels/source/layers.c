/* x·W or x·Wᵀ, with a bias and a ReLU: layers whose rows are short.
 *
 * W is copied as a whole, in the order in which tiles of the result read it, and x is read where it lies: each number
 * of the result is written once. The numbers are the same for every number of threads.
 */
#include <string.h>

#include "kernel.h"
#include "tiles.h"
#include "transposition.h"

enum {
  FEW = 4,                    /* rows of x */
  LINE = 64 / sizeof(float),  /* of a cache */
  TILES = 8,                  /* of a piece, at most, */
  CHUNK = 8 * COLUMNS,        /* and its columns */
};

typedef struct {
  const float *x, *w, *bias; /* [m, k], and [k, n] or [n, k] */
  float *out, *panels, *last, *biases;
  int64_t m, n, k;
  int64_t band, down, across; /* rows of a piece; how many pieces are below and beside each other */
  int turned, relu;
} Layer;

/* Panels of W, of a bias, and zeros beyond them. */
static void lay(void *data, int64_t from, int64_t to) {
  const Layer *j = data;
  for (int64_t q = from * COLUMNS; q < to * COLUMNS; q += COLUMNS) {
    const int64_t columns = least(COLUMNS, j->n - q);
    float *out = j->panels + q * j->k;
    for (int64_t c = 0; c < COLUMNS; c++) j->biases[q + c] = j->bias && c < columns ? j->bias[q + c] : 0;
    if (!j->turned) {
      panels(j->w + q, j->n, j->k, columns, COLUMNS, out);
      continue;
    }
    for (int64_t c = 0; c < COLUMNS; c += LANES) {
      const int64_t there = least(LANES, columns - c);
      const float *w = j->w + (q + c) * j->k;
      int64_t p = 0;
      if (there == LANES)
        for (; p + LANES <= j->k; p += LANES) transpose(out + p * COLUMNS + c, COLUMNS, w + p, j->k);
      for (; p < j->k; p++)
        for (int64_t i = 0; i < LANES; i++) out[p * COLUMNS + c + i] = i < there ? w[i * j->k + p] : 0;
    }
  }
}

/* Rows of x with a panel, of which `rows` and `columns` are written. */
INLINE void layer_tile(const int height, const Layer *j, const float *x, int64_t q, float *out, int64_t rows,
                       int64_t columns) {
  const float *b = j->panels + q * j->k;
  lanes sum[ROWS][2];
#pragma GCC unroll 16
  for (int i = 0; i < height; i++) {
    sum[i][0] = *(const lanes *)(j->biases + q), sum[i][1] = *(const lanes *)(j->biases + q + LANES);
    if (i < rows)
      for (int c = 0; c < COLUMNS; c += LINE) __builtin_prefetch(out + i * j->n + c, 1);
  }
  for (int64_t p = 0; p < j->k; p += LINE) {
#pragma GCC unroll 16
    for (int i = 0; i < height; i++) __builtin_prefetch(x + (ROWS + i) * j->k + p); /* of the tile below */
    add_products(height, least(LINE, j->k - p), x + p, j->k, 1, b + p * COLUMNS, sum);
  }
  if (j->relu) {
#pragma GCC unroll 16
    for (int i = 0; i < height; i++)
      for (int v = 0; v < 2; v++) sum[i][v] = lanes_where(sum[i][v] < 0, lanes_of(0), sum[i][v]);
  }
  if (rows == height && columns == COLUMNS) {
#pragma GCC unroll 16
    for (int i = 0; i < height; i++, out += j->n) *(lanes *)out = sum[i][0], *(lanes *)(out + LANES) = sum[i][1];
    return;
  }
  float part[ROWS][COLUMNS];
#pragma GCC unroll 16
  for (int i = 0; i < height; i++) *(lanes *)part[i] = sum[i][0], *(lanes *)(part[i] + LANES) = sum[i][1];
  for (int64_t i = 0; i < rows; i++) memcpy(out + i * j->n, part[i], columns * sizeof(float));
}

/* Functions of their own, so that sums stay in registers. */
static void layer_whole(const Layer *j, const float *x, int64_t q, float *out, int64_t columns) {
  layer_tile(ROWS, j, x, q, out, ROWS, columns);
}

static void layer_rest(const Layer *j, int64_t q, float *out, int64_t rows, int64_t columns) {
  if (rows > 2 * ROWS / 3)
    layer_tile(ROWS, j, j->last, q, out, rows, columns);
  else if (rows > ROWS / 3)
    layer_tile(2 * ROWS / 3, j, j->last, q, out, rows, columns);
  else
    layer_tile(ROWS / 3, j, j->last, q, out, rows, columns);
}

/* Pieces that share the larger operand follow each other. */
static void layer_piece(void *data, size_t index) {
  const Layer *j = data;
  const int64_t w = (int64_t)index, is_wide = j->n > j->m;
  const int64_t first = (is_wide ? w % j->down : w / j->across) * j->band;
  const int64_t left = (is_wide ? w / j->down : w % j->across) * CHUNK;
  for (int64_t q = left; q < least(j->n, left + CHUNK); q += COLUMNS)
    for (int64_t i = first; i < least(j->m, first + j->band); i += ROWS) {
      float *out = j->out + i * j->n + q;
      if (j->m - i >= ROWS)
        layer_whole(j, j->x + i * j->k, q, out, least(COLUMNS, j->n - q));
      else
        layer_rest(j, q, out, j->m - i, least(COLUMNS, j->n - q));
    }
}

/* Of few rows, as the numbers lie: a copy of W would take longer than the product. */
static void few_rows(void *data, int64_t from, int64_t to) {
  const Layer *j = data;
  const float *x = j->x;
  for (int64_t i = 0; i < j->m; i++, x += j->k) {
    float *out = j->out + i * j->n;
    int64_t q = from;
    for (; !j->turned && q + LANES <= to; q += LANES) {
      lanes sum = lanes_of(0);
      for (int64_t p = 0; p < j->k; p++) sum += lanes_of(x[p]) * *(const lanes *)(j->w + p * j->n + q);
      *(lanes *)(out + q) = sum;
    }
    for (; q < to; q++) {
      const float *w = j->w + (j->turned ? q * j->k : q);
      lanes sums = lanes_of(0);
      int64_t p = 0;
      for (; j->turned && p + LANES <= j->k; p += LANES) sums += *(const lanes *)(x + p) * *(const lanes *)(w + p);
      out[q] = lanes_sum(sums);
      for (; p < j->k; p++) out[q] += x[p] * w[j->turned ? p : p * j->n];
    }
    for (q = from; q < to; q++) {
      const float sum = out[q] + (j->bias ? j->bias[q] : 0);
      out[q] = j->relu && sum < 0 ? 0 : sum;
    }
  }
}

typedef struct {
  int64_t turned, relu;
} Settings;

static void read_layer(Attributes *from, void *settings) {
  ((Settings *)settings)->turned = attribute_int(from, "turned");
  ((Settings *)settings)->relu = attribute_int(from, "relu");
}

/* (x, W, a bias or none) */
static void layer(Call *call, const void *settings) {
  const Settings *s = settings;
  const Shape x = shape_of(call, 0), w = shape_of(call, 1), bias = shape_of(call, 2);
  const float *biases = input(call, 2);
  const int turned = s->turned != 0;
  if (!call->failed && (x.rank < 2 || w.rank != 2 || x.dims[x.rank - 1] != w.dims[turned] || !w.dims[turned] ||
                        (biases && (bias.rank != 1 || bias.dims[0] != w.dims[!turned]))))
    fail(call, "Layer: operands do not belong together");
  if (call->failed) return;
  Layer j = {.x = input(call, 0), .w = input(call, 1), .bias = biases, .m = x.count / w.dims[turned],
             .n = w.dims[!turned], .k = w.dims[turned], .turned = turned, .relu = s->relu != 0};
  if (j.m && j.n > MOST_NUMBERS / j.m) fail(call, "Layer: the result has too many numbers");
  Shape shape = x;
  shape.dims[x.rank - 1] = j.n, shape.count = call->failed ? 0 : j.m * j.n;
  j.out = output(call, 0, &shape);
  if (call->failed || !shape.count) return;
  if (j.m <= FEW) {
    parallel_ranges(call, j.n, COLUMNS, few_rows, &j);
    return;
  }
  const int64_t wide = quotient(j.n, COLUMNS);
  j.panels = scratch(call, wide * COLUMNS * j.k, sizeof(float));
  j.biases = scratch(call, wide * COLUMNS, sizeof(float));
  j.last = scratch(call, ROWS * j.k, sizeof(float));
  if (call->failed) return;
  const int64_t rest = j.m % ROWS;
  memset(j.last + rest * j.k, 0, (ROWS - rest) * j.k * sizeof(float));
  memcpy(j.last, j.x + (j.m - rest) * j.k, rest * j.k * sizeof(float));
  parallel_ranges(call, wide, 1, lay, &j);
  j.across = quotient(j.n, CHUNK);
  j.band = least(TILES, quotient(j.m, 4 * ROWS)) * ROWS;
  j.down = quotient(j.m, j.band);
  parallel(call, (size_t)(j.down * j.across), layer_piece, &j);
}

const Kernel layer_kernels[] = {
    {"Layer", "ffF", "f", sizeof(Settings), read_layer, layer},
    {0},
};
