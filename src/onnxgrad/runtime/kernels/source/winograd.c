/* A convolution of 3×3 taps side by side, by Winograd's form: tiles by channels of x by channels of y for each place.
 * One of 3×3×3 taps, or of others in depth, is the sum of those of the pictures that its taps in depth meet.
 *
 * Each number of y depends on its tile alone, so it is the same however the tiles are divided among threads.
 */
#include "winograd.h"

#include <math.h>

enum {
  CHAIN = 32,           /* channels that are added up one after the other: rounding grows with them */
  BAND = 36 * 4 * 1024, /* transformed numbers of a band, so that they stay near the processor, */
  TILES_LEAST = 12,     /* but not fewer tiles */
};

typedef struct {
  const float *x, *w, *bias;
  float *y, *weights; /* `weights` are those transformed: [place][c][wide_m] */
  int64_t images, c, m, h, w_x, oh, ow, top, left; /* images: pictures of y */
  int64_t taps, d, od, front; /* in depth; pictures of x and of y one behind the other */
  int64_t of_m, of_c; /* how far apart channels of w are, */
  int64_t turned;     /* and whether its last tap is the first */
  int64_t down, parts, across; /* rows of tiles of a picture, parts of a row, and tiles of a part */
  int64_t rows; /* of tiles in a band */
  int64_t place; /* how far apart places of the weights are */
  int64_t wide_m, wide_c; /* channels, and what is left of a vector */
} Job;

/* --- transforms --------------------------------------------------------------------------------------------------- */

/* G g of three numbers, in double: it is made of few, and read by all tiles. */
INLINE void spread_taps(wide to[SIDE], const wide g[3]) {
  const double a = A, b = B, at_a = 1 / (2 * a * a * (a * a - b * b)), at_b = 1 / (2 * b * b * (b * b - a * a));
  const wide near = (g[0] + a * a * g[2]) * at_a, far = (g[0] + b * b * g[2]) * at_b;
  const wide odd = g[1] * (a * at_a), odder = g[1] * (b * at_b);
  to[0] = g[0] * (1 / (a * a * b * b));
  to[1] = near + odd, to[2] = near - odd;
  to[3] = far + odder, to[4] = far - odder;
  to[5] = g[2];
}

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
    wide half[SIDE][3];
    for (int k = 0; k < 3; k++) {
      wide taps[3];
      for (int i = 0; i < 3; i++) taps[i] = __builtin_convertvector(*(const lanes *)taken[3 * i + k], wide);
      wide column[SIDE];
      spread_taps(column, taps);
      for (int s = 0; s < SIDE; s++) half[s][k] = column[s];
    }
    float *out = j->weights + row * j->wide_m + first;
    for (int s = 0; s < SIDE; s++) {
      wide row[SIDE];
      spread_taps(row, half[s]);
      for (int k = 0; k < SIDE; k++) *(lanes *)(out + (SIDE * s + k) * j->place) = __builtin_convertvector(row[k], lanes);
    }
  }
}

/* A' s */
INLINE void gather_four(lanes to[INNER], const lanes s[SIDE]) {
  const lanes near = s[1] + s[2], odd = s[1] - s[2], far = s[3] + s[4], odder = s[3] - s[4];
  to[0] = s[0] + near + far;
  to[1] = A * odd + B * odder;
  to[2] = A * A * near + B * B * far;
  to[3] = A * A * A * odd + B * B * B * odder + s[5];
}

/* A' s A and the bias of tiles side by side, as to[row][column][channel] of `width` columns. Whether all are finite. */
static int transform_y(float *to, int64_t width, const float *from, int64_t place, int64_t wide_m, const float *bias,
                       int64_t m) {
  lanes doubt = {0};
  for (int64_t t = 0; t * INNER < width; t++)
    for (int64_t k = 0; k < wide_m; k += LANES) {
      const float *here = from + t * wide_m + k;
      lanes half[INNER][SIDE], more = {0};
      if (bias && k + LANES <= m)
        more = *(const lanes *)(bias + k);
      else if (bias)
        for (int64_t i = k; i < m; i++) more[i - k] = bias[i];
#pragma GCC unroll 6
      for (int q = 0; q < SIDE; q++) {
        lanes s[SIDE], column[INNER];
#pragma GCC unroll 6
        for (int i = 0; i < SIDE; i++) s[i] = *(const lanes *)(here + (SIDE * i + q) * place);
        gather_four(column, s);
#pragma GCC unroll 4
        for (int i = 0; i < INNER; i++) half[i][q] = column[i];
      }
      float *out = to + INNER * t * wide_m + k;
      const int64_t columns = least(INNER, width - INNER * t);
#pragma GCC unroll 4
      for (int i = 0; i < INNER; i++) {
        lanes all[INNER];
        gather_four(all, half[i]);
#pragma GCC unroll 4
        for (int q = 0; q < INNER; q++) {
          all[q] += more;
          if (q < columns) *(lanes *)(out + (i * width + q) * wide_m) = all[q];
          doubt += all[q] * 0;
        }
      }
    }
  return lanes_sum(doubt) == 0;
}

