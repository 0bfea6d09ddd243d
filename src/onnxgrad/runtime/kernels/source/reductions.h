/* Sums at the end of a program: over any axes, added up tile by tile while these are in the cache.
 *
 * What is gone through is cut into pieces, by the sizes alone. Each has sums of its own, in double, and these are added
 * in the order of the pieces: the results are the same for every number of threads. Where the first axis is summed over,
 * and a slice of it is large, a piece is a part of every slice, so that pieces share few results or none.
 */
#ifndef ONNXGRAD_REDUCTIONS_H
#define ONNXGRAD_REDUCTIONS_H

#include <string.h>

#include "kernel.h"
#include "lanes.h"
#include "moments.h"

/* Axes; pieces at most, numbers of a piece at least, and of a slice that is cut; results that are added up together;
 * what rows are shorter than that are gone through several at a time. */
enum { AXES = 8, PIECES = 16, PIECE_LEAST = 8192, SLICE_LEAST = 32768, RESULTS_TOGETHER = 1024, SHORT = 64 };

/* The axes that are gone through, the last one fastest. */
typedef struct {
  size_t count;
  int64_t dims[AXES];
} Axes;

/* Where one is: along each axis, and in a tensor whose strides over these are given. */
typedef struct {
  int64_t at[AXES], offset;
} Place;

static inline void find(const Axes *axes, int64_t number, int64_t *at) {
  for (size_t k = axes->count; k-- > 0; number /= axes->dims[k]) at[k] = number % axes->dims[k];
}

static inline void advance(const Axes *axes, int64_t *at, int64_t count) {
  for (size_t k = axes->count; k-- > 0;) {
    at[k] += count;
    if (at[k] < axes->dims[k]) return;
    count = at[k] / axes->dims[k], at[k] %= axes->dims[k];
  }
}

static inline Place place_in(const Axes *axes, const int64_t *strides, const int64_t *at) {
  Place place = {.offset = 0};
  for (size_t k = 0; k < axes->count; k++) place.at[k] = at[k], place.offset += at[k] * strides[k];
  return place;
}

/* To the beginning of the next row of the last axis. */
static inline void next_row(Place *place, const Axes *axes, const int64_t *strides) {
  const size_t last = axes->count - 1;
  place->offset -= place->at[last] * strides[last], place->at[last] = 0;
  for (size_t k = last; k-- > 0;) {
    place->offset += strides[k];
    if (++place->at[k] < axes->dims[k]) break;
    place->offset -= axes->dims[k] * strides[k], place->at[k] = 0;
  }
}

/* How many of `count` numbers are whole rows of the last axis that lie side by side along the one before, if rows are
 * short; in rows. */
static inline int64_t short_rows(const Place *place, const Axes *axes, int64_t count) {
  const size_t last = axes->count - 1;
  if (!last || place->at[last] || axes->dims[last] >= SHORT) return 0;
  return least(count / axes->dims[last], axes->dims[last - 1] - place->at[last - 1]);
}

/* To the row that is `rows` further on, of those of `short_rows`. */
static inline void next_rows(Place *place, const Axes *axes, const int64_t *strides, int64_t rows) {
  const size_t before = axes->count - 2;
  place->offset += (rows - 1) * strides[before], place->at[before] += rows - 1;
  next_row(place, axes, strides);
}

typedef struct {
  real *out;
  int64_t count;         /* of results */
  int64_t strides[AXES]; /* of results; 0 along an axis that is summed over, which follow each other else */
  double divisor;        /* of a mean: how many numbers it is of */
  double *sums;          /* of the pieces, one after the other */
  int64_t first[PIECES], end[PIECES], start[PIECES]; /* the results of a piece, and where its sums are */
} Sum;

typedef struct {
  int64_t slices, size;         /* of each slice, from … to of a piece are its own */
  int64_t count, from[PIECES + 1];
} Pieces;

/* The results that numbers from … last add to, and perhaps some between them. */
static void reach(const Axes *axes, Sum *sum, int piece, int64_t from, int64_t last) {
  int64_t first[AXES], end[AXES], low = 0, high = 0;
  int differ = 0;
  find(axes, from, first);
  find(axes, last, end);
  for (size_t k = 0; k < axes->count; k++) {
    if (!differ) low += first[k] * sum->strides[k];
    high += (differ ? axes->dims[k] - 1 : end[k]) * sum->strides[k];
    differ |= first[k] != end[k];
  }
  sum->first[piece] = low;
  sum->end[piece] = high + 1;
}

