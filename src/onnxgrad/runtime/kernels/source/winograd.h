/* The cotangent of the weights of a 3×3 convolution, with 16 products for what takes 36 otherwise.
 *
 * Of d[0 … 3] and g[0 … 1], the three sums d[i] g[0] + d[i + 1] g[1] are A' ((G g) · (B' d)), with four products
 * (Winograd; F(3, 2) of Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2016):
 *
 *   B' d = d0 - d2, d1 + d2, d2 - d1, d3 - d1     G g = g0, (g0 + g1) / 2, (g0 - g1) / 2, g1
 *   A' s = s0 + s1 + s2, s1 - s2, s1 + s2 + s3
 *
 * along rows and columns: a tile of 2×2 numbers of y and one of 4×4 of x. The sums over all tiles are products of
 * matrices, one for each of the 16 places, and A' is applied to those. Numbers of x and y that are large make the rounding
 * of all nine taps coarser, where it would be that of the taps that they belong to.
 *
 * The tiles are cut into shares by the sizes alone, whose sums are added in order.
 */
#ifndef ONNXGRAD_WINOGRAD_H
#define ONNXGRAD_WINOGRAD_H

#include "kernel.h"
#include "lanes.h"
#include "windows.h"

enum {
  PLACES = 16,
  CHANNELS_LEAST = 32,   /* of x and of y: with fewer, transforming them shows */
  PIXELS_LEAST = 16,     /* of y */
  TILES_LEAST = 16,      /* of a band, */
  BAND = 96 * 1024,      /* whose transformed numbers are about as many, so that they stay near the processor */
  SHARES = 16,
  SUMS = 1 << 21,        /* numbers in the sums of all shares */
};

typedef struct {
  const Correlation *at;
  const float *x, *y;
  float *out, *memory, *sums;
  int64_t down, parts, across; /* rows of tiles of a picture, parts of a row, and tiles of a part */
  int64_t rows;                /* parts of a band, which may be of several pictures */
  int64_t bands, shares, slot;
  int64_t wide_m, wide_c; /* channels, and what is left of a vector */
} Winograd;

/* to[q][k] = from[k][q], of LANES rows of LANES numbers. */
INLINE void transpose(float *to, int64_t to_row, const float *from, int64_t from_row) {
  lanes a[LANES], b[LANES];
#pragma GCC unroll 16
  for (int k = 0; k < LANES; k++) a[k] = *(const lanes *)(from + k * from_row);
#pragma GCC unroll 4
  for (int stage = 1; stage < LANES; stage *= 2) {
#pragma GCC unroll 8
    for (int k = 0; k < LANES / 2; k++) {
#if LANES == 16
      b[2 * k] = SHUFFLE(lanes, a[k], a[k + LANES / 2], LOW_16);
      b[2 * k + 1] = SHUFFLE(lanes, a[k], a[k + LANES / 2], HIGH_16);
#elif LANES == 8
      b[2 * k] = SHUFFLE(lanes, a[k], a[k + LANES / 2], LOW_8);
      b[2 * k + 1] = SHUFFLE(lanes, a[k], a[k + LANES / 2], HIGH_8);
#else
      b[2 * k] = SHUFFLE(lanes, a[k], a[k + LANES / 2], LOW_4);
      b[2 * k + 1] = SHUFFLE(lanes, a[k], a[k + LANES / 2], HIGH_4);
#endif
    }
#pragma GCC unroll 16
    for (int k = 0; k < LANES; k++) a[k] = b[k];
  }
#pragma GCC unroll 16
  for (int k = 0; k < LANES; k++) *(lanes *)(to + k * to_row) = a[k];
}

