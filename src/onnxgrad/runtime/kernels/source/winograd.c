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
 *
 * One of 3×3×3 taps, or of others in depth, is the sum of those of the pictures that its taps in depth meet. Each number
 * of y depends on its tile alone, so it is the same however the tiles are divided among threads. For the cotangent of the
 * weights, the products are of channels of x by tiles by channels of y; the tiles are cut into shares by the sizes
 * alone, whose sums are added in order. */
#include "winograd.h"
#include <math.h>

enum {
  SIDE = 6, INNER = 4, PLACES = SIDE * SIDE, /* of a tile of x, and of y */
  GAP = 16, /* numbers between places: at multiples of a page they would displace each other */
  CHAIN = 32,                  /* channels that are added up one after the other: rounding grows with them */
  BAND = PLACES * 4 * 1024,    /* transformed numbers of a band, so that they stay near the processor, */
  TILES_LEAST = 12,            /* but not fewer tiles */
  /* Of weights: */
  CHANNELS_LEAST = 32,         /* of x and of y: with fewer, transforming them shows */
  PIXELS_LEAST = 16,           /* of y */
  TILES_SUMMED = 16,           /* of a band, at least, */
  SUMMED = PLACES * 18 * 1024, /* whose transformed numbers are about as many: each reads and writes all sums */
  SHARES = 16,
  SUMS_SHARED = 1 << 21, /* numbers in the sums of all shares, if there is more than one, */
  SUMS_MOST = 1 << 22,   /* or of one, which is cut into panels of channels of x */
  PANELS = 8,            /* so that there is work for some threads */
};

/* For what is made once, and of much or for many. */
typedef double wide __attribute__((vector_size(LANES * 8)));

#define A (5 / 8.0f)
#define B (3 / 2.0f)
#define A_A (A * A)
#define B_B (B * B)

/* B' d */
INLINE void spread_six(lanes to[SIDE], const lanes d[SIDE]) {
  const lanes near = d[4] - B_B * d[2], far = d[4] - A_A * d[2];
  const lanes odd = A * (d[3] - B_B * d[1]), odder = B * (d[3] - A_A * d[1]);
  to[0] = A_A * B_B * d[0] - (A_A + B_B) * d[2] + d[4];
  to[1] = near + odd, to[2] = near - odd;
  to[3] = far + odder, to[4] = far - odder;
  to[5] = A_A * B_B * d[1] - (A_A + B_B) * d[3] + d[5];
}

/* G g of n numbers, but for a factor of each place; and A' s, n sums. */
#define THEIR_TRANSFORMS(type, n)                                                             \
  INLINE void spread_##n(type to[SIDE], const type g[n]) {                                    \
    const type near = g[0] + A_A * g[2], far = g[0] + B_B * g[2];                             \
    type odd = g[1], odder = g[1];                                                            \
    if (n > 3) odd += A_A * g[n - 1], odder += B_B * g[n - 1];                                \
    odd *= A, odder *= B;                                                                     \
    to[0] = g[0];                                                                             \
    to[1] = near + odd, to[2] = near - odd;                                                   \
    to[3] = far + odder, to[4] = far - odder;                                                 \
    to[5] = g[n - 1];                                                                         \
  }                                                                                           \
  INLINE void gather_##n(type to[n], const type s[SIDE]) {                                 \
    const type near = s[1] + s[2], odd = s[1] - s[2], far = s[3] + s[4], odder = s[3] - s[4]; \
    to[0] = s[0] + near + far;                                                             \
    to[1] = A * odd + B * odder;                                                           \
    to[2] = A_A * near + B_B * far;                                                        \
    if (n > 3) to[n - 1] = A_A * A * odd + B_B * B * odder;                                \
    to[n - 1] += s[5];                                                                     \
  }
THEIR_TRANSFORMS(lanes, 4)
THEIR_TRANSFORMS(wide, 3)

static const double FACTORS[SIDE] = {1 / (A_A * B_B), 1 / (2 * A_A * (A_A - B_B)), 1 / (2 * A_A * (A_A - B_B)),
                                     1 / (2 * B_B * (B_B - A_A)), 1 / (2 * B_B * (B_B - A_A)), 1};

