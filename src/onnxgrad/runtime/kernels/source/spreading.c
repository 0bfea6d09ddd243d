/* The cotangent of the input of a two-dimensional convolution with strides.
 *
 *   x[n, c, p*sh + i*dh - ph, q*sw + j*dw - pw]  is the sum over m, i, j of  y[n, m, p, q] * w[m, c, i, j]
 *
 * Each phase of x (see windows.h) is a sum of shifted y, whose rows lie end to end with zeros between: so numbers of
 * a whole plane are computed in vectors, for several channels at once, and the phases are interleaved at the end.
 */
#include <math.h>
#include <string.h>

#include "kernel.h"
#include "lanes.h"
#include "windows.h"

enum {
  PIECES = 32,         /* of the work, at most: each has memory of its own */
  MEMORY = 1 << 24,    /* numbers in all of it, if two pieces get along with that, */
  ROOMY = 64,          /* or this for each one that is given; */
  PLANE = 4096,        /* numbers of a plane in any case, */
  SPARSE = 16,         /* and for each one of y */
  CHANNELS = 6,        /* computed at once */
#if defined(__AVX512F__) || defined(__aarch64__)
  VECTORS = 4,
#else
  VECTORS = 2,
#endif
};

typedef struct {
  const Correlation *at;
  const float *y, *w;
  float *out, *packed, *memory;
  Phases rows_in, columns_in; /* phases of rows and of columns, and: */
  int64_t row_phases, column_phases, *row_phase, *column_phase, *taps, *offset; /* how many of a phase, and where */
  int64_t pitch, rows, plane, front, line, slot, pieces; /* line: numbers that one channel of y takes */
  unsigned char busy[PIECES];
} Job;

/* --- the sums ----------------------------------------------------------------------------------------------------- */

INLINE void tile(const int vectors, const int channels, const float *y, int64_t line, int64_t m, const int64_t *offset,
                 int64_t taps, const float *w, float *z, int64_t plane) {
  lanes sum[VECTORS][CHANNELS];
#pragma GCC unroll 16
  for (int v = 0; v < vectors; v++)
#pragma GCC unroll 16
    for (int k = 0; k < channels; k++) sum[v][k] = lanes_of(0);
  for (int64_t i = 0; i < m; i++, y += line)
    for (int64_t t = 0; t < taps; t++, w += channels) {
      const float *from = y - offset[t];
      lanes here[VECTORS];
#pragma GCC unroll 16
      for (int v = 0; v < vectors; v++) {
        here[v] = *(const lanes *)(from + v * LANES);
        HELD(here[v]);
      }
#pragma GCC unroll 16
      for (int k = 0; k < channels; k++) {
        lanes factor = lanes_of(w[k]);
        HELD(factor);
#pragma GCC unroll 16
        for (int v = 0; v < vectors; v++) sum[v][k] += here[v] * factor;
      }
    }
#pragma GCC unroll 16
  for (int k = 0; k < channels; k++)
#pragma GCC unroll 16
    for (int v = 0; v < vectors; v++) *(lanes *)(z + k * plane + v * LANES) = sum[v][k];
}

/* All of a phase, for some channels. */
#define PLANES(K)                                                                                                  \
  static void planes_##K(const Job *j, const float *y, const int64_t *offset, int64_t taps, const float *w, float *z, \
                         int64_t channel) {                                                                        \
    int64_t p = 0;                                                                                                 \
    for (; p + VECTORS * LANES <= j->plane; p += VECTORS * LANES)                                                  \
      tile(VECTORS, K, y + p, j->line, j->at->m, offset, taps, w, z + p, channel);                                 \
    for (; p < j->plane; p += LANES) tile(1, K, y + p, j->line, j->at->m, offset, taps, w, z + p, channel);        \
  }
PLANES(1)
PLANES(2)
PLANES(4)
PLANES(6)

/* How many of `c` channels are computed at once: as many as there is a tile for. */
static int64_t block_of(int64_t c) { return c >= 6 ? 6 : c >= 4 ? 4 : c >= 2 ? 2 : 1; }

/* --- the layout --------------------------------------------------------------------------------------------------- */