/* Part of a picture, from row `top` and column `first` on, as to[row][column][channel], with zeros beyond it. */
static void lay_pixels(float *to, int64_t rows, int64_t width, int64_t wide, const float *from, int64_t channels,
                       int64_t h, int64_t w, int64_t top, int64_t first) {
  const int64_t left = most(-first, 0), start = most(first, 0), columns = most(least(w - start, width - left), 0);
  for (int64_t r = 0; r < rows; r++, to += width * wide) {
    if (top + r < 0 || top + r >= h) {
      clear(to, width * wide);
      continue;
    }
    clear(to, left * wide);
    clear(to + (left + columns) * wide, (width - left - columns) * wide);
    for (int64_t k = 0; k < wide; k += LANES) {
      const float *row = from + (k * h + top + r) * w + start;
      float *here = to + left * wide + k;
      const int64_t some = least(LANES, channels - k);
      int64_t q = 0;
      if (some == LANES)
        for (; q + LANES <= columns; q += LANES) transpose(here + q * wide, wide, row + q, h * w);
      for (; q < columns; q++)
        for (int64_t i = 0; i < LANES; i++) here[q * wide + i] = i < some ? row[i * h * w + q] : 0;
    }
  }
}

/* Tiles of x side by side, laid out four rows high: B' d B, by place. */
static void transform_x(float *to, int64_t place, const float *from, int64_t across, int64_t wide) {
  const int64_t row = (2 * across + 2) * wide;
  for (int64_t t = 0; t < across; t++)
    for (int64_t k = 0; k < wide; k += LANES) {
      const float *here = from + 2 * t * wide + k;
      lanes d[4][4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        lanes c[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) c[i] = *(const lanes *)(here + i * row + j * wide);
        d[0][j] = c[0] - c[2], d[1][j] = c[1] + c[2], d[2][j] = c[2] - c[1], d[3][j] = c[3] - c[1];
      }
      float *out = to + t * wide + k;
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        *(lanes *)(out + (4 * i + 0) * place) = d[i][0] - d[i][2];
        *(lanes *)(out + (4 * i + 1) * place) = d[i][1] + d[i][2];
        *(lanes *)(out + (4 * i + 2) * place) = d[i][2] - d[i][1];
        *(lanes *)(out + (4 * i + 3) * place) = d[i][3] - d[i][1];
      }
    }
}

/* The same of y, laid out two rows high: G g G'. */
static void transform_y(float *to, int64_t place, const float *from, int64_t across, int64_t wide) {
  const int64_t row = 2 * across * wide;
  for (int64_t t = 0; t < across; t++)
    for (int64_t k = 0; k < wide; k += LANES) {
      const float *here = from + 2 * t * wide + k;
      lanes g[4][2];
#pragma GCC unroll 2
      for (int j = 0; j < 2; j++) {
        const lanes a = *(const lanes *)(here + j * wide), b = *(const lanes *)(here + row + j * wide);
        g[0][j] = a, g[1][j] = (a + b) * 0.5f, g[2][j] = (a - b) * 0.5f, g[3][j] = b;
      }
      float *out = to + t * wide + k;
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        *(lanes *)(out + (4 * i + 0) * place) = g[i][0];
        *(lanes *)(out + (4 * i + 1) * place) = (g[i][0] + g[i][1]) * 0.5f;
        *(lanes *)(out + (4 * i + 2) * place) = (g[i][0] - g[i][1]) * 0.5f;
        *(lanes *)(out + (4 * i + 3) * place) = g[i][1];
      }
    }
}

/* sums[column][vector] += x[t][column] * y[t][vector] for all tiles */
INLINE void outer(const int vectors, const int columns, const float *x, int64_t x_row, const float *y, int64_t y_row,
                  int64_t tiles, float *sums) {
  lanes sum[TILE_COLUMNS][TILE_ROWS];
#pragma GCC unroll 16
  for (int b = 0; b < columns; b++)
#pragma GCC unroll 16
    for (int a = 0; a < vectors; a++) sum[b][a] = *(const lanes *)(sums + b * y_row + a * LANES);
  for (int64_t t = 0; t < tiles; t++, x += x_row, y += y_row) {
    lanes left[TILE_ROWS];
#pragma GCC unroll 16
    for (int a = 0; a < vectors; a++) left[a] = *(const lanes *)(y + a * LANES);
#pragma GCC unroll 16
    for (int b = 0; b < columns; b++) {
      const lanes right = lanes_of(x[b]);
#pragma GCC unroll 16
      for (int a = 0; a < vectors; a++) sum[b][a] += left[a] * right;
    }
  }
#pragma GCC unroll 16
  for (int b = 0; b < columns; b++)
#pragma GCC unroll 16
    for (int a = 0; a < vectors; a++) *(lanes *)(sums + b * y_row + a * LANES) = sum[b][a];
}

