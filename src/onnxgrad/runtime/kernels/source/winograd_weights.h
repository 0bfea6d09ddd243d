/* The cotangent of the weights of a 3×3 convolution, by Winograd's form: A' of the sums over all tiles of (G y) · (B' x).
 *
 * The sums are products of matrices, channels of x by tiles by channels of y for each place. Numbers of x and y that are
 * large make the rounding of all nine taps coarser, where it would be that of the taps that they belong to.
 *
 * The tiles are cut into shares by the sizes alone, whose sums are added in order.
 */
#ifndef ONNXGRAD_WINOGRAD_WEIGHTS_H
#define ONNXGRAD_WINOGRAD_WEIGHTS_H

#include "winograd.h"

enum {
  CHANNELS_LEAST = 32,   /* of x and of y: with fewer, transforming them shows */
  PIXELS_LEAST = 16,     /* of y */
  TILES_LEAST = 16,      /* of a band, */
  BAND = 36 * 18 * 1024, /* whose transformed numbers are about as many: each reads and writes all sums */
  SHARES = 16,
  SUMS_SHARED = 1 << 21, /* numbers in the sums of all shares, if there is more than one, */
  SUMS_MOST = 1 << 22,   /* or of one, which is cut into panels of channels of x */
  PANELS = 8,            /* so that there is work for some threads */
};

typedef struct {
  const Correlation *at;
  const float *x, *y;
  float *out, *sums;
  int64_t down, parts, across; /* rows of tiles of a picture, parts of a row, and tiles of a part */
  int64_t rows;                /* parts of a band, which may be of several pictures */
  int64_t bands, shares, panels;
  int64_t wide_m, panel, wide_c; /* channels of y, and what is left of a vector; of x in a panel, and the same */
} Winograd;

/* G y, but for a factor of each place. */
INLINE void spread_four(lanes to[SIDE], const lanes g[INNER]) {
  const lanes near = g[0] + A * A * g[2], odd = A * (g[1] + A * A * g[3]);
  const lanes far = g[0] + B * B * g[2], odder = B * (g[1] + B * B * g[3]);
  to[0] = g[0];
  to[1] = near + odd, to[2] = near - odd;
  to[3] = far + odder, to[4] = far - odder;
  to[5] = g[3];
}

/* Tiles of y side by side, laid out four rows high: G y G', by place. */
static void transform_y(float *to, int64_t place, const float *from, int64_t across, int64_t wide_m) {
  const int64_t row = INNER * across * wide_m;
  for (int64_t t = 0; t < across; t++)
    for (int64_t k = 0; k < wide_m; k += LANES) {
      const float *here = from + INNER * t * wide_m + k;
      lanes half[SIDE][INNER];
#pragma GCC unroll 4
      for (int q = 0; q < INNER; q++) {
        lanes g[INNER], column[SIDE];
#pragma GCC unroll 4
        for (int i = 0; i < INNER; i++) g[i] = *(const lanes *)(here + i * row + q * wide_m);
        spread_four(column, g);
#pragma GCC unroll 6
        for (int i = 0; i < SIDE; i++) half[i][q] = column[i];
      }
      float *out = to + t * wide_m + k;
#pragma GCC unroll 6
      for (int i = 0; i < SIDE; i++) {
        lanes all[SIDE];
        spread_four(all, half[i]);
#pragma GCC unroll 6
        for (int q = 0; q < SIDE; q++) *(lanes *)(out + (SIDE * i + q) * place) = all[q];
      }
    }
}

/* A' s, with the factor of each place that `spread_four` left out. */
INLINE void gather_three(wide to[3], const wide s[SIDE]) {
  const double a = A, b = B, at_a = 1 / (2 * a * a * (a * a - b * b)), at_b = 1 / (2 * b * b * (b * b - a * a));
  const wide near = (s[1] + s[2]) * at_a, odd = (s[1] - s[2]) * at_a;
  const wide far = (s[3] + s[4]) * at_b, odder = (s[3] - s[4]) * at_b;
  to[0] = s[0] * (1 / (a * a * b * b)) + near + far;
  to[1] = a * odd + b * odder;
  to[2] = a * a * near + b * b * far + s[5];
}

static void winograd_share(void *data, int64_t index, float *x) {
  const Winograd *j = data;
  const Correlation *at = j->at;
  const int64_t share = index / j->panels, panel = index % j->panels;
  const int64_t all = at->images * j->down * j->parts, from_c = panel * j->panel, c = least(j->panel, at->c - from_c);
  float *sums = j->sums + (share * PLACES * at->c + PLACES * from_c) * j->wide_m;
  const int64_t plane_x = at->size[1] * at->size[2], plane_y = at->out[1] * at->out[2];
  int fresh = 1;
  for (int64_t band = j->bands * share / j->shares; band < j->bands * (share + 1) / j->shares; band++) {
    const int64_t first = band * j->rows, last = least(first + j->rows, all), tiles = (last - first) * j->across;
    const int64_t place_x = tiles * j->wide_c + GAP, place_y = tiles * j->wide_m + GAP;
    float *y = x + PLACES * place_x, *pixels = y + PLACES * place_y;
    for (int64_t row = first; row < last; row++) {
      const int64_t image = row / j->parts / j->down, top = row / j->parts % j->down * INNER;
      const int64_t column = row % j->parts * j->across * INNER, done = (row - first) * j->across;
      lay_pixels(pixels, SIDE, INNER * j->across + 2, j->wide_c, j->x + (image * at->c + from_c) * plane_x, c, plane_x,
                 at->size[1], at->size[2], top - at->pads[1], column - at->pads[2]);
      transform_x(x + done * j->wide_c, place_x, pixels, j->across, j->wide_c);
      lay_pixels(pixels, INNER, INNER * j->across, j->wide_m, j->y + image * at->m * plane_y, at->m, plane_y,
                 at->out[1], at->out[2], top, column);
      transform_y(y + done * j->wide_m, place_y, pixels, j->across, j->wide_m);
    }
    for (int64_t place = 0; place < PLACES; place++)
      add_products(x + place * place_x, j->wide_c, 1, c, y + place * place_y, j->wide_m, tiles,
                   sums + place * c * j->wide_m, fresh);
    fresh = 0;
  }
}