/* Channels of y, each after zeros for what taps reach back to. */
static void lay(const Job *j, const float *y, float *to) {
  const Correlation *at = j->at;
  for (int64_t m = 0; m < at->m; m++) {
    float *end = to + j->line;
    clear(to, j->front);
    to += j->front;
    for (int64_t p = 0; p < at->oh; p++, y += at->ow, to += j->pitch) {
      copy(to, y, at->ow);
      clear(to + at->ow, j->pitch - at->ow);
    }
    clear(to, end - to);
    to = end;
  }
}

/* out[2 * k] = a[k] and out[2 * k + 1] = b[k] as far as whole vectors go. */
#define ALTERNATE(N)                                                                           \
  for (; k + N <= count; k += N) {                                                             \
    typedef float part __attribute__((vector_size(N * 4), aligned(4), may_alias));             \
    const part left = *(const part *)(a + k), right = *(const part *)(b + k);                  \
    *(part *)(out + 2 * k) = SHUFFLE(part, left, right, LOW_##N);                          \
    *(part *)(out + 2 * k + N) = SHUFFLE(part, left, right, HIGH_##N);                         \
  }

static void alternate(float *out, const float *a, const float *b, int64_t count) {
  int64_t k = 0;
#if LANES == 16
  ALTERNATE(16)
#endif
#if LANES >= 8
  ALTERNATE(8)
#endif
  ALTERNATE(4)
  for (; k < count; k++) {
    out[2 * k] = a[k];
    out[2 * k + 1] = b[k];
  }
}

/* Where in a row of phases the numbers first, first + sw, … of a row of x are, and how many of them are not zero. */
static int64_t line_of(const Job *j, int64_t first, int64_t *count) {
  const Correlation *at = j->at;
  const int64_t b = phase_at(&j->columns_in, (first + at->pw) % at->sw);
  const int64_t start = (first + at->pw) / at->sw, all = up(at->w - first, at->sw);
  *count = b == j->column_phases ? 0 : least(all, most(j->pitch - start, 0));
  return *count ? b * j->plane + start : 0;
}

/* A channel of x from its phases. */
static void interleave(const Job *j, const float *z, float *out) {
  const Correlation *at = j->at;
  int64_t even = 0, odd = 0, evens = 0, odds = 0, done = 0;
  if (at->sw == 2 && at->w > 1) {
    even = line_of(j, 0, &evens);
    odd = line_of(j, 1, &odds);
    done = least(evens, odds);
  }
  for (int64_t h = 0; h < at->h; h++, out += at->w) {
    const int64_t a = phase_at(&j->rows_in, (h + at->ph) % at->sh), p = (h + at->ph) / at->sh;
    if (a == j->row_phases || p >= j->rows) {
      clear(out, at->w);
      continue;
    }
    const float *row = z + a * j->column_phases * j->plane + p * j->pitch;
    if (done) alternate(out, row + even, row + odd, done);
    if (2 * done == at->w) continue;
    for (int64_t first = 0, count; first < least(at->sw, at->w); first++) {
      const float *line = row + line_of(j, first, &count);
      int64_t k = done;
      for (; k < count; k++) out[first + k * at->sw] = line[k];
      for (; first + k * at->sw < at->w; k++) out[first + k * at->sw] = 0;
    }
  }
}

/* --- the work ----------------------------------------------------------------------------------------------------- */

static void some(void *data, size_t index) {
  Job *j = data;
  const Correlation *at = j->at;
  const int64_t phases = j->row_phases * j->column_phases, all_taps = at->kh * at->kw, channel = phases * j->plane;
  const int64_t cells = at->images * at->groups;
  int slot = 0;
  while (__atomic_exchange_n(&j->busy[slot], 1, __ATOMIC_ACQUIRE)) slot = (slot + 1) % PIECES;
  float *y = j->memory + slot * j->slot, *z = y + at->m * j->line;
  for (int64_t cell = cells * (int64_t)index / j->pieces; cell < cells * ((int64_t)index + 1) / j->pieces; cell++) {
    const int64_t g = cell % at->groups;
    lay(j, j->y + cell * at->m * at->oh * at->ow, y);
    for (int64_t c = 0, block; c < at->c; c += block) {
      block = block_of(at->c - c);
      const float *w = j->packed + (g * at->c + c) * at->m * all_taps;
      const int64_t *offset = j->offset;
      for (int64_t f = 0; f < phases; w += j->taps[f] * at->m * block, offset += j->taps[f], f++) {
        float *to = z + f * j->plane;
        switch (block) {
          case 1: planes_1(j, y + j->front, offset, j->taps[f], w, to, channel); break;
          case 2: planes_2(j, y + j->front, offset, j->taps[f], w, to, channel); break;
          case 4: planes_4(j, y + j->front, offset, j->taps[f], w, to, channel); break;
          case 6: planes_6(j, y + j->front, offset, j->taps[f], w, to, channel); break;
        }
      }
      for (int64_t k = 0; k < block; k++)
        interleave(j, z + k * channel, j->out + (cell * at->c + c + k) * at->h * at->w);
    }
  }
  __atomic_store_n(&j->busy[slot], 0, __ATOMIC_RELEASE);
}

/* Number by number: where w holds an infinity, zeros that were laid beside y are not harmless; and where windows reach
 * far, there would be little but zeros. */
static void plainly(void *data, int64_t from, int64_t to) {
  const Job *j = data;
  const Correlation *at = j->at;
  for (int64_t index = from; index < to; index++) {
    const int64_t cell = index / at->c, c = index % at->c, g = cell % at->groups;
    float *out = j->out + index * at->h * at->w;
    clear(out, at->h * at->w);
    for (int64_t m = 0; m < at->m; m++)
      for (int64_t i = 0; i < at->kh; i++)
        for (int64_t k = 0; k < at->kw; k++) {
          const float *y = j->y + (cell * at->m + m) * at->oh * at->ow;
          const float w = j->w[(((g * at->m + m) * at->c + c) * at->kh + i) * at->kw + k];
          int64_t top, bottom, left, right;
          meeting(i * at->dh - at->ph, at->sh, at->h, at->oh, &top, &bottom);
          meeting(k * at->dw - at->pw, at->sw, at->w, at->ow, &left, &right);
          for (int64_t p = top; p < bottom; p++) {
            const int64_t start = (p * at->sh + i * at->dh - at->ph) * at->w + k * at->dw - at->pw;
            for (int64_t q = left; q < right; q++) out[start + q * at->sw] += y[p * at->ow + q] * w;
          }
        }
  }
}

/* w in the order in which it is read: by group, channels of one tile, phase, m, tap, channel. */
static int pack(const Job *j) {
  const Correlation *at = j->at;
  const int64_t all_taps = at->kh * at->kw;
  float *to = j->packed, doubt = 0;
  for (int64_t g = 0; g < at->groups; g++)
    for (int64_t c = 0, block; c < at->c; c += block) {
      block = block_of(at->c - c);
      for (int64_t f = 0; f < j->row_phases * j->column_phases; f++)
        for (int64_t m = 0; m < at->m; m++)
          for (int64_t i = f / j->column_phases; i < at->kh; i += j->row_phases)
            for (int64_t k = f % j->column_phases; k < at->kw; k += j->column_phases)
              for (int64_t q = 0; q < block; q++) {
                *to = j->w[((g * at->m + m) * at->c + c + q) * all_taps + i * at->kw + k];
                doubt += *to++ * 0;
              }
    }
  return doubt != 0 || isnan(doubt);
}

static void spread(Call *call, const Correlation *at, const float *y, const float *w, float *out) {
  Job j = {.at = at, .y = y, .w = w, .out = out};
  if (!at->images || !at->c || !at->h || !at->w) return;
  const int64_t all_taps = at->kh * at->kw, numbers = at->images * at->groups * at->c * at->h * at->w;
  if (!at->m || !at->oh || !at->ow) {
    clear(out, numbers);
    return;
  }
  int64_t *memory = scratch(call, 2 * all_taps + 2 * (at->kh + at->kw), sizeof *memory);
  j.packed = scratch(call, at->groups * at->m * at->c * all_taps, sizeof(float));
  if (call->failed) return;
  j.row_phase = memory;
  j.column_phase = memory + at->kh;
  j.taps = j.column_phase + at->kw;
  j.offset = j.taps + all_taps;
  int64_t *down = j.offset + all_taps, *across = down + at->kh, *offset = j.offset;
  j.rows_in = phases_of(at->kh, at->sh, at->dh, j.row_phase, down);
  j.columns_in = phases_of(at->kw, at->sw, at->dw, j.column_phase, across);
  j.row_phases = j.rows_in.count;
  j.column_phases = j.columns_in.count;
  const int64_t most_down = j.rows_in.furthest, most_across = j.columns_in.furthest;
  j.pitch = pitch_of(at, j.column_phase, j.column_phases, at->ow + most_across);
  j.rows = at->oh + most_down;
  const double channel = (double)j.rows * j.pitch + LANES, front = (double)most_down * j.pitch + most_across;
  const double size = at->m * (channel + front) + CHANNELS * (double)j.row_phases * j.column_phases * channel;
  const int64_t cells = at->images * at->groups;
  j.pieces = most(least(cells, least(PIECES, (int64_t)(MEMORY / size))), least(cells, 2));
  const double given = (double)cells * ((double)at->m * at->oh * at->ow + (double)at->c * at->h * at->w);
  const double weights = (double)at->groups * at->m * at->c * all_taps;
  if (size * (double)j.pieces > ROOMY * (given + weights) + MEMORY || channel > SPARSE * (double)at->oh * at->ow + PLANE) {
    parallel_ranges(call, cells * at->c, 1, plainly, &j);
    return;
  }
  j.plane = up(j.rows * j.pitch, LANES) * LANES;
  j.front = (int64_t)front;
  j.line = j.front + j.plane;
  j.slot = at->m * j.line + CHANNELS * j.row_phases * j.column_phases * j.plane;
  for (int64_t f = 0; f < j.row_phases * j.column_phases; f++) {
    j.taps[f] = 0;
    for (int64_t i = f / j.column_phases; i < at->kh; i += j.row_phases)
      for (int64_t k = f % j.column_phases; k < at->kw; k += j.column_phases, j.taps[f]++)
        *offset++ = down[i] * j.pitch + across[k];
  }
  if (pack(&j)) {
    parallel_ranges(call, cells * at->c, 1, plainly, &j);
    return;
  }
  j.memory = scratch(call, j.pieces * j.slot, sizeof(float));
  parallel(call, (size_t)j.pieces, some, &j);
}

/* --- the operator ------------------------------------------------------------------------------------------------- */

typedef struct {
  int64_t size[2];
  Windows windows;
} Settings;

static void read(Attributes *from, void *settings) {
  Settings *s = settings;
  attribute_ints(from, "size", s->size, 2);
  read_windows(from, &s->windows);
}

/* (y, w) */
static void compute(Call *call, const void *settings) {
  const Settings *s = settings;
  const Windows *by = &s->windows;
  const Shape small = shape_of(call, 0), weights = shape_of(call, 1);
  const float *y = input(call, 0), *w = input(call, 1);
  if (call->failed) return;
  int sound = small.rank == 4 && weights.rank == 4 && small.dims[1] == weights.dims[0] && by->group > 0 &&
              by->group < FAR;
  for (int i = 0; i < 2; i++)
    sound = sound && s->size[i] >= 0 && s->size[i] < FAR && by->pads[i] >= 0 &&
            within_reach(weights.dims[2 + i], by->strides[i], by->dilations[i], by->pads[i]);
  if (!sound || weights.dims[2] * weights.dims[3] > MOST_TAPS || small.dims[1] % by->group) {
    fail(call, "ConvInputGrad: operands or attributes do not belong together");
    return;
  }
  const Correlation at = {
      .images = small.dims[0], .groups = by->group, .m = small.dims[1] / by->group, .c = weights.dims[1],
      .h = s->size[0], .w = s->size[1], .oh = small.dims[2], .ow = small.dims[3],
      .kh = weights.dims[2], .kw = weights.dims[3], .sh = by->strides[0], .sw = by->strides[1],
      .dh = by->dilations[0], .dw = by->dilations[1], .ph = by->pads[0], .pw = by->pads[1],
  };
  const Shape shape = {.rank = 4, .dims = {at.images, at.groups * at.c, at.h, at.w}};
  float *out = output(call, 0, &shape);
  if (!call->failed) spread(call, &at, y, w, out);
}

const Kernel spreading_kernels[] = {
    {"ConvInputGrad", "ff", "f", sizeof(Settings), read, compute},
    {0},
};