/* A transform of all columns and then all rows: of `in` by `in` vectors, which are `from` i and q, rows of `all` for i. */
#define TRANSFORM(type, one, in, out, from, ...)                                \
  do {                                                                          \
    type half[out][in];                                                         \
    _Pragma("GCC unroll 6") for (int q = 0; q < in; q++) {                      \
      type column[in], turned[out];                                             \
      _Pragma("GCC unroll 6") for (int i = 0; i < in; i++) column[i] = (from);  \
      one(turned, column);                                                      \
      _Pragma("GCC unroll 6") for (int i = 0; i < out; i++) half[i][q] = turned[i]; \
    }                                                                           \
    _Pragma("GCC unroll 6") for (int i = 0; i < out; i++) {                     \
      type all[out];                                                            \
      one(all, half[i]);                                                        \
      _Pragma("GCC unroll 6") for (int q = 0; q < out; q++) { __VA_ARGS__; }    \
    }                                                                           \
  } while (0)

/* Tiles side by side of x, B' d B, or of y, G y G', laid out as many rows high as a tile: by place. */
static __attribute__((noinline)) void transform(int64_t side, float *to, int64_t place, const float *from, int64_t across, int64_t wide_c) {
  const int64_t row = (INNER * across + side - INNER) * wide_c;
  for (int64_t t = 0; t < across; t++)
    for (int64_t k = 0; k < wide_c; k += LANES) {
      const float *here = from + INNER * t * wide_c + k;
      float *out = to + t * wide_c + k;
      if (side == SIDE)
        TRANSFORM(lanes, spread_six, SIDE, SIDE, *(const lanes *)(here + i * row + q * wide_c),
                  *(lanes *)(out + (SIDE * i + q) * place) = all[q]);
      else
        TRANSFORM(lanes, spread_4, INNER, SIDE, *(const lanes *)(here + i * row + q * wide_c),
                  *(lanes *)(out + (SIDE * i + q) * place) = all[q]);
    }
}

/* Rows of tiles of a picture, parts of a row, and tiles of a part; parts of a band, which may be of several pictures. */
typedef struct {
  int64_t down, parts, across, rows, all;
} Tiles;

/* Cuts pictures into about `most_tiles` in a band; the numbers that a band needs, of so many channels of x and of y. */
static int64_t cut(Tiles *t, int64_t images, int64_t h, int64_t w, int64_t numbers, int64_t fewest, int64_t wide_c,
                   int64_t wide_m) {
  const int64_t tiles = most(numbers / (PLACES * (wide_m + wide_c)), fewest);
  t->down = quotient(h, INNER);
  t->parts = quotient(quotient(w, INNER), tiles);
  t->across = quotient(quotient(w, INNER), t->parts);
  t->all = images * t->down * t->parts;
  t->rows = least(most(tiles / t->across, quotient(fewest, t->across)), t->all);
  return PLACES * (t->rows * t->across * (wide_c + wide_m) + 2 * GAP) +
         most(SIDE * (INNER * t->across + 2) * wide_c, INNER * INNER * t->across * wide_m);
}

typedef struct {
  int64_t image, top, column;
} Corner;

static Corner corner_of(const Tiles *t, int64_t row) {
  return (Corner){row / t->parts / t->down, row / t->parts % t->down * INNER, row % t->parts * t->across * INNER};
}

typedef struct {
  const float *x, *w, *bias;
  float *y, *weights; /* `weights` are those transformed: [place][c][wide_m] */
  int64_t images, c, m, h, w_x, oh, ow, top, left; /* images: pictures of y */
  int64_t taps, d, od, front; /* in depth; pictures of x and of y one behind the other */
  int64_t of_m, of_c; /* how far apart channels of w are, */
  int64_t turned;     /* and whether its last tap is the first */
  Tiles tiles;
  int64_t place; /* how far apart places of the weights are */
  int64_t wide_m, wide_c; /* channels, and what is left of a vector */
} Job;

/* G g G' of the taps from some channels of x to vectors of channels of y; channels for each tap in depth. */
static void transform_weights(void *data, int64_t from, int64_t to) {
  const Job *j = data;
  const int64_t vectors = j->wide_m / LANES;
  for (int64_t i = from; i < to; i++) {
    const int64_t row = i / vectors, first = i % vectors * LANES, rows = least(LANES, j->m - first);
    const int64_t behind = row / j->c, c = row % j->c, last = 9 * j->taps - 1;
    float taken[9][LANES] = {{0}};
    for (int64_t r = 0; r < rows; r++)
      for (int k = 0; k < 9; k++) {
        const int64_t tap = 9 * behind + k;
        taken[k][r] = j->w[(first + r) * j->of_m + c * j->of_c + (j->turned ? last - tap : tap)];
      }
    float *out = j->weights + row * j->wide_m + first;
    TRANSFORM(wide, spread_3, 3, SIDE, __builtin_convertvector(*(const lanes *)taken[3 * i + q], wide),
              *(lanes *)(out + (SIDE * i + q) * j->place) =
                  __builtin_convertvector(all[q] * (FACTORS[i] * FACTORS[q]), lanes));
  }
}

