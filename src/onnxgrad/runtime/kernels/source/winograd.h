/* Convolutions by Winograd's form, and pictures as pixels of channels. */
#pragma once
#include "gemm.h"

/* A convolution: a big side x and a small side y. */
typedef struct {
  int64_t images, groups, m, c; /* m and c are those of one group */
  int64_t size[3], out[3], kernel[3], strides[3], dilations[3], pads[3]; /* of each axis; padding before */
} Correlation;

/* One that is computed, or its transpose that is `turned`: (x, w, a bias or none) to y, whose size is an attribute. */
typedef struct {
  Correlation at;
  int64_t turned, size[3];
  const float *x, *w, *bias;
  float *y;
  int64_t c, m, in[3], out[3]; /* channels of a group of x, and of y; their sizes */
} Convolution;

void read_convolution(Attributes *, void *settings);
/* Operands and results of a call, where they belong together and there is something to do: else 0. */
int open_convolution(Call *, const void *settings, Convolution *);

/* Boxes of at most `room` places, whole along the last axes, and about equally large; where one of them is. */
void cut_box(const int64_t size[4], int64_t room, int64_t box[4]);
void find_box(const int64_t all[4], const int64_t box[4], int64_t unit, int64_t corner[4], int64_t size[4]);

INLINE void clear(float *to, int64_t count) {
  int64_t k = 0;
  for (; k + LANES <= count; k += LANES) *(lanes *)(to + k) = lanes_of(0);
  for (; k < count; k++) to[k] = 0;
}

/* Part of a picture, from row `top` and column `first` on, as to[row][column][channel], with zeros beyond it; its
 * channels are `channel` numbers apart. With `down` and `along`, it is one with zeros between its rows and columns. */
static void lay_pixels(float *to, int64_t rows, int64_t width, int64_t wide, const float *from, int64_t channels,
                       int64_t channel, int64_t h, int64_t w, int64_t top, int64_t first, int64_t down, int64_t along) {
  const int64_t r = top > 0 ? quotient(top, down) : 0, there = least(h, quotient(rows + top, down)) - r;
  const int64_t q = first > 0 ? quotient(first, along) : 0, columns = least(w, quotient(width + first, along)) - q;
  const int64_t above = r * down - top, left = q * along - first, right = left + columns, row = width * wide;
  for (int64_t k = 0; k < rows; k++) {
    const int is_beside = down * along == 1 && k >= above && k < above + there && columns > 0;
    clear(to + k * row, is_beside ? left * wide : row);
    if (is_beside) clear(to + k * row + right * wide, (width - right) * wide);
  }
  if (there <= 0 || columns <= 0) return;
  from += r * w + q, to += above * row + left * wide;
  if (columns == w && down * along == 1) /* rows follow each other */
    turn_rows(to, wide, wide, width, columns, from, channel, channels, there * w);
  else
    for (int64_t k = 0; k < there; k++)
      turn_rows(to + k * down * row, along * wide, wide, columns, columns, from + k * w, channel, channels, columns);
}

/* Whether the cotangent of the weights gains: by the sizes alone. Then, this cotangent. */
int winograd_fits(const Correlation *);
void winograd(Call *, const Correlation *, const float *x, const float *y, float *out);
