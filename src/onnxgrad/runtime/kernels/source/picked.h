/* Rows that were picked from a table, in the order of the table: what the gradient of an embedding is added to. */
#ifndef ONNXGRAD_PICKED_H
#define ONNXGRAD_PICKED_H

#include <string.h>

#include "kernel.h"

typedef struct {
  const uint64_t *key;  /* sorted: which row, and above it, which place of the index names it; NULL for none */
  int64_t count, width; /* of keys; of a row */
} Picked;

enum { PICKED_BITS = 32, DIGIT = 11 };

static inline int64_t row_at(const Picked *p, int64_t at) { return (int64_t)(p->key[at] >> PICKED_BITS); }
static inline int64_t place_at(const Picked *p, int64_t at) { return (int64_t)(p->key[at] & UINT32_MAX); }

/* The first key of `row` or a later one. */
static inline int64_t first_of(const Picked *p, int64_t row) {
  int64_t from = 0, to = p->count;
  while (from < to) {
    const int64_t middle = from + (to - from) / 2;
    if (row_at(p, middle) < row)
      from = middle + 1;
    else
      to = middle;
  }
  return from;
}

/* Sorts the rows of an index into a table; those of one row stay in their order. */
static void pick(Call *call, Picked *p, const int64_t *index, int64_t count, const Shape *table) {
  const int64_t rows = table->rank ? table->dims[0] : 0;
  if (rows < 1 || rows > UINT32_MAX || count > UINT32_MAX) {
    fail(call, "rows are picked from no table, or too many");
    return;
  }
  uint64_t *key = scratch(call, count, sizeof *key), *other = scratch(call, count, sizeof *key);
  if (call->failed) return;
  for (int64_t k = 0; k < count; k++) {
    const int64_t row = index[k] < 0 ? index[k] + rows : index[k];
    if (row < 0 || row >= rows) {
      fail(call, "an index is out of range");
      return;
    }
    key[k] = (uint64_t)row << PICKED_BITS | (uint64_t)k;
  }
  for (int shift = 0; (rows - 1) >> shift; shift += DIGIT) { /* digit by digit, the lowest first */
    int64_t start[1 << DIGIT] = {0}, sum = 0;
    const uint64_t mask = (1 << DIGIT) - 1;
    for (int64_t k = 0; k < count; k++) start[key[k] >> (PICKED_BITS + shift) & mask]++;
    for (int d = 0; d < 1 << DIGIT; d++) {
      const int64_t here = start[d];
      start[d] = sum, sum += here;
    }
    for (int64_t k = 0; k < count; k++) other[start[key[k] >> (PICKED_BITS + shift) & mask]++] = key[k];
    uint64_t *swap = key;
    key = other, other = swap;
  }
  *p = (Picked){key, count, table->count / rows};
}

#endif