/* A' s A and the bias of tiles side by side, as to[row][column][channel] of `width` columns. Whether all are finite. */
static int give_y(float *to, int64_t width, const float *from, int64_t place, int64_t wide_m, const float *bias, int64_t m) {
  lanes doubt = {0};
  for (int64_t t = 0; t * INNER < width; t++)
    for (int64_t k = 0; k < wide_m; k += LANES) {
      const float *here = from + t * wide_m + k;
      const lanes more = bias ? lanes_read(bias + k, m - k, 0) : lanes_of(0);
      float *out = to + INNER * t * wide_m + k;
      const int64_t columns = least(INNER, width - INNER * t);
      TRANSFORM(lanes, gather_4, SIDE, INNER, *(const lanes *)(here + (SIDE * i + q) * place), {
        all[q] += more;
        if (q < columns) *(lanes *)(out + (i * width + q) * wide_m) = all[q];
        doubt += all[q] * 0;
      });
    }
  return lanes_sum(doubt) == 0;
}

/* A number of y as the sum that it is: one that is not finite belongs to those results alone that it meets. */
static float plainly(const Job *j, int64_t image, int64_t m, int64_t p, int64_t q) {
  const int64_t last = 9 * j->taps - 1;
  float sum = 0;
  for (int64_t c = 0; c < j->c; c++)
    for (int64_t k = 0; k <= last; k++) {
      const int64_t behind = image % j->od + k / 9 - j->front, row = p + k % 9 / 3 - j->top, column = q + k % 3 - j->left;
      if (behind >= 0 && behind < j->d && row >= 0 && row < j->h && column >= 0 && column < j->w_x)
        sum += j->x[(((image / j->od * j->c + c) * j->d + behind) * j->h + row) * j->w_x + column] *
               j->w[m * j->of_m + c * j->of_c + (j->turned ? last - k : k)];
    }
  return j->bias ? sum + j->bias[m] : sum;
}

/* Some rows of tiles, which may be of several pictures. */
static void convolve_band(void *data, int64_t band, float *memory) {
  const Job *j = data;
  const Tiles *t = &j->tiles;
  const int64_t first = band * t->rows, last = least(first + t->rows, t->all), tiles = (last - first) * t->across;
  const int64_t place_x = tiles * j->wide_c + GAP, place_y = tiles * j->wide_m + GAP;
  float *x = memory, *y = x + PLACES * place_x, *pixels = y + PLACES * place_y;
  const int64_t picture = j->h * j->w_x, channel_x = j->d * picture;
  for (int64_t tap = 0; tap < j->taps; tap++) {
    for (int64_t row = first; row < last; row++) {
      const Corner at = corner_of(t, row);
      const int64_t behind = at.image % j->od + tap - j->front;
      const int is_there = behind >= 0 && behind < j->d;
      const float *from = j->x + at.image / j->od * j->c * channel_x + (is_there ? behind * picture : 0);
      lay_pixels(pixels, SIDE, INNER * t->across + 2, j->wide_c, from, j->c, channel_x, is_there ? j->h : 0, j->w_x,
                 at.top - j->top, at.column - j->left, 1, 1);
      transform(SIDE, x + (row - first) * t->across * j->wide_c, place_x, pixels, t->across, j->wide_c);
    }
    for (int64_t place = 0; place < PLACES; place++)
      for (int64_t c = 0; c < j->c; c += CHAIN)
        multiply_matrices(tiles, j->wide_m, least(CHAIN, j->c - c), x + place * place_x + c, j->wide_c, 1,
                          j->weights + place * j->place + (tap * j->c + c) * j->wide_m, j->wide_m, COLUMNS,
                          y + place * place_y, j->wide_m, c || tap);
  }
  for (int64_t row = first; row < last; row++) {
    const Corner at = corner_of(t, row);
    const int64_t width = least(INNER * t->across, j->ow - at.column), rows = least(INNER, j->oh - at.top);
    const int64_t channel = j->od * j->oh * j->ow;
    float *out = j->y + at.image / j->od * j->m * channel + (at.image % j->od * j->oh + at.top) * j->ow + at.column;
    if (width <= 0) continue;
    const int finite = give_y(pixels, width, y + (row - first) * t->across * j->wide_m, place_y, j->wide_m, j->bias, j->m);
    const int64_t runs = width == j->ow ? 1 : rows, length = rows * width / runs; /* whole rows follow each other */
    for (int64_t r = 0; r < runs; r++)
      turn_rows(out + r * j->ow, channel, length, j->m, j->m, pixels + r * width * j->wide_m, j->wide_m, length, j->m);
    if (finite) continue;
    for (int64_t m = 0; m < j->m; m++)
      for (int64_t r = 0; r < rows; r++)
        for (int64_t q = 0; q < width; q++) {
          float *here = out + m * channel + r * j->ow + q;
          if (!isfinite(*here)) *here = plainly(j, at.image, m, at.top + r, at.column + q);
        }
  }
}

