/* xᵀ·g, the cotangent of W in x·W: sums over the rows of both.
 *
 * As in Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008): strips of both operands are
 * copied so that a tile of the result, held in registers, reads them one number after the other. Sums over many rows
 * are divided too, and their parts added in order; how anything is divided depends on the sizes alone, so the numbers
 * are the same for every number of threads.
 */
#include <string.h>

#include "kernel.h"
#include "tiles.h"

enum {
  DEPTH = 192,     /* of the strips: one of b with COLUMNS stays in the first cache */
  BAND = 240,      /* rows of the result that are computed together, at most */
  WIDTH = 512,     /* and columns */
  PIECE = 1 << 24, /* multiplications of a piece, where that gives enough of them */
  FEW = 4,         /* rows of the operands */
  SHARES = 32,     /* pieces that are enough, and most threads at work */
};

typedef struct {
  const float *x, *g; /* [k, m], [k, n] */
  float *out, *memory;
  int64_t m, n, k;
  int64_t band, width, depth; /* of a piece */
  int64_t across, down, deep; /* how many there are */
  int64_t strip;              /* of the sums of a piece */
  int64_t workers, slot;
  uint32_t taken; /* slots of memory, a bit each */
} Job;

/* A tile of the result from a panel of each operand; added to what is there, but for the first strip. */
INLINE void tile(const int height, int64_t depth, const float *a, const float *b, float *out, int64_t stride,
                 int64_t rows, int64_t columns, int first) {
  lanes sum[ROWS][2];
#pragma GCC unroll 16
  for (int i = 0; i < height; i++) sum[i][0] = sum[i][1] = lanes_of(0);
  add_products(height, depth, a, 1, ROWS, b, sum);
  if (rows == height && columns == COLUMNS) {
#pragma GCC unroll 16
    for (int i = 0; i < height; i++, out += stride) {
      if (!first) sum[i][0] += *(lanes *)out, sum[i][1] += *(lanes *)(out + LANES);
      *(lanes *)out = sum[i][0], *(lanes *)(out + LANES) = sum[i][1];
    }
    return;
  }
  float part[ROWS][COLUMNS];
#pragma GCC unroll 16
  for (int i = 0; i < height; i++) *(lanes *)part[i] = sum[i][0], *(lanes *)(part[i] + LANES) = sum[i][1];
  for (int64_t i = 0; i < rows; i++, out += stride)
    for (int64_t j = 0; j < columns; j++) out[j] = first ? part[i][j] : out[j] + part[i][j];
}

/* Functions of their own, so that sums stay in registers. */
static void whole(int64_t depth, const float *a, const float *b, float *out, int64_t stride, int64_t columns, int first) {
  tile(ROWS, depth, a, b, out, stride, ROWS, columns, first);
}

static void rest(int64_t depth, const float *a, const float *b, float *out, int64_t stride, int64_t rows,
                 int64_t columns, int first) {
  if (rows > 2 * ROWS / 3)
    tile(ROWS, depth, a, b, out, stride, rows, columns, first);
  else if (rows > ROWS / 3)
    tile(2 * ROWS / 3, depth, a, b, out, stride, rows, columns, first);
  else
    tile(ROWS / 3, depth, a, b, out, stride, rows, columns, first);
}

static void piece(const Job *j, int64_t index, float *a, float *b) {
  const int64_t column = index % j->across * j->width, row = index / j->across % j->down * j->band;
  const int64_t part = index / (j->across * j->down), last = least((part + 1) * j->depth, j->k);
  const int64_t columns = least(j->width, j->n - column), rows = least(j->band, j->m - row);
  float *out = j->out + part * j->m * j->n + row * j->n + column;
  int64_t at = part * j->depth, depth;
  do {
    depth = least(j->strip, last - at);
    panels(j->x + at * j->m + row, j->m, depth, rows, ROWS, a);
    panels(j->g + at * j->n + column, j->n, depth, columns, COLUMNS, b);
    for (int64_t q = 0; q < columns; q += COLUMNS)
      for (int64_t i = 0; i < rows; i += ROWS) {
        const float *left = a + i * depth, *right = b + q * depth;
        float *to = out + i * j->n + q;
        if (rows - i >= ROWS)
          whole(depth, left, right, to, j->n, least(COLUMNS, columns - q), at == part * j->depth);
        else
          rest(depth, left, right, to, j->n, rows - i, least(COLUMNS, columns - q), at == part * j->depth);
      }
    at += depth;
  } while (at < last);
}

