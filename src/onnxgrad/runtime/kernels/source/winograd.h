/* Winograd's form of convolutions of 3×3 taps side by side: 36 products for what takes 144 otherwise.
 *
 * Of d[0 … 5] and g[0 … 2], the four sums d[i] g[0] + d[i + 1] g[1] + d[i + 2] g[2] are A' ((G g) · (B' d)), with six
 * products (Toom and Cook; F(4, 3) of Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2016). Row k
 * of G, and column k of A, are the powers of a point: 0, ±a, ±b and infinity. Here a = 5/8 and b = 3/2: of the points of
 * few binary digits these give the smallest errors, half of those of 1 and 2 (on points see Barabasz and others, "Error
 * Analysis and Improving the Accuracy of Winograd Convolution for Deep Neural Networks", 2020). For the cotangent of the
 * weights g are four numbers, and the sums three.
 *
 * Applied along rows and columns, a tile of 6×6 numbers of x meets one of 4×4 of y. Tiles are transformed in vectors of
 * channels, which are laid side by side for that. Between, there is a product of matrices for each of the 36 places.
 */
#ifndef ONNXGRAD_WINOGRAD_H
#define ONNXGRAD_WINOGRAD_H

#include "gemm.h"
#include "kernel.h"
#include "lanes.h"
#include "windows.h"

enum {
  SIDE = 6,  /* of a tile of x */
  INNER = 4, /* of a tile of y */
  PLACES = SIDE * SIDE,
  GAP = 16, /* numbers between places: at multiples of a page they would displace each other */
};

static const float A = 5.0f / 8, B = 3.0f / 2;

/* For what is made once, and of much or for many. */
typedef double wide __attribute__((vector_size(LANES * 8)));

/* `count` numbers in a row of each channel, as pixels of `wide` channels; each `columns` pixels begin at a multiple of
 * `pitch` of them. */
static void lay_run(float *to, int64_t wide, int64_t pitch, int64_t columns, const float *from, int64_t channel,
                    int64_t channels, int64_t count) {
  for (int64_t p = 0; p < count; p += LANES) {
    if (p + LANES > count) p = most(count - LANES, 0); /* the last ones, some of them once more */
    const int64_t some = least(LANES, count - p);
    int64_t at[LANES], column = p % columns, place = (p / columns * pitch + column) * wide;
    for (int64_t q = 0; q < some; q++, place += wide) {
      at[q] = place;
      if (++column == columns) column = 0, place += (pitch - columns) * wide;
    }
    for (int64_t k = 0; k < wide; k += LANES) {
      const float *here = from + k * channel + p;
      if (some == LANES) {
        lanes a[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
          a[i] = k + i < channels ? *(const lanes *)(here + i * channel) : lanes_of(0);
        turn(a);
#pragma GCC unroll 16
        for (int q = 0; q < LANES; q++) *(lanes *)(to + at[q] + k) = a[q];
      } else {
        for (int64_t q = 0; q < some; q++)
          for (int64_t i = 0; i < LANES; i++) to[at[q] + k + i] = k + i < channels ? here[i * channel + q] : 0;
      }
    }
  }
}

/* Part of a picture, from row `top` and column `first` on, as to[row][column][channel], with zeros beyond it; its
 * channels are `channel` numbers apart. */
static void lay_pixels(float *to, int64_t rows, int64_t width, int64_t wide, const float *from, int64_t channels,
                       int64_t channel, int64_t h, int64_t w, int64_t top, int64_t first) {
  const int64_t above = least(most(-top, 0), rows), below = most(least(h - top, rows), above);
  const int64_t left = least(most(-first, 0), width), right = most(least(w - first, width), left);
  const int64_t columns = right - left, row = width * wide;
  clear(to, above * row);
  clear(to + below * row, (rows - below) * row);
  if (left || right < width)
    for (int64_t r = above; r < below; r++) {
      clear(to + r * row, left * wide);
      clear(to + r * row + right * wide, (width - right) * wide);
    }
  if (!columns || above == below) return;
  const float *start = from + (top + above) * w + first + left;
  to += above * row + left * wide;
  if (columns == w) /* rows follow each other */
    lay_run(to, wide, width, columns, start, channel, channels, (below - above) * w);
  else
    for (int64_t r = 0; r < below - above; r++)
      lay_run(to + r * row, wide, width, columns, start + r * w, channel, channels, columns);
}

/* B' d */
INLINE void spread_six(lanes to[SIDE], const lanes d[SIDE]) {
  const lanes near = d[4] - B * B * d[2], far = d[4] - A * A * d[2];
  const lanes odd = A * (d[3] - B * B * d[1]), odder = B * (d[3] - A * A * d[1]);
  to[0] = A * A * B * B * d[0] - (A * A + B * B) * d[2] + d[4];
  to[1] = near + odd, to[2] = near - odd;
  to[3] = far + odder, to[4] = far - odder;
  to[5] = A * A * B * B * d[1] - (A * A + B * B) * d[3] + d[5];
}

/* Tiles of x side by side, laid out six rows high: B' d B, by place. */
static void transform_x(float *to, int64_t place, const float *from, int64_t across, int64_t wide_c) {
  const int64_t row = (INNER * across + 2) * wide_c;
  for (int64_t t = 0; t < across; t++)
    for (int64_t k = 0; k < wide_c; k += LANES) {
      const float *here = from + INNER * t * wide_c + k;
      lanes half[SIDE][SIDE];
#pragma GCC unroll 6
      for (int q = 0; q < SIDE; q++) {
        lanes d[SIDE], column[SIDE];
#pragma GCC unroll 6
        for (int i = 0; i < SIDE; i++) d[i] = *(const lanes *)(here + i * row + q * wide_c);
        spread_six(column, d);
#pragma GCC unroll 6
        for (int i = 0; i < SIDE; i++) half[i][q] = column[i];
      }
      float *out = to + t * wide_c + k;
#pragma GCC unroll 6
      for (int i = 0; i < SIDE; i++) {
        lanes all[SIDE];
        spread_six(all, half[i]);
#pragma GCC unroll 6
        for (int q = 0; q < SIDE; q++) *(lanes *)(out + (SIDE * i + q) * place) = all[q];
      }
    }
}

/* The sums over `count` tiles or channels: sums[row][m] of x[k * x_step + row * x_row] and rows of y; `fresh` if nothing
 * is there yet. */
static void add_products(const float *x, int64_t x_step, int64_t x_row, int64_t rows, const float *y, int64_t wide_m,
                         int64_t count, float *sums, int fresh) {
  gemm(&(Product){.a = x, .b = y, .c = sums, .add = fresh ? NULL : sums, .rows = rows, .columns = wide_m,
                  .count = {1, 1, count}, .a_step = {0, 0, x_step}, .b_step = {0, 0, wide_m}, .down = x_row,
                  .panel = COLUMNS, .add_pitch = wide_m, .c_pitch = wide_m});
}

#endif