static void compute(Call *call, const void *settings) {
  Convolution v;
  if (!open_convolution(call, settings, &v)) return;
  int64_t before[3];
  int sound = v.c && v.at.groups == 1 && v.at.kernel[0] <= 7;
  for (int i = 0; i < 3; i++) {
    const int64_t last = v.at.kernel[i] - 1;
    before[i] = v.turned ? last - v.at.pads[i] : v.at.pads[i];
    const int64_t behind = v.out[i] + last - v.in[i] - before[i];
    sound = sound && (!i || last == 2) && v.in[i] && v.at.strides[i] == 1 && v.at.dilations[i] == 1 && before[i] >= 0 &&
            before[i] <= last && behind >= 0 && behind <= last;
  }
  if (refused(call, !sound, "Conv3x3: operands or attributes do not belong together")) return;
  const int64_t deep = v.at.kernel[0], m = v.m, c = v.c;
  Job j = {
      .x = v.x, .w = v.w, .bias = v.bias, .y = v.y, .images = v.at.images * v.out[0], .c = c, .m = m, .h = v.in[1],
      .w_x = v.in[2], .oh = v.out[1], .ow = v.out[2], .taps = deep, .d = v.in[0], .od = v.out[0], .front = before[0],
      .top = before[1], .left = before[2], .of_m = 9 * deep * (v.turned ? 1 : c), .of_c = 9 * deep * (v.turned ? m : 1),
      .turned = v.turned,
  };
  j.wide_m = rounded(m), j.wide_c = rounded(c);
  j.place = deep * c * j.wide_m + GAP;
  const int64_t band = most(BAND, j.place * PLACES / 2); /* where there are many weights, they are read less often */
  const int64_t space = cut(&j.tiles, j.images, j.oh, j.ow, band, TILES_LEAST, j.wide_c, j.wide_m);
  j.weights = scratch(call, PLACES * j.place, sizeof(float));
  parallel_ranges(call, deep * c * (j.wide_m / LANES), 16, transform_weights, &j);
  parallel_spaces(call, quotient(j.tiles.all, j.tiles.rows), space, convolve_band, &j);
}

typedef struct {
  const Correlation *at;
  const float *x, *y;
  float *out, *sums;
  Tiles tiles;
  int64_t bands, shares, panels;
  int64_t wide_m, panel, wide_c; /* channels of y, and what is left of a vector; of x in a panel, and the same */
} Sums;

static void sum_share(void *data, int64_t index, float *x) {
  const Sums *j = data;
  const Correlation *at = j->at;
  const int64_t share = index / j->panels, panel = index % j->panels;
  const Tiles *t = &j->tiles;
  const int64_t from_c = panel * j->panel, c = least(j->panel, at->c - from_c);
  float *sums = j->sums + (share * PLACES * at->c + PLACES * from_c) * j->wide_m;
  const int64_t plane_x = at->size[1] * at->size[2], plane_y = at->out[1] * at->out[2];
  const int64_t first_band = j->bands * share / j->shares;
  for (int64_t band = first_band; band < j->bands * (share + 1) / j->shares; band++) {
    const int64_t first = band * t->rows, last = least(first + t->rows, t->all), tiles = (last - first) * t->across;
    const int64_t place_x = tiles * j->wide_c + GAP, place_y = tiles * j->wide_m + GAP;
    float *y = x + PLACES * place_x, *pixels = y + PLACES * place_y;
    for (int64_t row = first; row < last; row++) {
      const Corner from = corner_of(t, row);
      const int64_t done = (row - first) * t->across;
      lay_pixels(pixels, SIDE, INNER * t->across + 2, j->wide_c, j->x + (from.image * at->c + from_c) * plane_x, c, plane_x,
                 at->size[1], at->size[2], from.top - at->pads[1], from.column - at->pads[2], 1, 1);
      transform(SIDE, x + done * j->wide_c, place_x, pixels, t->across, j->wide_c);
      lay_pixels(pixels, INNER, INNER * t->across, j->wide_m, j->y + from.image * at->m * plane_y, at->m, plane_y,
                 at->out[1], at->out[2], from.top, from.column, 1, 1);
      transform(INNER, y + done * j->wide_m, place_y, pixels, t->across, j->wide_m);
    }
    for (int64_t place = 0; place < PLACES; place++)
      multiply_matrices(c, j->wide_m, tiles, x + place * place_x, 1, j->wide_c, y + place * place_y, j->wide_m, COLUMNS,
                        sums + place * c * j->wide_m, j->wide_m, band > first_band);
  }
}

