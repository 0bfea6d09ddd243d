/* The cotangent of picking rows: each row of g is added to the row that it was picked from.
 *
 * Columns are divided among the threads, and rows too where they are short; each number is added up by one thread,
 * in the order of the index.
 */
#include <string.h>

#include "kernel.h"
#include "lanes.h"

enum { BLOCK = 32, PIECES = 16 }; /* columns of a piece, at least; pieces of all the work, at most */

typedef struct {
  const float *g;
  const int64_t *index, *order, *begin; /* the places in g, band by band, and where each band begins; NULL for one */
  float *out;
  int64_t picked, rows, width, across, down; /* pieces side by side, and one below the other */
} Job;

static int64_t band_of(const Job *j, int64_t row) { return ((row + 1) * j->down - 1) / j->rows; }

static void piece(void *data, size_t i) {
  const Job *j = data;
  const int64_t column = (int64_t)i % j->across, band = (int64_t)i / j->across;
  const int64_t from = j->width * column / j->across, count = j->width * (column + 1) / j->across - from;
  const int64_t first = j->rows * band / j->down, last = j->rows * (band + 1) / j->down;
  for (int64_t row = first; row < last; row++) memset(j->out + row * j->width + from, 0, count * sizeof(float));
  const int64_t end = j->order ? j->begin[band + 1] : j->picked;
  for (int64_t at = j->order ? j->begin[band] : 0; at < end; at++) {
    const int64_t k = j->order ? j->order[at] : at;
    float *to = j->out + j->index[k] * j->width + from;
    const float *g = j->g + k * j->width + from;
    int64_t q = 0;
    for (; q + LANES <= count; q += LANES) *(lanes *)(to + q) += *(const lanes *)(g + q);
    for (; q < count; q++) to[q] += g[q];
  }
}

/* (g, index, the rows that were picked from, for their shape alone) */
static void gather(Call *call, const int64_t *index) {
  const Shape g = shape_of(call, 0), picked = shape_of(call, 1), x = shape_of(call, 2);
  Job j = {.g = input(call, 0), .picked = picked.count, .width = 1};
  if (call->failed) return;
  if (x.rank) j.rows = x.dims[0];
  for (size_t i = 1; i < x.rank; i++) j.width *= x.dims[i];
  int64_t expected;
  if (!x.rank || __builtin_mul_overflow(j.picked, j.width, &expected) || g.count != expected) {
    fail(call, "GatherGrad: operands do not belong together");
    return;
  }
  int64_t *from_start = scratch(call, j.picked, sizeof *from_start);
  if (call->failed) return;
  for (int64_t k = 0; k < j.picked; k++) {
    from_start[k] = index[k] < 0 ? index[k] + j.rows : index[k];
    if (from_start[k] < 0 || from_start[k] >= j.rows) {
      fail(call, "GatherGrad: an index is out of range");
      return;
    }
  }
  j.index = from_start;
  j.out = output(call, 0, &x);
  if (call->failed || !x.count) return;
  const int64_t pieces = least((j.picked + j.rows) * j.width / 4096 + 1, PIECES);
  j.across = least(pieces, (j.width + BLOCK - 1) / BLOCK);
  j.down = least((pieces + j.across - 1) / j.across, j.rows);
  if (j.down > 1) {
    int64_t *order = scratch(call, j.picked, sizeof *order), *begin = scratch(call, PIECES + 2, sizeof *begin);
    if (call->failed) return;
    memset(begin, 0, (PIECES + 2) * sizeof *begin);
    for (int64_t k = 0; k < j.picked; k++) begin[band_of(&j, from_start[k]) + 2]++;
    for (int64_t band = 2; band <= j.down; band++) begin[band] += begin[band - 1];
    for (int64_t k = 0; k < j.picked; k++) order[begin[band_of(&j, from_start[k]) + 1]++] = k;
    j.order = order;
    j.begin = begin;
  }
  parallel(call, (size_t)(j.across * j.down), piece, &j);
}

static void gather_64(Call *call, const void *settings) {
  (void)settings;
  const int64_t *index = input(call, 1);
  gather(call, index);
}

static void gather_32(Call *call, const void *settings) {
  (void)settings;
  const Shape shape = shape_of(call, 1);
  const int32_t *index = input(call, 1);
  int64_t *wide = scratch(call, shape.count, sizeof *wide);
  if (call->failed) return;
  for (int64_t k = 0; k < shape.count; k++) wide[k] = index[k];
  gather(call, wide);
}

/* --- ReLU --------------------------------------------------------------------------------------------------------- */

typedef struct {
  const float *g, *y;
  float *out;
} Signs;

static void positive(void *data, int64_t from, int64_t to) {
  const Signs *j = data;
  const lanes_mask one = (lanes_mask)lanes_of(1);
  int64_t k = from;
  for (; k + LANES <= to; k += LANES)
    *(lanes *)(j->out + k) = *(const lanes *)(j->g + k) * (lanes)(one & (*(const lanes *)(j->y + k) > 0));
  for (; k < to; k++) j->out[k] = j->g[k] * (j->y[k] > 0 ? 1.0f : 0.0f);
}

/* (g, y) to g * [y > 0] */
static void relu(Call *call, const void *settings) {
  (void)settings;
  const Shape shape = shape_of(call, 0), other = shape_of(call, 1);
  if (!call->failed && !same_shape(&shape, &other)) fail(call, "ReluGrad: operands do not belong together");
  Signs j = {input(call, 0), input(call, 1), output(call, 0, &shape)};
  if (!call->failed) parallel_ranges(call, shape.count, 4096, positive, &j);
}

const Kernel row_kernels[] = {
    {"GatherGrad", "flf", "f", 0, NULL, gather_64},
    {"GatherGradInt32", "fif", "f", 0, NULL, gather_32},
    {"ReluGrad", "ff", "f", 0, NULL, relu},
    {0},
};
