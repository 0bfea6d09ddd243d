/* The cotangent of picking rows: each row of g is added to the row that it was picked from. The rows of g may
 * themselves be picked from a table, as messages along edges are.
 *
 * Columns are divided among the threads, and rows too where they are short; each number is added up by one thread,
 * in the order of the index.
 */
#include <string.h>

#include "kernel.h"
#include "lanes.h"
#include "picked.h"

enum { BLOCK = 32, PIECES = 16 }; /* columns of a piece, at least; pieces of all the work, at most */

typedef struct {
  Picked picked;
  const float *g;
  const int64_t *from; /* the row of g for each place of the index; NULL: its own */
  int64_t sources;     /* rows of g */
  float *out;
  int64_t rows, across, down; /* pieces side by side, and one below the other */
} Job;

static void piece(void *data, size_t i) {
  const Job *j = data;
  const Picked *p = &j->picked;
  const int64_t column = (int64_t)i % j->across, band = (int64_t)i / j->across;
  const int64_t from = p->width * column / j->across, count = p->width * (column + 1) / j->across - from;
  const int64_t first = j->rows * band / j->down, last = j->rows * (band + 1) / j->down, end = first_of(p, last);
  for (int64_t row = first; row < last; row++) memset(j->out + row * p->width + from, 0, count * sizeof(float));
  for (int64_t at = first_of(p, first); at < end; at++) {
    float *to = j->out + row_at(p, at) * p->width + from;
    const int64_t place = j->from ? j->from[place_at(p, at)] : place_at(p, at);
    const float *g = j->g + (place < 0 ? place + j->sources : place) * p->width + from;
    int64_t q = 0;
    for (; q + LANES <= count; q += LANES) *(lanes *)(to + q) += *(const lanes *)(g + q);
    for (; q < count; q++) to[q] += g[q];
  }
}

/* (g, index, the rows that were picked from, for their shape alone, an index of rows of g or none) */
static void gather(Call *call, const int64_t *index) {
  const Shape g = shape_of(call, 0), picked = shape_of(call, 1), x = shape_of(call, 2), from = shape_of(call, 3);
  Job j = {.g = input(call, 0), .from = input(call, 3), .rows = x.rank ? x.dims[0] : 0};
  int64_t width = 1, expected;
  for (size_t i = 1; i < x.rank; i++) width *= x.dims[i];
  j.sources = j.from && g.rank ? g.dims[0] : picked.count;
  if (!x.rank || __builtin_mul_overflow(j.sources, width, &expected) || g.count != expected ||
      (j.from && from.count != picked.count))
    fail(call, "GatherGrad: operands do not belong together");
  for (int64_t k = 0; j.from && k < picked.count; k++)
    if (j.from[k] < -j.sources || j.from[k] >= j.sources) {
      fail(call, "GatherGrad: an index is out of range");
      break;
    }
  j.out = output(call, 0, &x);
  if (picked.count && !call->failed) pick(call, &j.picked, index, picked.count, &x);
  if (call->failed || !x.count) return;
  const int64_t pieces = least((picked.count + j.rows) * width / 4096 + 1, PIECES);
  j.picked.width = width;
  j.across = least(pieces, (width + BLOCK - 1) / BLOCK);
  j.down = least((pieces + j.across - 1) / j.across, j.rows);
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

const Kernel row_kernels[] = {
    {"GatherGrad", "flfL", "f", 0, NULL, gather_64},
    {"GatherGradInt32", "fif", "f", 0, NULL, gather_32},
    {0},
};