/* The first slot that is free: one thread has but one, which stays in its cache. */
static int claim(uint32_t *taken) {
  uint32_t seen = __atomic_load_n(taken, __ATOMIC_RELAXED);
  for (;;) {
    const int slot = __builtin_ctz(~seen);
    if (__atomic_compare_exchange_n(taken, &seen, seen | 1u << slot, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) return slot;
  }
}

static void worker(void *data, size_t index) {
  Job *j = data;
  const int64_t w = (int64_t)index, pieces = j->across * j->down * j->deep;
  const int slot = claim(&j->taken);
  float *a = j->memory + slot * j->slot, *b = a + (j->band + ROWS) * DEPTH;
  for (int64_t i = pieces * w / j->workers; i < pieces * (w + 1) / j->workers; i++) piece(j, i, a, b);
  __atomic_fetch_and(&j->taken, ~(1u << slot), __ATOMIC_RELEASE);
}

typedef struct {
  const float *parts;
  float *out;
  int64_t count, deep;
} Parts;

static void add_up(void *data, int64_t from, int64_t to) {
  const Parts *j = data;
  for (int64_t i = from; i < to; i++) {
    float sum = j->parts[i];
    for (int64_t d = 1; d < j->deep; d++) sum += j->parts[d * j->count + i];
    j->out[i] = sum;
  }
}

static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* How the work is divided: wide pieces first, for whose operands are copied least; then sums; then rows. */
static void divide(Job *j) {
  const double work = (double)j->m * (double)j->n * (double)j->k / PIECE;
  const int64_t wanted = work > SHARES ? SHARES : (int64_t)work + 1;
  j->down = quotient(j->m, BAND);
  j->across = most(quotient(j->n, WIDTH), least(quotient(wanted, j->down), j->n / 256));
  j->deep = most(1, least(quotient(wanted, j->down * j->across), j->k / (2 * DEPTH)));
  j->down = most(j->down, least(quotient(wanted, j->across * j->deep), j->m / (4 * ROWS)));
  j->band = quotient(quotient(j->m, j->down), ROWS) * ROWS;
  j->width = quotient(quotient(j->n, j->across), COLUMNS) * COLUMNS;
  j->depth = most(1, quotient(j->k, j->deep));
  j->strip = quotient(j->depth, quotient(j->depth, DEPTH));
  j->down = quotient(j->m, j->band), j->across = quotient(j->n, j->width), j->deep = most(1, quotient(j->k, j->depth));
  const int64_t pieces = j->down * j->across * j->deep;
  j->workers = least(pieces, SHARES);
  j->slot = (j->band + ROWS + j->width + COLUMNS) * DEPTH;
}

/* Of few rows, as the numbers lie: the result is written once, and there is next to nothing to compute. */
static void few(void *data, int64_t from, int64_t to) {
  const Job *j = data;
  for (int64_t i = from; i < to; i++) {
    float *out = j->out + i * j->n;
    int64_t q = 0;
    for (; q + LANES <= j->n; q += LANES) {
      lanes sum = lanes_of(0);
      for (int64_t p = 0; p < j->k; p++) sum += lanes_of(j->x[p * j->m + i]) * *(const lanes *)(j->g + p * j->n + q);
      *(lanes *)(out + q) = sum;
    }
    for (; q < j->n; q++) {
      float sum = 0;
      for (int64_t p = 0; p < j->k; p++) sum += j->x[p * j->m + i] * j->g[p * j->n + q];
      out[q] = sum;
    }
  }
}

/* (x, g) */
static void product(Call *call, const void *settings) {
  (void)settings;
  const Shape x = shape_of(call, 0), g = shape_of(call, 1);
  if (!call->failed && (x.rank != 2 || g.rank != 2 || x.dims[0] != g.dims[0]))
    fail(call, "ProductGrad: operands do not belong together");
  if (call->failed) return;
  Job j = {.x = input(call, 0), .g = input(call, 1), .m = x.dims[1], .n = g.dims[1], .k = x.dims[0]};
  if (j.m && j.n > MOST_NUMBERS / j.m) fail(call, "ProductGrad: the result has too many numbers");
  const Shape shape = {.rank = 2, .count = call->failed ? 0 : j.m * j.n, .dims = {j.m, j.n}};
  float *out = j.out = output(call, 0, &shape);
  if (call->failed || !shape.count) return;
  if (j.k <= FEW) {
    parallel_ranges(call, j.m, 32, few, &j);
    return;
  }
  divide(&j);
  if (j.deep > 1) j.out = scratch(call, j.deep * shape.count, sizeof(float));
  j.memory = scratch(call, j.workers * j.slot, sizeof(float));
  if (call->failed) return;
  parallel(call, (size_t)j.workers, worker, &j);
  Parts parts = {j.out, out, shape.count, j.deep};
  if (j.deep > 1) parallel_ranges(call, shape.count, 4096, add_up, &parts);
}

const Kernel product_kernels[] = {
    {"ProductGrad", "ff", "f", 0, NULL, product},
    {0},
};