/* --- the work ----------------------------------------------------------------------------------------------------- */

/* Pixels of `wide_m` channels, in rows of each channel. */
static void give_run(float *to, int64_t channel, int64_t channels, const float *from, int64_t wide_m, int64_t count) {
  for (int64_t p = 0; p < count; p += LANES) {
    if (p + LANES > count) p = most(count - LANES, 0);
    const int64_t some = least(LANES, count - p);
    for (int64_t k = 0; k < channels; k += LANES) {
      const float *here = from + p * wide_m + k;
      float *out = to + k * channel + p;
      if (some == LANES && k + LANES <= channels) {
        lanes a[LANES];
#pragma GCC unroll 16
        for (int q = 0; q < LANES; q++) a[q] = *(const lanes *)(here + q * wide_m);
        turn(a);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) *(lanes *)(out + i * channel) = a[i];
      } else {
        for (int64_t i = 0; i < least(LANES, channels - k); i++)
          for (int64_t q = 0; q < some; q++) out[i * channel + q] = here[q * wide_m + i];
      }
    }
  }
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
  const int64_t first = band * j->rows, last = least(first + j->rows, j->images * j->down * j->parts);
  const int64_t tiles = (last - first) * j->across;
  const int64_t place_x = tiles * j->wide_c + GAP, place_y = tiles * j->wide_m + GAP;
  float *x = memory, *y = x + PLACES * place_x, *pixels = y + PLACES * place_y;
  const int64_t picture = j->h * j->w_x, channel_x = j->d * picture;
  for (int64_t tap = 0; tap < j->taps; tap++) {
    for (int64_t row = first; row < last; row++) {
      const int64_t image = row / j->parts / j->down, top = row / j->parts % j->down * INNER;
      const int64_t column = row % j->parts * j->across * INNER, done = (row - first) * j->across;
      const int64_t behind = image % j->od + tap - j->front;
      const int is_there = behind >= 0 && behind < j->d;
      const float *from = j->x + image / j->od * j->c * channel_x + (is_there ? behind * picture : 0);
      lay_pixels(pixels, SIDE, INNER * j->across + 2, j->wide_c, from, j->c, channel_x, is_there ? j->h : 0, j->w_x,
                 top - j->top, column - j->left);
      transform_x(x + done * j->wide_c, place_x, pixels, j->across, j->wide_c);
    }
    for (int64_t place = 0; place < PLACES; place++)
      for (int64_t c = 0; c < j->c; c += CHAIN)
        add_products(x + place * place_x + c, 1, j->wide_c, tiles,
                     j->weights + place * j->place + (tap * j->c + c) * j->wide_m, j->wide_m, least(CHAIN, j->c - c),
                     y + place * place_y, !c && !tap);
  }
  for (int64_t row = first; row < last; row++) {
    const int64_t image = row / j->parts / j->down, top = row / j->parts % j->down * INNER;
    const int64_t column = row % j->parts * j->across * INNER, done = (row - first) * j->across;
    const int64_t width = least(INNER * j->across, j->ow - column), rows = least(INNER, j->oh - top);
    const int64_t channel = j->od * j->oh * j->ow;
    float *out = j->y + image / j->od * j->m * channel + (image % j->od * j->oh + top) * j->ow + column;
    if (width <= 0) continue;
    const int finite = transform_y(pixels, width, y + done * j->wide_m, place_y, j->wide_m, j->bias, j->m);
    if (width == j->ow) /* rows follow each other */
      give_run(out, channel, j->m, pixels, j->wide_m, rows * width);
    else
      for (int64_t r = 0; r < rows; r++)
        give_run(out + r * j->ow, channel, j->m, pixels + r * width * j->wide_m, j->wide_m, width);
    if (finite) continue;
    for (int64_t m = 0; m < j->m; m++)
      for (int64_t r = 0; r < rows; r++)
        for (int64_t q = 0; q < width; q++) {
          float *here = out + m * channel + r * j->ow + q;
          if (!isfinite(*here)) *here = plainly(j, image, m, top + r, column + q);
        }
  }
}

/* --- the operator ------------------------------------------------------------------------------------------------- */