INLINE wide sum_of_shares(const Sums *j, const float *here) {
  wide sum = __builtin_convertvector(*(const lanes *)here, wide);
  for (int64_t share = 1; share < j->shares; share++)
    sum += __builtin_convertvector(*(const lanes *)(here + share * PLACES * j->at->c * j->wide_m), wide);
  return sum;
}

/* A' s A of the sums of all shares, for some vectors of rows of the weights. */
static void give_weights(void *data, int64_t from, int64_t to) {
  const Sums *j = data;
  const int64_t vectors = j->wide_m / LANES;
  for (int64_t at = from; at < to; at++) {
    const int64_t c = at / vectors, first = at % vectors * LANES, rows = least(LANES, j->at->m - first);
    const int64_t from_c = c / j->panel * j->panel, width = least(j->panel, j->at->c - from_c);
    const float *sums = j->sums + (PLACES * from_c + c - from_c) * j->wide_m + first;
    float *out = j->out + (first * j->at->c + c) * 9;
    wide w[9]; /* rows before columns, as they are in memory */
    TRANSFORM(wide, gather_3, SIDE, 3,
              sum_of_shares(j, sums + (SIDE * q + i) * width * j->wide_m) * (FACTORS[q] * FACTORS[i]), w[3 * q + i] = all[q]);
    for (int64_t m = 0; m < rows; m++)
      for (int k = 0; k < 9; k++) out[m * j->at->c * 9 + k] = (float)w[k][m];
  }
}

int winograd_fits(const Correlation *at) {
  if (at->size[0] * at->out[0] * at->kernel[0] != 1 || at->pads[0] || at->groups != 1) return 0;
  for (int i = 1; i < 3; i++)
    if (at->kernel[i] != 3 || at->strides[i] != 1 || at->dilations[i] != 1 || at->pads[i] < 0 || at->pads[i] > 2 ||
        at->out[i] > at->size[i] + 2)
      return 0;
  if (at->m < CHANNELS_LEAST || at->c < CHANNELS_LEAST || at->out[1] * at->out[2] < PIXELS_LEAST) return 0;
  const int64_t tiles = quotient(at->out[1], INNER) * quotient(at->out[2], INNER), wide_m = rounded(at->m);
  if (5 * INNER * INNER * tiles * wide_m > 9 * at->out[1] * at->out[2] * at->m) return 0; /* too much that is cut off */
  return at->images * tiles >= 2 * TILES_SUMMED && PLACES * wide_m * at->c <= SUMS_MOST;
}

void winograd(Call *call, const Correlation *at, const float *x, const float *y, float *out) {
  Sums j = {.at = at, .x = x, .y = y, .out = out, .wide_m = rounded(at->m)};
  const int64_t sums = PLACES * at->c * j.wide_m, most_shares = least(SHARES, most(SUMS_SHARED / sums, 1));
  j.panel = quotient(at->c, least(quotient(PANELS, most_shares), at->c / CHANNELS_LEAST));
  j.panels = quotient(at->c, j.panel);
  j.wide_c = rounded(j.panel);
  const int64_t space = cut(&j.tiles, at->images, at->out[1], at->out[2], SUMMED, TILES_SUMMED, j.wide_c, j.wide_m);
  j.bands = quotient(j.tiles.all, j.tiles.rows);
  j.shares = least(most_shares, j.bands);
  j.sums = scratch(call, j.shares * sums, sizeof(float));
  parallel_spaces(call, j.shares * j.panels, space, sum_share, &j);
  parallel_ranges(call, at->c * (j.wide_m / LANES), 16, give_weights, &j);
}

const Kernel winograd_kernels[] = {
    {"Conv3x3", "ffF", "f", sizeof(Convolution), read_convolution, compute},
    {0}};
