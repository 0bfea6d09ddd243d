/* Convolutions by Winograd's form, and pictures as pixels of channels. */
#pragma once
#include "gemm.h"

/* A convolution: a big side x and a small side y. */
typedef struct {
  int64_t images, groups, m, c; /* m and c are those of one group */
  int64_t size[3], out[3], kernel[3], strides[3], dilations[3], pads[3]; /* of each axis; padding before */
} Correlation;

INLINE void clear(float *to, int64_t count) {
  int64_t k = 0;
  for (; k + LANES <= count; k += LANES) *(lanes *)(to + k) = lanes_of(0);
  for (; k < count; k++) to[k] = 0;
}

/* `some` numbers of a vector of channels, from[i * channel], as to[at[q]]: for i beyond `channels`, zeros. */
INLINE void lay_square(float *to, const int64_t *at, const float *from, int64_t channel, int64_t channels, int64_t some) {
  lanes a[LANES];
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) a[i] = i < channels ? lanes_read(from + i * channel, some, 0) : lanes_of(0);
  turn(a);
#pragma GCC unroll 16
  for (int q = 0; q < LANES; q++)
    if (q < some) *(lanes *)(to + at[q]) = a[q];
}

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
      if (some == LANES)
        lay_square(to + k, at, here, channel, channels - k, LANES);
      else
        lay_square(to + k, at, here, channel, channels - k, some);
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

/* Vectors of channels of `some` pixels, `wide_m` numbers apart, in rows of each channel. */
INLINE void give_square(float *to, int64_t channel, int64_t channels, const float *from, int64_t wide_m, int64_t some) {
  lanes a[LANES];
#pragma GCC unroll 16
  for (int q = 0; q < LANES; q++) a[q] = q < some ? *(const lanes *)(from + q * wide_m) : lanes_of(0);
  turn(a);
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++)
    if (i < channels) lanes_write(to + i * channel, some, a[i]);
}

static inline void give_run(float *to, int64_t channel, int64_t channels, const float *from, int64_t wide_m,
                            int64_t count) {
  for (int64_t p = 0; p < count; p += LANES) {
    if (p + LANES > count) p = most(count - LANES, 0);
    const int64_t some = least(LANES, count - p);
    for (int64_t k = 0; k < channels; k += LANES)
      if (some == LANES && k + LANES <= channels)
        give_square(to + k * channel + p, channel, LANES, from + p * wide_m + k, wide_m, LANES);
      else
        give_square(to + k * channel + p, channel, channels - k, from + p * wide_m + k, wide_m, some);
  }
}

/* Whether the cotangent of the weights gains: by the sizes alone. Then, this cotangent. */
int winograd_fits(const Correlation *);
void winograd(Call *, const Correlation *, const float *x, const float *y, float *out);
