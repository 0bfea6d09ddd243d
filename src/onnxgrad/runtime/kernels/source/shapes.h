/* Shapes of results: what operands broadcast to, and that without the axes of a sum. */
#ifndef ONNXGRAD_SHAPES_H
#define ONNXGRAD_SHAPES_H
#include <string.h>

#include "kernel.h"

/* What becomes of axes that are summed over. */
enum { GO, STAY, FLAT, WHAT_BECOMES };

/* `shape` as what it and `other` broadcast to; false where they do not. */
static inline int broadcast(Shape *shape, const Shape *other) {
  if (other->rank > shape->rank) {
    const size_t more = other->rank - shape->rank;
    memmove(shape->dims + more, shape->dims, shape->rank * sizeof *shape->dims);
    for (size_t k = 0; k < more; k++) shape->dims[k] = 1;
    shape->rank = other->rank;
  }
  const size_t more = shape->rank - other->rank;
  for (size_t k = 0; k < other->rank; k++) {
    int64_t *dim = &shape->dims[more + k];
    if (*dim == 1)
      *dim = other->dims[k];
    else if (other->dims[k] != 1 && other->dims[k] != *dim)
      return 0;
  }
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

#endif
