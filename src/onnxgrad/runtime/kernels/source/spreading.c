/* The cotangent of the input of a two-dimensional convolution with strides.
 *
 *   x[n, c, p*sh + i*dh - ph, q*sw + j*dw - pw]  is the sum over m, i, j of  y[n, m, p, q] * w[m, c, i, j]
 *
 * Each phase of x (see windows.h) is a sum of shifted y, whose rows lie end to end with zeros between: so numbers of
 * a whole plane are computed in vectors, for several channels at once, and the phases are interleaved at the end.
 */
#include <math.h>
#include <string.h>

#include "gemm.h"
#include "kernel.h"
#include "lanes.h"
#include "windows.h"

enum {
  PIECES = 32,         /* of the work, at most: each has memory of its own */
  MEMORY = 1 << 24,    /* numbers in all of it, if two pieces get along with that, */
  ROOMY = 64,          /* or this for each one that is given; */
  PLANE = 4096,        /* numbers of a plane in any case, */
  SPARSE = 16,         /* and for each one of y */
  CHANNELS = 24,       /* computed at once, at most */
};

typedef struct {
  const Correlation *at;
  const float *y, *w;
  float *out;
  Phases rows_in, columns_in; /* phases of rows and of columns, and: */
  int64_t row_phases, column_phases, *row_phase, *column_phase;
  int64_t *down, *across, next_down, next_across; /* how far on in its phase a tap is, and the next of the same phase */
  int64_t pitch, rows, plane, front, line; /* line: numbers that one channel of y takes */
} Job;

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

/* A phase of some channels: of each place the sum over m and the taps, which are read where they are. */
static void add_taps(const Job *j, int64_t phase, int64_t channels, const float *w, const float *y, float *z) {
  const Correlation *at = j->at;
  const int64_t row = phase / j->column_phases, column = phase % j->column_phases, taps = at->kh * at->kw;
  const int64_t channel = j->row_phases * j->column_phases * j->plane;
  gemm(&(Product){.a = w + row * at->kw + column, .b = y - j->down[row] * j->pitch - j->across[column], .c = z,
                  .rows = channels, .columns = j->plane,
                  .count = {at->m, up(at->kh - row, j->row_phases), up(at->kw - column, j->column_phases)},
                  .a_step = {at->c * taps, j->row_phases * at->kw, j->column_phases},
                  .b_step = {j->line, -j->next_down * j->pitch, -j->next_across}, .down = taps, .panel = COLUMNS,
                  .c_pitch = channel});
}

/* A picture of one group. */
static void cell(void *data, int64_t index, float *y) {
  const Job *j = data;
  const Correlation *at = j->at;
  const int64_t phases = j->row_phases * j->column_phases, g = index % at->groups;
  float *z = y + at->m * j->line;
  lay(j, j->y + index * at->m * at->oh * at->ow, y);
  for (int64_t c = 0; c < at->c; c += CHANNELS) {
    const int64_t some = least(CHANNELS, at->c - c);
    for (int64_t f = 0; f < phases; f++)
      add_taps(j, f, some, j->w + (g * at->m * at->c + c) * at->kh * at->kw, y + j->front, z + f * j->plane);
    for (int64_t k = 0; k < some; k++)
      interleave(j, z + k * phases * j->plane, j->out + (index * at->c + c + k) * at->h * at->w);
  }
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

/* Whether all of w is finite. */
static int is_finite(const float *w, int64_t count) {
  float doubt = 0;
  for (int64_t k = 0; k < count; k++) doubt += w[k] * 0;
  return doubt == 0;
}

static void spread(Call *call, const Correlation *at, const float *y, const float *w, float *out) {
  Job j = {.at = at, .y = y, .w = w, .out = out};
  if (!at->images || !at->c || !at->h || !at->w) return;
  const int64_t all_taps = at->kh * at->kw, numbers = at->images * at->groups * at->c * at->h * at->w;
  if (!at->m || !at->oh || !at->ow) {
    clear(out, numbers);
    return;
  }
  int64_t *memory = scratch(call, 2 * (at->kh + at->kw), sizeof *memory);
  if (call->failed) return;
  j.row_phase = memory;
  j.column_phase = memory + at->kh;
  j.down = j.column_phase + at->kw;
  j.across = j.down + at->kh;
  j.rows_in = phases_of(at->kh, at->sh, at->dh, j.row_phase, j.down);
  j.columns_in = phases_of(at->kw, at->sw, at->dw, j.column_phase, j.across);
  j.row_phases = j.rows_in.count;
  j.column_phases = j.columns_in.count;
  j.next_down = j.row_phases * at->dh / at->sh;
  j.next_across = j.column_phases * at->dw / at->sw;
  const int64_t most_down = j.rows_in.furthest, most_across = j.columns_in.furthest;
  j.pitch = pitch_of(at, j.column_phase, j.column_phases, at->ow + most_across);
  j.rows = at->oh + most_down;
  const double channel = (double)j.rows * j.pitch + LANES, front = (double)most_down * j.pitch + most_across;
  const double size = at->m * (channel + front) + (double)least(CHANNELS, at->c) * j.row_phases * j.column_phases * channel;
  const int64_t cells = at->images * at->groups;
  const int64_t pieces = most(least(cells, least(PIECES, (int64_t)(MEMORY / size))), least(cells, 2));
  const double given = (double)cells * ((double)at->m * at->oh * at->ow + (double)at->c * at->h * at->w);
  const double weights = (double)at->groups * at->m * at->c * all_taps;
  if (size * (double)pieces > ROOMY * (given + weights) + MEMORY || channel > SPARSE * (double)at->oh * at->ow + PLANE) {
    parallel_ranges(call, cells * at->c, 1, plainly, &j);
    return;
  }
  j.plane = up(j.rows * j.pitch, LANES) * LANES;
  j.front = (int64_t)front;
  j.line = j.front + j.plane;
  const int64_t space = at->m * j.line + least(CHANNELS, at->c) * j.row_phases * j.column_phases * j.plane;
  if (is_finite(w, (int64_t)weights))
    parallel_spaces(call, cells, space, cell, &j);
  else
    parallel_ranges(call, cells * at->c, 1, plainly, &j);
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
