/* Operands that are broadcast: tiles of their elements, as those of the shape that is gone through. */
#ifndef ONNXGRAD_SPREAD_H
#define ONNXGRAD_SPREAD_H
#include "reductions.h"

typedef struct {
  const char *data;
  int64_t strides[AXES]; /* in elements, over the axes of the job; 0 along one that is broadcast */
  int direct, periodic;  /* read where it lies; the same for each tile */
  int bytes;             /* of an element: those of a number, or 1 for bool */
} Source;

/* Rows of `width` numbers that lie `stride` apart, or of one number each. */
static inline void spread_short_rows(natural *to, const natural *from, int64_t stride, int single, int64_t rows, int64_t width) {
  if (single) {
    for (int64_t r = 0; r < rows; r++)
      for (int64_t i = 0; i < width; i++) to[r * width + i] = from[r * stride];
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
  while (count > 0) {
    const char *from = source->data + place.offset * source->bytes;
    const int64_t rows = source->bytes == 1 ? 0 : short_rows(&place, axes, count), width = axes->dims[last];
    if (rows) {
      spread_short_rows(to, (const natural *)from, source->strides[last - 1], !source->strides[last], rows, width);
      to += rows * width, count -= rows * width;
      next_rows(&place, axes, source->strides, rows);
      continue;
    }
    const int64_t run = least(count, width - place.at[last]);
    if (source->bytes == 1)
      for (int64_t i = 0; i < run; i++) to[i] = from[source->strides[last] ? i : 0] ? (natural)-1 : 0;
    else if (source->strides[last])
      memcpy(to, from, (size_t)run * sizeof *to);
    else
      for (int64_t i = 0; i < run; i++) to[i] = *(const natural *)from;
    to += run, count -= run;
    next_row(&place, axes, source->strides);
  }
}

#endif