/* Of some vectors of rows of the weights: the sums of the shares, and A' s A of these. */
static void winograd_finish(void *data, int64_t from, int64_t to) {
  const Winograd *j = data;
  const Correlation *at = j->at;
  const int64_t all = PLACES * at->c * j->wide_m, vectors = j->wide_m / LANES;
  for (int64_t i = from; i < to; i++) {
    const int64_t c = i / vectors, first = i % vectors * LANES;
    const int64_t from_c = c / j->panel * j->panel, width = least(j->panel, at->c - from_c);
    wide half[SIDE][3], w[3][3];
    for (int row = 0; row < SIDE; row++) {
      wide s[SIDE];
      for (int k = 0; k < SIDE; k++) {
        const int64_t place = SIDE * row + k;
        const float *sums = j->sums + (PLACES * from_c + place * width + c - from_c) * j->wide_m + first;
        s[k] = __builtin_convertvector(*(const lanes *)sums, wide);
        for (int64_t share = 1; share < j->shares; share++)
          s[k] += __builtin_convertvector(*(const lanes *)(sums + share * all), wide);
      }
      gather_three(half[row], s);
    }
    for (int k = 0; k < 3; k++) {
      wide s[SIDE], column[3];
      for (int row = 0; row < SIDE; row++) s[row] = half[row][k];
      gather_three(column, s);
      for (int row = 0; row < 3; row++) w[row][k] = column[row];
    }
    const int64_t rows = least(LANES, at->m - first);
    for (int64_t m = 0; m < rows; m++)
      for (int k = 0; k < 9; k++) j->out[((first + m) * at->c + c) * 9 + k] = (float)w[k / 3][k % 3][m];
  }
}

/* Whether it gains: by the sizes alone. */
static int winograd_fits(const Correlation *at) {
  if (at->size[0] * at->out[0] * at->kernel[0] != 1 || at->pads[0] || at->groups != 1) return 0;
  for (int i = 1; i < 3; i++)
    if (at->kernel[i] != 3 || at->strides[i] != 1 || at->dilations[i] != 1 || at->pads[i] < 0 || at->pads[i] > 2 ||
        at->out[i] > at->size[i] + 2)
      return 0;
  if (at->m < CHANNELS_LEAST || at->c < CHANNELS_LEAST || at->out[1] * at->out[2] < PIXELS_LEAST) return 0;
  const int64_t tiles = up(at->out[1], INNER) * up(at->out[2], INNER), wide_m = up(at->m, LANES) * LANES;
  if (5 * INNER * INNER * tiles * wide_m > 9 * at->out[1] * at->out[2] * at->m) return 0; /* too much that is cut off */
  return at->images * tiles >= 2 * TILES_LEAST && PLACES * wide_m * at->c <= SUMS_MOST;
}

static void winograd(Call *call, const Correlation *at, const float *x, const float *y, float *out) {
  Winograd j = {.at = at, .x = x, .y = y, .out = out, .down = up(at->out[1], INNER)};
  j.wide_m = up(at->m, LANES) * LANES;
  const int64_t sums = PLACES * at->c * j.wide_m, most_shares = least(SHARES, most(SUMS_SHARED / sums, 1));
  j.panel = up(at->c, least(up(PANELS, most_shares), at->c / CHANNELS_LEAST));
  j.panels = up(at->c, j.panel);
  j.wide_c = up(j.panel, LANES) * LANES;
  const int64_t tiles = most(BAND / (PLACES * (j.wide_m + j.wide_c)), TILES_LEAST);
  j.parts = up(up(at->out[2], INNER), tiles);
  j.across = up(up(at->out[2], INNER), j.parts);
  const int64_t all = at->images * j.down * j.parts;
  j.rows = least(most(tiles / j.across, up(TILES_LEAST, j.across)), all);
  j.bands = up(all, j.rows);
  j.shares = least(most_shares, j.bands);
  const int64_t space = PLACES * (j.rows * j.across * (j.wide_c + j.wide_m) + 2 * GAP) +
                        most(SIDE * (INNER * j.across + 2) * j.wide_c, INNER * INNER * j.across * j.wide_m);
  j.sums = scratch(call, j.shares * sums, sizeof(float));
  parallel_spaces(call, j.shares * j.panels, space, winograd_share, &j);
  parallel_ranges(call, at->c * (j.wide_m / LANES), 16, winograd_finish, &j);
}

#endif
