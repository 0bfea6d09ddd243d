/* Tiles of products of matrices, whose sums are held in registers. */
#ifndef ONNXGRAD_TILES_H
#define ONNXGRAD_TILES_H

#include <string.h>

#include "kernel.h"
#include "lanes.h"

#if defined(__AVX512F__) || defined(__aarch64__)
enum { ROWS = 12 };
#else
enum { ROWS = 6 };
#endif
enum {
  COLUMNS = 2 * LANES,
  AHEAD = 6, /* rows that are asked for before they are copied: they are short and far from each other */
};

INLINE int64_t quotient(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* `count` columns of rows of `stride` numbers, as panels of `width`: [panel][row][width] */
INLINE void panels(const float *x, int64_t stride, int64_t rows, int64_t count, int64_t width, float *out) {
  const int64_t whole = count / width * width, rest = count - whole;
  for (int64_t p = 0; p < rows; p++, x += stride) {
    float *to = out + p * width;
    for (int64_t q = 0; q < whole; q += width, to += rows * width) {
      if (p + AHEAD < rows)
        for (int64_t i = 0; i < width; i += 16) __builtin_prefetch(x + AHEAD * stride + q + i);
      memcpy(to, x + q, width * sizeof(float));
    }
    if (!rest) continue;
    memcpy(to, x + whole, rest * sizeof(float));
    memset(to + rest, 0, (width - rest) * sizeof(float));
  }
}

/* sum[i] += a[i, p]·b[p] over p, where a[i, p] is a[i * down + p * along], and b a panel. */
INLINE void add_products(const int height, int64_t depth, const float *a, int64_t down, int64_t along, const float *b,
                         lanes sum[ROWS][2]) {
  for (int64_t p = 0; p < depth; p++, a += along, b += COLUMNS) {
    const lanes left = *(const lanes *)b, right = *(const lanes *)(b + LANES);
#pragma GCC unroll 16
    for (int i = 0; i < height; i++) {
      const lanes x = lanes_of(a[i * down]);
      sum[i][0] += x * left;
      sum[i][1] += x * right;
    }
  }
}

#endif
