/* Long dot products of rows of y with rows of x from each tap on: a tile of them at a time, whose sums stay in registers. */
#ifndef ONNXGRAD_DOT_PRODUCTS_H
#define ONNXGRAD_DOT_PRODUCTS_H

#include "kernel.h"
#include "lanes.h"

enum { DEEP = 9 }; /* taps of a tile of one row */

typedef struct {
  const float *y, *x;
  int64_t y_row, y_image, x_image, images, run;
} Span;

/* Adds the sums of four vectors to four numbers in a row. */
INLINE void add_sums(float *out, lanes a, lanes b, lanes c, lanes d) {
#if LANES == 16
#define HALF(v) \
  (SHUFFLE(lanes_8, v, v, 0, 1, 2, 3, 4, 5, 6, 7) + SHUFFLE(lanes_8, v, v, 8, 9, 10, 11, 12, 13, 14, 15))
  const lanes_8 e = HALF(a), f = HALF(b), g = HALF(c), h = HALF(d);
#elif LANES == 8
  const lanes_8 e = a, f = b, g = c, h = d;
#endif
#if LANES >= 8
#define PAIR(v, w) \
  (SHUFFLE(lanes_8, v, w, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(lanes_8, v, w, 4, 5, 6, 7, 12, 13, 14, 15))
  const lanes_8 ef = PAIR(e, f), gh = PAIR(g, h);
  const lanes_8 all = SHUFFLE(lanes_8, ef, gh, 0, 8, 1, 9, 4, 12, 5, 13) +
                      SHUFFLE(lanes_8, ef, gh, 2, 10, 3, 11, 6, 14, 7, 15); /* a c a c b d b d */
  const lanes_4 sums = SHUFFLE(lanes_4, all, all, 0, 4, 1, 5) + SHUFFLE(lanes_4, all, all, 2, 6, 3, 7);
#else
  const lanes_4 sums = {lanes_sum(a), lanes_sum(b), lanes_sum(c), lanes_sum(d)};
#endif
  typedef float four __attribute__((vector_size(16), aligned(4), may_alias));
  *(four *)out += sums;
}

INLINE void tile(const int rows, const int columns, const Span *s, const float *y, const int64_t *offset, float *out,
                 int64_t out_row) {
  lanes sum[TILE_ROWS][DEEP];
  const float *from[DEEP];
#pragma GCC unroll 16
  for (int b = 0; b < columns; b++) from[b] = s->x + offset[b];
#pragma GCC unroll 16
  for (int a = 0; a < rows; a++)
#pragma GCC unroll 16
    for (int b = 0; b < columns; b++) sum[a][b] = (lanes){0};
  const int64_t y_row = s->y_row, run = s->run;
  for (int64_t image = 0; image < s->images; image++) {
    for (int64_t p = 0; p < run; p += LANES) {
      lanes left[TILE_ROWS];
#pragma GCC unroll 16
      for (int a = 0; a < rows; a++) left[a] = *(const lanes *)(y + a * y_row + p);
#pragma GCC unroll 16
      for (int b = 0; b < columns; b++) {
        lanes right = *(const lanes *)(from[b] + p);
        HELD(right);
#pragma GCC unroll 16
        for (int a = 0; a < rows; a++) sum[a][b] += left[a] * right;
      }
    }
    y += s->y_image;
#pragma GCC unroll 16
    for (int b = 0; b < columns; b++) from[b] += s->x_image;
  }
#pragma GCC unroll 16
  for (int b = 0; b < columns; b++) {
    if (rows == 4) {
      add_sums(out + b * out_row, sum[0][b], sum[1][b], sum[2][b], sum[rows - 1][b]);
    } else {
#pragma GCC unroll 16
      for (int a = 0; a < rows; a++) out[b * out_row + a] += lanes_sum(sum[a][b]);
    }
  }
}

#define TILE(R, C) \
  case C: tile(R, C, s, y, offset, out, out_row); return;

#define TILES_OF(R)                                                                                             \
  static void tiles_##R(int columns, const Span *s, const float *y, const int64_t *offset, float *out,        \
                          int64_t out_row) {                                                                    \
    switch (columns) { TILE(R, 1) TILE(R, 2) TILE(R, 3) TILE(R, 4) TILE(R, 5) TILE(R, 6) }                  \
  }

static void tiles_1(int columns, const Span *s, const float *y, const int64_t *offset, float *out, int64_t out_row) {
  switch (columns) {
    TILE(1, 1) TILE(1, 2) TILE(1, 3) TILE(1, 4) TILE(1, 5) TILE(1, 6) TILE(1, 7) TILE(1, 8) TILE(1, 9)
  }
}
TILES_OF(2)
TILES_OF(3)
#if TILE_ROWS > 3
TILES_OF(4)
#endif

/* All products of the m rows of y with the taps of c channels of x, whose planes are `channel` numbers apart; `tap` is
 * where each tap begins in one. */
static void multiply(const Span *s, const int64_t *tap, int64_t taps, int64_t m, int64_t c, int64_t channel, float *out) {
  const int64_t columns = c * taps, out_row = m;
  const int64_t wide = m == 1 ? DEEP : TILE_COLUMNS;
  for (int64_t b = 0; b < columns; b += wide) {
    const int count = (int)least(wide, columns - b);
    int64_t offset[DEEP] = {0};
    for (int k = 0; k < count; k++) offset[k] = (b + k) / taps * channel + tap[(b + k) % taps];
    for (int64_t a = 0; a < m; a += TILE_ROWS) {
      const float *y = s->y + a * s->y_row;
      float *to = out + b * out_row + a;
      switch (least(m - a, TILE_ROWS)) {
        case 1: tiles_1(count, s, y, offset, to, out_row); break;
        case 2: tiles_2(count, s, y, offset, to, out_row); break;
        case 3: tiles_3(count, s, y, offset, to, out_row); break;
#if TILE_ROWS > 3
        case 4: tiles_4(count, s, y, offset, to, out_row); break;
#endif
      }
    }
  }
}

#endif