#define OUTER(V, C) \
  case C: outer(V, C, x, x_row, y, y_row, tiles, sums); return;
#if TILE_COLUMNS == 6
#define OUTERS(V) OUTER(V, 1) OUTER(V, 2) OUTER(V, 3) OUTER(V, 4) OUTER(V, 5) OUTER(V, 6)
#else
#define OUTERS(V) OUTER(V, 1) OUTER(V, 2) OUTER(V, 3) OUTER(V, 4)
#endif
#define OUTERS_OF(V)                                                                                            \
  static void outer_##V(int columns, const float *x, int64_t x_row, const float *y, int64_t y_row, int64_t tiles, \
                        float *sums) {                                                                          \
    switch (columns) { OUTERS(V) }                                                                              \
  }
OUTERS_OF(1)
OUTERS_OF(2)
OUTERS_OF(3)
#if TILE_ROWS > 3
OUTERS_OF(4)
#endif

static void winograd_share(void *data, size_t index) {
  const Winograd *j = data;
  const Correlation *at = j->at;
  const int64_t share = (int64_t)index, all = at->images * j->down * j->parts;
  float *sums = j->sums + share * PLACES * at->c * j->wide_m;
  float *x = j->memory + share * j->slot, *y = x + PLACES * j->rows * j->across * j->wide_c;
  float *pixels = y + PLACES * j->rows * j->across * j->wide_m;
  clear(sums, PLACES * at->c * j->wide_m);
  for (int64_t band = j->bands * share / j->shares; band < j->bands * (share + 1) / j->shares; band++) {
    const int64_t first = band * j->rows, last = least(first + j->rows, all), tiles = (last - first) * j->across;
    for (int64_t row = first; row < last; row++) {
      const int64_t image = row / j->parts / j->down, top = row / j->parts % j->down * 2;
      const int64_t column = row % j->parts * j->across * 2, done = (row - first) * j->across;
      lay_pixels(pixels, 4, 2 * j->across + 2, j->wide_c, j->x + image * at->c * at->h * at->w, at->c, at->h, at->w,
                 top - at->ph, column - at->pw);
      transform_x(x + done * j->wide_c, tiles * j->wide_c, pixels, j->across, j->wide_c);
      lay_pixels(pixels, 2, 2 * j->across, j->wide_m, j->y + image * at->m * at->oh * at->ow, at->m, at->oh, at->ow, top,
                 column);
      transform_y(y + done * j->wide_m, tiles * j->wide_m, pixels, j->across, j->wide_m);
    }
    for (int64_t place = 0; place < PLACES; place++) {
      const float *from_x = x + place * tiles * j->wide_c, *from_y = y + place * tiles * j->wide_m;
      for (int64_t a = 0; a < j->wide_m; a += TILE_ROWS * LANES)
        for (int64_t b = 0; b < at->c; b += TILE_COLUMNS) {
          const int columns = (int)least(TILE_COLUMNS, at->c - b);
          float *to = sums + (place * at->c + b) * j->wide_m + a;
          switch (least(TILE_ROWS, (j->wide_m - a) / LANES)) {
            case 1: outer_1(columns, from_x + b, j->wide_c, from_y + a, j->wide_m, tiles, to); break;
            case 2: outer_2(columns, from_x + b, j->wide_c, from_y + a, j->wide_m, tiles, to); break;
            case 3: outer_3(columns, from_x + b, j->wide_c, from_y + a, j->wide_m, tiles, to); break;
#if TILE_ROWS > 3
            case 4: outer_4(columns, from_x + b, j->wide_c, from_y + a, j->wide_m, tiles, to); break;
#endif
          }
        }
    }
  }
}

