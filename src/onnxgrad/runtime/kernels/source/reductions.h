/* Shapes and axes of a program: operands that are broadcast, and sums at its end, over any axes, which are added up tile by
 * tile while these are in the cache.
 *
 * What is gone through is cut into pieces, by the sizes alone. Each has sums of its own, in double, and these are added
 * in the order of the pieces: the results are the same for every number of threads. Where the first axis is summed over,
 * and a slice of it is large, a piece is a part of every slice, so that pieces share few results or none. */
#pragma once
#include "moments.h"

/* Axes; pieces at most, numbers of a piece at least, and of a slice that is cut; results that are added up together;
 * what rows are shorter than that are gone through several at a time. */
enum { AXES = 8, PIECES = 16, PIECE_LEAST = 8192, SLICE_LEAST = 32768, RESULTS_TOGETHER = 1024, SHORT = 64 };

/* What becomes of axes that are summed over. */
enum { GO, STAY, FLAT, WHAT_BECOMES };

/* `shape` as what it and `other` broadcast to; false where they do not. */
static inline int broadcast(Shape *shape, const Shape *other) {
  const size_t rank = shape->rank > other->rank ? shape->rank : other->rank;
  for (size_t k = 1; k <= rank; k++) { /* from the last axis on, so that none is overwritten that is yet to be read */
    const int64_t a = k > shape->rank ? 1 : shape->dims[shape->rank - k];
    const int64_t b = k > other->rank ? 1 : other->dims[other->rank - k];
    if (a != b && a != 1 && b != 1) return 0;
    shape->dims[rank - k] = a == 1 ? b : a;
  }
  shape->rank = rank;
  return 1;
}

/* `shape` without the axes of which `gone` has a bit, from the last one on. */
static inline Shape without_axes(const Shape *shape, int32_t gone, int32_t becomes) {
  Shape found = {.rank = 0, .count = 1};
  for (size_t k = 0; k < shape->rank; k++) {
    const int goes = gone >> (shape->rank - 1 - k) & 1;
    if (!goes || becomes == STAY) found.dims[found.rank++] = goes ? 1 : shape->dims[k];
    if (!goes) found.count *= shape->dims[k];
  }
  if (becomes == FLAT) found = (Shape){.rank = 1, .dims = {found.count}, .count = found.count};
  return found;
}

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
  for (size_t k = 0; k < axes->count; k++) {
    place.at[k] = at[k], place.offset += at[k] * strides[k];
    __asm__("" : "+r"(place.offset)); /* no vectors: these would wait until what has just been put there is in memory */
  }
  return place;
}

/* The next of `count` numbers: what is left of a row of the last axis, or whole rows that lie side by side along the one
 * before, if rows are short. How many rows, of `width` numbers each. */
static inline int64_t rows_at(const Place *place, const Axes *axes, int64_t count, int64_t *width) {
  const size_t last = axes->count - 1;
  *width = least(count, axes->dims[last] - place->at[last]);
  if (!last || *width < axes->dims[last] || *width >= SHORT) return 1;
  return least(count / *width, axes->dims[last - 1] - place->at[last - 1]);
}

/* To the beginning of the row behind these. */
static inline void next_row(Place *place, const Axes *axes, const int64_t *strides, int64_t rows) {
  const size_t last = axes->count - 1;
  place->offset -= place->at[last] * strides[last], place->at[last] = 0;
  for (size_t k = last; k-- > 0; rows = 1) {
    place->offset += rows * strides[k];
    if ((place->at[k] += rows) < axes->dims[k]) break;
    place->offset -= axes->dims[k] * strides[k], place->at[k] = 0;
  }
}

typedef struct {
  const char *data;
  int64_t strides[AXES]; /* in elements, over the axes of the job; 0 along one that is broadcast */
  int direct, periodic;  /* read where it lies; the same for each tile */
  int bytes;             /* of an element: those of a number, or 1 for bool */
} Source;

INLINE natural number_at(const Source *source, int64_t at) {
  return source->bytes > 1 ? ((const natural *)source->data)[at] : source->data[at] ? (natural)-1 : 0;
}

/* Rows of `width` numbers that lie `stride` apart, or of one number each. */
static inline void spread_rows(natural *to, const Source *source, int64_t at, int64_t stride, int single, int64_t rows,
                               int64_t width) {
  const natural *from = (const natural *)source->data + at;
  if (single) {
    for (int64_t r = 0; r < rows; r++) {
      const natural one = number_at(source, at + r * stride);
      for (int64_t i = 0; i < width; i++) to[r * width + i] = one;
    }
  } else if (source->bytes == 1) {
    for (int64_t r = 0; r < rows; r++)
      for (int64_t i = 0; i < width; i++) to[r * width + i] = source->data[at + r * stride + i] ? (natural)-1 : 0;
  } else if (stride) {
    for (int64_t r = 0; r < rows; r++)
      for (int64_t i = 0; i < width; i++) to[r * width + i] = from[r * stride + i];
  } else { /* the same row: what is there already, once more */
    memcpy(to, from, (size_t)width * sizeof *to);
    for (int64_t there = 1; there < rows; there *= 2)
      memcpy(to + there * width, to, (size_t)(least(there, rows - there) * width) * sizeof *to);
  }
}

/* `count` elements of a broadcast operand from the place `at` on. */
static inline void spread(const Axes *axes, const Source *source, natural *to, const int64_t *at, int64_t count) {
  const size_t last = axes->count - 1;
  Place place = place_in(axes, source->strides, at);
  for (int64_t rows, width; count > 0; count -= rows * width, to += rows * width) {
    rows = rows_at(&place, axes, count, &width);
    spread_rows(to, source, place.offset, rows > 1 ? source->strides[last - 1] : 0, !source->strides[last], rows, width);
    next_row(&place, axes, source->strides, rows);
  }
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

/* Adds rows of `width` numbers to sums, `stride` further on for each row: to one, or `each` number to its own. They are
 * all the first one where there is a `single` one. */
static void add_rows(double *sums, int64_t stride, int each, int single, const real *x, int64_t rows, int64_t width) {
  if (single) {
    for (int64_t r = 0; r < rows; r++)
      for (int64_t i = 0; i < (each ? width : 1); i++) sums[r * stride + i] += *x * (each ? 1 : (double)width);
  } else if (!each) {
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

/* Adds `count` numbers from the place `at` on to the sums of a piece. */
static void add_up(const Axes *axes, const Sum *sum, int piece, int single, const real *x, const int64_t *at,
                   int64_t count) {
  const int64_t begin = sum->start[piece] - sum->first[piece];
  const size_t last = axes->count - 1;
  Place place = place_in(axes, sum->strides, at);
  for (int64_t rows, width; count > 0; count -= rows * width) {
    rows = rows_at(&place, axes, count, &width);
    double *here = sum->sums + (begin + place.offset);
    if (sum->strides[last] || single || rows > 1)
      add_rows(here, rows > 1 ? sum->strides[last - 1] : 1, sum->strides[last] != 0, single, x, rows, width);
    else
      *here += sums_of(FIRST_SUM, &(Numbers){.x = x}, 0, 1, 0, width, 0).u;
    x += single ? 0 : rows * width;
    next_row(&place, axes, sum->strides, rows);
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
