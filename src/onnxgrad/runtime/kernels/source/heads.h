/* Matrices of heads, seen in a tensor whatever the order of its axes: copies whose rows are whole vectors, and products.
 *
 * Rows are rounded up to vectors, with zeros behind them, so that products need no rest. Sums of a tile of the result are
 * held in registers.
 */
#ifndef ONNXGRAD_HEADS_H
#define ONNXGRAD_HEADS_H

#include <string.h>

#include "kernel.h"
#include "lanes.h"

#if LANES == 16 || defined(__aarch64__)
enum { TILE = 8 }; /* rows of a product whose sums are held in registers, of two vectors each */
#else
enum { TILE = 4 };
#endif

/* Matrices of all heads, over two leading axes, somewhere in a tensor. */
typedef struct {
  float *at;
  int64_t dims[4], strides[4];
} View;

/* --- products of matrices ----------------------------------------------------------------------------------------- */

INLINE int64_t rounded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

/* c = a b, or c += a b, for `rows` rows and 1 or 2 vectors of c; an element of a is a[row * down + k * along]. */
INLINE void tile_of(const int rows, const int vectors, int64_t depth, const float *a, int64_t down, int64_t along,
                    const float *b, int64_t b_pitch, float *c, int64_t c_pitch, const int add) {
  lanes sums[TILE][2] = {{{0}}};
  for (int64_t k = 0; k < depth; k++) {
    const lanes first = *(const lanes *)(b + k * b_pitch);
    const lanes second = vectors > 1 ? *(const lanes *)(b + k * b_pitch + LANES) : first;
    for (int r = 0; r < rows; r++) {
      const lanes here = lanes_of(a[r * down + k * along]);
      sums[r][0] += here * first;
      if (vectors > 1) sums[r][1] += here * second;
    }
  }
  for (int r = 0; r < rows; r++)
    for (int i = 0; i < vectors; i++) {
      lanes *to = (lanes *)(c + r * c_pitch + i * LANES);
      if (add) sums[r][i] += *to;
      *to = sums[r][i];
    }
}

INLINE void columns_of(const int vectors, int64_t rows, int64_t depth, const float *a, int64_t down, int64_t along,
                       const float *b, int64_t b_pitch, float *c, int64_t c_pitch, const int add) {
  int64_t r = 0;
  for (; r + TILE <= rows; r += TILE)
    tile_of(TILE, vectors, depth, a + r * down, down, along, b, b_pitch, c + r * c_pitch, c_pitch, add);
  for (; r + 2 <= rows; r += 2)
    tile_of(2, vectors, depth, a + r * down, down, along, b, b_pitch, c + r * c_pitch, c_pitch, add);
  for (; r < rows; r++)
    tile_of(1, vectors, depth, a + r * down, down, along, b, b_pitch, c + r * c_pitch, c_pitch, add);
}

INLINE void product_of(const int add, int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t down,
                       int64_t along, const float *b, int64_t b_pitch, float *c, int64_t c_pitch) {
  int64_t k = 0;
  for (; k + 2 * LANES <= columns; k += 2 * LANES)
    columns_of(2, rows, depth, a, down, along, b + k, b_pitch, c + k, c_pitch, add);
  for (; k < columns; k += LANES) columns_of(1, rows, depth, a, down, along, b + k, b_pitch, c + k, c_pitch, add);
}

#define PRODUCT(name, add)                                                                                      \
  static __attribute__((noinline)) void name(int64_t rows, int64_t columns, int64_t depth, const float *a,      \
                                             int64_t down, int64_t along, const float *b, int64_t b_pitch,      \
                                             float *c, int64_t c_pitch) {                                       \
    product_of(add, rows, columns, depth, a, down, along, b, b_pitch, c, c_pitch);                              \
  }
PRODUCT(product, 0)
PRODUCT(add_product, 1)

/* --- copies ------------------------------------------------------------------------------------------------------- */

static float *head_of(const View *v, int64_t head) {
  return v->at + head / v->dims[1] * v->strides[0] + head % v->dims[1] * v->strides[1];
}

/* Asks for the matrix of a head before it is needed: its rows are short and far apart. */
static void expect(const View *v, int64_t head, int64_t heads) {
  if (head >= heads || v->strides[3] != 1) return;
  const float *from = head_of(v, head);
  for (int64_t r = 0; r < v->dims[2]; r++)
    for (int64_t k = 0; k < v->dims[3]; k += 16) __builtin_prefetch(from + r * v->strides[2] + k, 0, 2);
}

/* Some rows of a matrix as vectors, with zeros behind them; and the way back. */
static void packed(const float *from, int64_t down, int64_t along, int64_t rows, int64_t columns, float *to,
                   int64_t pitch) {
  for (int64_t r = 0; r < rows; r++) {
    if (along == 1)
      memcpy(to + r * pitch, from + r * down, (size_t)columns * sizeof(float));
    else
      for (int64_t k = 0; k < columns; k++) to[r * pitch + k] = from[r * down + k * along];
    for (int64_t k = columns; k < pitch; k++) to[r * pitch + k] = 0;
  }
}

static void unpacked(const float *from, int64_t pitch, int64_t rows, int64_t columns, float *to, int64_t down,
                     int64_t along) {
  for (int64_t r = 0; r < rows; r++)
    if (along == 1)
      memcpy(to + r * down, from + r * pitch, (size_t)columns * sizeof(float));
    else
      for (int64_t k = 0; k < columns; k++) to[r * down + k * along] = from[r * pitch + k];
}

/* The transpose of a matrix, [columns, rows], as vectors with zeros behind them. */
static void transposed(const float *from, int64_t down, int64_t along, int64_t rows, int64_t columns, float *to,
                       int64_t pitch) {
  if (along != 1) {
    packed(from, along, down, columns, rows, to, pitch);
    return;
  }
  for (int64_t r = 0; r < rows; r += LANES)
    for (int64_t c = 0; c < columns; c += LANES) {
      lanes block[LANES];
      for (int i = 0; i < LANES; i++)
        block[i] = r + i < rows ? lanes_read(from + (r + i) * down + c, columns - c, 0) : (lanes){0};
      turn(block);
      for (int i = 0; i < LANES && c + i < columns; i++) *(lanes *)(to + (c + i) * pitch + r) = block[i];
    }
}

#endif