/* Cuts all numbers, of which `unit` belong together, for `sums`; how many sums there are in all pieces. */
static int64_t cut_pieces(Pieces *pieces, const Axes *axes, int64_t unit, Sum *const *sums, size_t many) {
  int64_t count = 1, all = 0, results = 0;
  for (size_t k = 0; k < axes->count; k++) count *= axes->dims[k];
  for (size_t s = 0; s < many; s++) results += sums[s]->count;
  pieces->slices = 1;
  if (axes->count > 1 && count / axes->dims[0] >= SLICE_LEAST) {
    pieces->slices = axes->dims[0];
    for (size_t s = 0; s < many; s++)
      if (sums[s]->strides[0]) pieces->slices = 1;
  }
  pieces->size = count / pieces->slices;
  const int64_t numbers = pieces->size;
  pieces->count = least(numbers / PIECE_LEAST + 1, PIECES);
  if (unit == 1) { /* rows, if there are enough for all; else vectors */
    const int64_t row = axes->dims[axes->count - 1];
    unit = numbers / row >= pieces->count ? row : LANES;
  }
  const int64_t units = (numbers + unit - 1) / unit;
  pieces->count = least(pieces->count, units);
  for (;; pieces->count = (pieces->count + 1) / 2) {
    all = 0;
    for (int64_t i = 0; i <= pieces->count; i++) pieces->from[i] = least(units * i / pieces->count * unit, numbers);
    for (int i = 0; i < pieces->count; i++)
      for (size_t s = 0; s < many; s++) {
        reach(axes, sums[s], i, pieces->from[i], pieces->from[i + 1] - 1);
        sums[s]->start[i] = all;
        all += sums[s]->end[i] - sums[s]->first[i];
      }
    if (pieces->count == 1 || all <= results + count / 4 + PIECE_LEAST) return all;
  }
}

INLINE real short_sum(const real *x, int64_t count) {
  lanes total = {0};
  for (int64_t k = 0; k < count; k += LANES) total += lanes_read(x + k, count - k, 0);
  return lanes_sum(total);
}

/* Adds rows of `width` numbers to sums: each to its own ones, `stride` further on, or all to the same. */
static void add_short_rows(double *sums, int64_t stride, int each, const real *x, int64_t rows, int64_t width) {
  if (!each) {
    for (int64_t r = 0; r < rows; r++) sums[r * stride] += short_sum(x + r * width, width);
  } else if (stride) {
    for (int64_t r = 0; r < rows; r++)
      for (int64_t i = 0; i < width; i++) sums[r * stride + i] += x[r * width + i];
  } else {
    int64_t i = 0;
    for (; i + 8 <= width; i += 8) {
      double total[8] = {0};
      for (int64_t r = 0; r < rows; r++)
        for (int k = 0; k < 8; k++) total[k] += x[r * width + i + k];
      for (int k = 0; k < 8; k++) sums[i + k] += total[k];
    }
    for (; i < width; i++)
      for (int64_t r = 0; r < rows; r++) sums[i] += x[r * width + i];
  }
}

/* Adds `count` numbers from the place `at` on to the sums of a piece. They are all the first one where there is a
 * `single` one, of one row. */
static void add_up(const Axes *axes, const Sum *sum, int piece, int single, const real *x, const int64_t *at,
                   int64_t count) {
  const int64_t begin = sum->start[piece] - sum->first[piece];
  const size_t last = axes->count - 1;
  Place place = place_in(axes, sum->strides, at);
  while (count > 0) {
    double *here = sum->sums + (begin + place.offset);
    const int64_t rows = single ? 0 : short_rows(&place, axes, count), width = axes->dims[last];
    if (rows) {
      add_short_rows(here, sum->strides[last - 1], sum->strides[last] != 0, x, rows, width);
      x += rows * width, count -= rows * width;
      next_rows(&place, axes, sum->strides, rows);
      continue;
    }
    const int64_t run = least(count, width - place.at[last]);
    if (sum->strides[last])
      for (int64_t i = 0; i < run; i++) here[i] += x[single ? 0 : i];
    else
      *here += single ? (double)*x * (double)run : sums_of(FIRST_SUM, &(Numbers){.x = x}, 0, 1, 0, run, 0).u;
    x += single ? 0 : run, count -= run;
    next_row(&place, axes, sum->strides);
  }
}

typedef struct {
  const Sum *sum;
  int64_t pieces;
} Total;

/* Results from … to of those of all pieces. */
static void add_pieces(void *data, int64_t from, int64_t to) {
  const Total *total = data;
  const Sum *sum = total->sum;
  double all[RESULTS_TOGETHER];
  for (int64_t start = from; start < to; start += RESULTS_TOGETHER) {
    const int64_t stop = least(start + RESULTS_TOGETHER, to);
    memset(all, 0, sizeof all);
    for (int64_t i = 0; i < total->pieces; i++) {
      const int64_t begin = sum->start[i] - sum->first[i], end = least(sum->end[i], stop);
      for (int64_t k = sum->first[i] > start ? sum->first[i] : start; k < end; k++)
        all[k - start] += sum->sums[begin + k];
    }
    for (int64_t k = start; k < stop; k++) sum->out[k] = (real)(all[k - start] / sum->divisor);
  }
}

#endif