/* `turned`: w is [c, m, …, 3, 3], and its taps are in the opposite order: the transposed convolution. */
typedef struct {
  int64_t pads[6], turned; /* before each axis, then behind; in depth, too */
  size_t rank;
} Settings;

static void read(Attributes *from, void *settings) {
  Settings *s = settings;
  int64_t given[6] = {0};
  const size_t count = attribute_some_ints(from, "pads", given, 6);
  if (count != 4 && count != 6) {
    attributes_fail(from, "Conv3x3: an attribute holds too few integers");
    return;
  }
  s->rank = count / 2 + 2;
  for (size_t i = 0; i < count; i++) s->pads[i % (count / 2) + 3 - count / 2 + i / (count / 2) * 3] = given[i];
  s->turned = attribute_int(from, "turned");
}

static void compute(Call *call, const void *settings) {
  const Settings *s = settings;
  const Shape big = shape_of(call, 0), taps = shape_of(call, 1);
  const float *x = input(call, 0), *w = input(call, 1), *bias = input(call, 2);
  if (call->failed) return;
  int sound = big.rank == s->rank && taps.rank == s->rank;
  const size_t at = s->rank - 2; /* of rows; in depth there is one picture, and one tap, or an axis of them */
  const int64_t deep = sound && at > 2 ? taps.dims[2] : 1, d = sound && at > 2 ? big.dims[2] : 1;
  sound = sound && taps.dims[at] == 3 && taps.dims[at + 1] == 3 && deep >= 1 && deep <= 7 && d;
  for (int i = 0; i < 6; i++) sound = sound && s->pads[i] >= 0 && s->pads[i] <= (i % 3 ? 2 : deep - 1);
  const int64_t m = sound ? taps.dims[s->turned ? 1 : 0] : 0, c = sound ? taps.dims[s->turned ? 0 : 1] : 0;
  sound = sound && c && c == big.dims[1] && d + s->pads[0] + s->pads[3] >= deep;
  for (int i = 0; i < 2; i++)
    sound = sound && big.dims[at + i] && big.dims[at + i] + s->pads[1 + i] + s->pads[4 + i] > 2;
  if (sound && bias) {
    const Shape more = shape_of(call, 2);
    sound = more.rank == 1 && more.dims[0] == m;
  }
  if (!sound) {
    fail(call, "Conv3x3: operands or attributes do not belong together");
    return;
  }
  Job j = {
      .x = x, .w = w, .bias = bias, .c = c, .m = m, .h = big.dims[at], .w_x = big.dims[at + 1],
      .oh = big.dims[at] + s->pads[1] + s->pads[4] - 2, .ow = big.dims[at + 1] + s->pads[2] + s->pads[5] - 2,
      .taps = deep, .d = d, .od = d + s->pads[0] + s->pads[3] - deep + 1,
      .front = s->pads[0], .top = s->pads[1], .left = s->pads[2],
      .of_m = 9 * deep * (s->turned ? 1 : c), .of_c = 9 * deep * (s->turned ? m : 1), .turned = s->turned,
  };
  Shape shape = {.rank = s->rank, .dims = {big.dims[0], m, j.od}};
  shape.dims[at] = j.oh;
  shape.dims[at + 1] = j.ow;
  j.y = output(call, 0, &shape);
  j.images = big.dims[0] * j.od;
  if (call->failed || !j.images || !m) return;
  j.wide_m = up(m, LANES) * LANES;
  j.wide_c = up(c, LANES) * LANES;
  j.place = deep * c * j.wide_m + GAP;
  const int64_t band = most(BAND, j.place * PLACES / 2); /* where there are many weights, they are read less often */
  const int64_t tiles = most(band / (PLACES * (j.wide_m + j.wide_c)), TILES_LEAST);
  j.down = up(j.oh, INNER);
  j.parts = up(up(j.ow, INNER), tiles);
  j.across = up(up(j.ow, INNER), j.parts);
  const int64_t all = j.images * j.down * j.parts;
  j.rows = least(most(tiles / j.across, up(TILES_LEAST, j.across)), all);
  const int64_t most_tiles = j.rows * j.across;
  const int64_t space = PLACES * (most_tiles * (j.wide_c + j.wide_m) + 2 * GAP) +
                        most(SIDE * (INNER * j.across + 2) * j.wide_c, INNER * INNER * j.across * j.wide_m);
  j.weights = scratch(call, PLACES * j.place, sizeof(float));
  parallel_ranges(call, deep * c * (j.wide_m / LANES), 16, transform_weights, &j);
  parallel_spaces(call, up(all, j.rows), space, convolve_band, &j);
}

const Kernel winograd_kernels[] = {
    {"Conv3x3", "ffF", "f", sizeof(Settings), read, compute},
    {0},
};