/* Of some vectors of rows of the weights: the sums of the shares, and A' s A of these. */
static void winograd_finish(void *data, int64_t from, int64_t to) {
  const Winograd *j = data;
  const Correlation *at = j->at;
  const int64_t all = PLACES * at->c * j->wide_m, vectors = j->wide_m / LANES;
  for (int64_t i = from; i < to; i++) {
    const int64_t c = i / vectors, first = i % vectors * LANES;
    lanes s[PLACES], r[3][4], w[9];
    for (int place = 0; place < PLACES; place++) {
      s[place] = (lanes){0};
      const float *sums = j->sums + (place * at->c + c) * j->wide_m + first;
      for (int64_t share = 0; share < j->shares; share++) s[place] += *(const lanes *)(sums + share * all);
    }
    for (int k = 0; k < 4; k++) {
      r[0][k] = s[k] + s[4 + k] + s[8 + k];
      r[1][k] = s[4 + k] - s[8 + k];
      r[2][k] = s[4 + k] + s[8 + k] + s[12 + k];
    }
    for (int k = 0; k < 3; k++) {
      w[3 * k] = r[k][0] + r[k][1] + r[k][2];
      w[3 * k + 1] = r[k][1] - r[k][2];
      w[3 * k + 2] = r[k][1] + r[k][2] + r[k][3];
    }
    const int64_t rows = least(LANES, at->m - first);
    for (int64_t m = 0; m < rows; m++)
      for (int k = 0; k < 9; k++) j->out[((first + m) * at->c + c) * 9 + k] = w[k][m];
  }
}

/* Whether it gains: by the sizes alone. */
static int winograd_fits(const Correlation *at) {
  if (at->kh != 3 || at->kw != 3 || at->sh != 1 || at->sw != 1 || at->dh != 1 || at->dw != 1 || at->groups != 1) return 0;
  if (at->ph < 0 || at->pw < 0 || at->ph > 2 || at->pw > 2 || at->oh > at->h + 2 || at->ow > at->w + 2) return 0;
  if (at->m < CHANNELS_LEAST || at->c < CHANNELS_LEAST || at->oh * at->ow < PIXELS_LEAST) return 0;
  const int64_t tiles = up(at->oh, 2) * up(at->ow, 2), wide = up(at->m, LANES) * LANES;
  if (4 * tiles * wide > at->oh * at->ow * at->m * 3 / 2) return 0; /* too much that is cut off */
  return at->images * tiles >= 4 * TILES_LEAST && PLACES * wide * at->c <= SUMS / 2;
}

static void winograd(Call *call, const Correlation *at, const float *x, const float *y, float *out) {
  Winograd j = {.at = at, .x = x, .y = y, .out = out, .down = up(at->oh, 2)};
  j.wide_m = up(at->m, LANES) * LANES;
  j.wide_c = up(at->c, LANES) * LANES;
  const int64_t tiles = most(BAND / (PLACES * (j.wide_m + j.wide_c)), TILES_LEAST);
  j.parts = up(up(at->ow, 2), tiles);
  j.across = up(up(at->ow, 2), j.parts);
  const int64_t all = at->images * j.down * j.parts, sums = PLACES * at->c * j.wide_m;
  j.rows = least(most(tiles / j.across, up(TILES_LEAST, j.across)), all);
  j.bands = up(all, j.rows);
  j.shares = least(least(SHARES, j.bands), SUMS / sums);
  j.slot = PLACES * j.rows * j.across * (j.wide_c + j.wide_m) +
           most(4 * (2 * j.across + 2) * j.wide_c, 4 * j.across * j.wide_m);
  j.memory = scratch(call, j.shares * j.slot, sizeof(float));
  j.sums = scratch(call, j.shares * sums, sizeof(float));
  parallel(call, (size_t)j.shares, winograd_share, &j);
  parallel_ranges(call, at->c * (j.wide_m / LANES), 16, winograd_finish, &j);
}

#endif
