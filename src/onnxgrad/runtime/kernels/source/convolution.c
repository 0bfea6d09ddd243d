/* The cotangent of the weights of a two-dimensional convolution.
 *
 *   w[m, c, i, j] = sum over n, p, q of y[n, m, p, q] * x[n, c, p*sh + i*dh - ph, q*sw + j*dw - pw]
 *
 * Rows of x are laid end to end with their padding, rows of y at the same pitch with zeros between: then each tap
 * is one long dot product of contiguous numbers, and a tile of rows of y by taps of x is held in registers.
 * With strides, x is split into its phases first, each of which has stride one.
 *
 * The batch is cut into shares whose number depends on the sizes alone, and their sums are added in order:
 * the result is the same for every number of threads.
 */
#include "dot_products.h"
#include "kernel.h"
#include "lanes.h"
#include "windows.h"
#include "winograd_weights.h"

#include <math.h>
#include <string.h>

enum {
  TASKS = 16,               /* of one call, if it is worth it */
  SPAN_LEAST = 256,         /* numbers in one dot product, */
  SPAN_SHORT = 1024,        /* below which adding up what a tile holds shows, */
  SPAN_MOST = 4096,         /* and at most */
  CHUNK = 96 * 1024,        /* numbers that are laid out at once, so that they stay near the processor */
  PARTIALS = 1 << 20,       /* numbers in all partial sums */
  FINISHED = 4096,          /* sums added up by one task, at least */
  BLOCK = 16,               /* rows of the weights that are added up together */
  MEMORY = 1 << 24,         /* numbers that may be laid out in any case, */
  ROOMY = 64,               /* how many for each one that is given, */
  SPARSE = 16,              /* and how many for each one of a plane */
};

typedef struct {
  const Correlation *at;
  const float *x, *y;
  float *out, *partial;
  const int64_t *offset;                   /* of each tap in the planes of a channel */
  const int64_t *row_phase, *column_phase; /* those in use */
  int64_t row_phases, column_phases, most_down;
  int64_t pitch, rows, run, plane; /* of a band: width with padding, rows of y, numbers of y and of one plane of x */
  int64_t tail;                    /* zeros that the last row of x goes on with, for what taps reach over */
  int64_t bands, per_unit, units, shares, panels, outs;
  int as_it_is; /* x and y are products of matrices already, and need not be laid out */
} Job;

/* --- the layout --------------------------------------------------------------------------------------------------- */

/* to[q] = from[2 * q + first] as far as whole vectors of `N` go. */
#define EVERY_SECOND(N)                                                                        \
  for (; q + N <= end && 2 * q + first - odd + 2 * N <= width; q += N) {                        \
    typedef float part __attribute__((vector_size(N * 4), aligned(4), may_alias));              \
    const part *pair = (const part *)(from + 2 * q + first - odd);                              \
    if (odd)                                                                                    \
      *(part *)(to + q) = SHUFFLE(part, pair[0], pair[1], ODD_##N);                               \
    else                                                                                        \
      *(part *)(to + q) = SHUFFLE(part, pair[0], pair[1], EVEN_##N);                              \
  }

/* A row of one phase: to[q] = from[q * step + first] for q in left … right - 1, and zeros beside it. */
INLINE void lay_row(float *to, int64_t count, const float *from, int64_t width, int64_t first, int64_t step,
                    int64_t left, int64_t right) {
  int64_t q = 0;
  for (; q < left; q++) to[q] = 0;
  if (step == 1) {
    copy(to + left, from + first + left, right - left);
    q = right;
  } else if (step == 2) {
    const int64_t odd = first & 1, end = right;
#if LANES == 16
    EVERY_SECOND(16)
#endif
#if LANES >= 8
    EVERY_SECOND(8)
#endif
    EVERY_SECOND(4)
  }
  for (; q < right; q++) to[q] = from[q * step + first];
  for (; q < count; q++) to[q] = 0;
}

/* The planes of one channel of one image for the rows of y from `top` on. */
static float *lay_x(const Job *j, float *to, const float *from, int64_t top) {
  const Correlation *at = j->at;
  const int64_t pitch = j->pitch, rows = j->rows + j->most_down;
  for (int64_t a = 0; a < j->row_phases; a++)
    for (int64_t b = 0; b < j->column_phases; b++) {
      const int64_t first = j->column_phase[b] - at->pw;
      const int64_t left = left_of(at, pitch, j->column_phase[b]), right = right_of(at, pitch, j->column_phase[b]);
      for (int64_t r = 0; r < rows; r++, to += pitch) {
        const int64_t row = (top + r) * at->sh + j->row_phase[a] - at->ph;
        if (row < 0 || row >= at->h)
          clear(to, pitch);
        else
          lay_row(to, pitch, from + row * at->w, at->w, first, at->sw, left, right);
      }
    }
  return to;
}

/* The rows of y from `top` on, of one channel of one image. */
static float *lay_y(const Job *j, float *to, const float *from, int64_t top) {
  const Correlation *at = j->at;
  float *end = to + j->run;
  const int64_t rows = least(j->rows, at->oh - top);
  for (int64_t r = 0; r < rows; r++) {
    const int64_t room = least(j->pitch, end - to);
    copy(to, from + (top + r) * at->ow, at->ow);
    clear(to + at->ow, room - at->ow);
    to += room;
  }
  clear(to, end - to);
  return end;
}

/* --- the work ----------------------------------------------------------------------------------------------------- */

/* Adds the products of some images, of channels of a group: of numbers from `first` on, as they lie there. */
static void multiply_in_place(const Job *j, int64_t g, int64_t from_c, int64_t c, int64_t image, int64_t images,
                              int64_t first, float *panels, float *sums) {
  const Correlation *at = j->at;
  const int64_t plane = at->h * at->w, x_image = at->groups * at->c * plane, y_image = at->groups * at->m * plane;
  const float *x = j->x + image * x_image + (g * at->c + from_c) * plane + first;
  const float *y = j->y + image * y_image + g * at->m * plane + first;
  const Span s = {y, x, plane, y_image, x_image, images, j->run};
  multiply(&s, j->offset, at->kh * at->kw, at->m, c, plane, panels, sums);
}

/* The same for rows of y from `top` on, which are laid out before. */
static void multiply_laid_out(const Job *j, int64_t g, int64_t from_c, int64_t c, int64_t image, int64_t images,
                              int64_t top, float *memory, float *sums) {
  const Correlation *at = j->at;
  const int64_t planes = j->row_phases * j->column_phases * j->plane;
  float *x = memory, *to = x;
  for (int64_t k = 0; k < c; k++)
    for (int64_t n = image; n < image + images; n++)
      to = lay_x(j, to, j->x + ((n * at->groups + g) * at->c + from_c + k) * at->h * at->w, top);
  clear(to, j->tail);
  float *y = to += j->tail;
  for (int64_t k = 0; k < at->m; k++)
    for (int64_t n = image; n < image + images; n++)
      to = lay_y(j, to, j->y + ((n * at->groups + g) * at->m + k) * at->oh * at->ow, top);
  const Span s = {y, x, images * j->run, j->run, planes, images, j->run};
  multiply(&s, j->offset, at->kh * at->kw, at->m, c, images * planes, to, sums);
}

static void part(void *state, int64_t index, float *space) {
  const Job *j = state;
  const Correlation *at = j->at;
  const int64_t share = index / j->panels, panel = index % j->panels;
  const int64_t taps = at->kh * at->kw, whole = at->groups > 1 ? at->groups : at->c;
  const int64_t first = whole * panel / j->panels, last = whole * (panel + 1) / j->panels;
  const int64_t from_group = at->groups > 1 ? first : 0, to_group = at->groups > 1 ? last : 1;
  const int64_t from_c = at->groups > 1 ? 0 : first, c = at->groups > 1 ? at->c : last - first;
  float *out = j->partial + share * j->outs;
  for (int64_t g = from_group; g < to_group; g++) {
    float *sums = out + (g * at->c + from_c) * taps * at->m;
    clear(sums, c * taps * at->m);
    for (int64_t u = j->units * share / j->shares; u < j->units * (share + 1) / j->shares; u++) {
      const int64_t band = u % j->bands, image = u / j->bands * j->per_unit;
      const int64_t images = least(j->per_unit, at->images - image);
      if (j->as_it_is)
        multiply_in_place(j, g, from_c, c, image, images, band * j->run, space, sums);
      else
        multiply_laid_out(j, g, from_c, c, image, images, band * j->rows, space, sums);
    }
  }
}

/* One sum in full, number by number: where x or y hold an infinity, zeros that were laid beside it are not harmless;
 * and where windows reach far, there would be little but zeros. */
static float plainly(const Job *j, int64_t index) {
  const Correlation *at = j->at;
  const int64_t kw = index % at->kw, kh = index / at->kw % at->kh, c = index / at->kw / at->kh % at->c;
  const int64_t channel = index / at->kw / at->kh / at->c, g = channel / at->m;
  int64_t top, bottom, left, right;
  meeting(kh * at->dh - at->ph, at->sh, at->h, at->oh, &top, &bottom);
  meeting(kw * at->dw - at->pw, at->sw, at->w, at->ow, &left, &right);
  float sum = 0;
  for (int64_t n = 0; n < at->images; n++) {
    const float *x = j->x + ((n * at->groups + g) * at->c + c) * at->h * at->w;
    const float *y = j->y + (n * at->groups * at->m + channel) * at->oh * at->ow;
    for (int64_t p = top; p < bottom; p++) {
      const int64_t start = (p * at->sh + kh * at->dh - at->ph) * at->w + kw * at->dw - at->pw;
      for (int64_t q = left; q < right; q++) sum += x[start + q * at->sw] * y[p * at->ow + q];
    }
  }
  return sum;
}

static void all_plainly(void *data, int64_t from, int64_t to) {
  const Job *j = data;
  for (int64_t k = from; k < to; k++) j->out[k] = plainly(j, k);
}

static void mend(void *data, int64_t from, int64_t to) {
  const Job *j = data;
  for (int64_t k = from; k < to; k++)
    if (!isfinite(j->out[k])) j->out[k] = plainly(j, k);
}

/* Adds up the shares for some blocks of rows of the weights; there they lie column by column. */
static void finish(void *data, int64_t from, int64_t to) {
  const Job *j = data;
  const int64_t m = j->at->m, columns = j->at->c * j->at->kh * j->at->kw, blocks = up(m, BLOCK);
  for (int64_t block = from; block < to; block++) {
    const int64_t first = block % blocks * BLOCK, rows = least(BLOCK, m - first), group = block / blocks;
    const float *sums = j->partial + group * columns * m + first;
    float *out = j->out + (group * m + first) * columns, doubt = 0;
    for (int64_t k = 0; k < columns; k++) {
      float sum[BLOCK] = {0};
      for (int64_t share = 0; share < j->shares; share++)
        for (int64_t r = 0; r < rows; r++) sum[r] += sums[share * j->outs + k * m + r];
      for (int64_t r = 0; r < rows; r++) {
        doubt += sum[r] * 0;
        out[r * columns + k] = sum[r];
      }
    }
    if (doubt != 0 || isnan(doubt))
      for (int64_t k = 0; k < rows * columns; k++)
        if (!isfinite(out[k])) out[k] = plainly(j, (group * m + first) * columns + k);
  }
}

/* --- the plan ----------------------------------------------------------------------------------------------------- */

/* Whether there is one tap, and all of x and y meet in it, in whole vectors. */
static int one_tap(const Correlation *at) {
  return at->kh * at->kw == 1 && at->sh == 1 && at->sw == 1 && !at->ph && !at->pw && at->oh == at->h &&
         at->ow == at->w && at->h * at->w % LANES == 0;
}

/* How the work is cut: by the sizes alone. */
static void cut(Job *j, const Correlation *at) {
  const int64_t tasks = (double)at->images * at->oh * at->ow * j->outs < 1e5 ? 1 : TASKS;
  const int64_t channel = at->m + at->c * j->row_phases * j->column_phases;
  const int64_t room = least(most(CHUNK / channel, SPAN_LEAST), SPAN_MOST);
  j->rows = least(at->oh, most(room / j->pitch, 1));
  j->bands = up(at->oh, j->rows);
  j->rows = up(at->oh, j->bands);
  j->bands = up(at->oh, j->rows);
  if (j->as_it_is) { /* bands of as many numbers each */
    j->bands = up(at->h * at->w, room);
    while (at->h * at->w % (j->bands * LANES)) j->bands++;
  }
  j->per_unit = 1;
  if (j->bands == 1) {
    const int64_t numbers = j->rows * j->pitch;
    const int64_t even = most(at->images / tasks, most(SPAN_SHORT / numbers, 1));
    j->per_unit = least(least(even, most(room / numbers, 1)), at->images);
  }
  j->units = up(at->images, j->per_unit) * j->bands;
  j->panels = at->groups > 1 ? least(at->groups, tasks) : 1;
  j->shares = least(least(j->units, up(tasks, j->panels)), most(PARTIALS / j->outs, 1));
  if (at->groups == 1) j->panels = least(at->c, up(tasks, j->shares));
  j->run = j->as_it_is ? at->h * at->w / j->bands : up((j->rows - 1) * j->pitch + at->ow, LANES) * LANES;
  j->plane = (j->rows + j->most_down) * j->pitch;
}

static void correlate(Call *call, const Correlation *at, const float *x, const float *y, float *out) {
  Job j = {.at = at, .x = x, .y = y, .out = out};
  const int64_t taps = at->kh * at->kw;
  j.outs = at->groups * at->m * at->c * taps;
  if (!j.outs) return;
  if (!at->images || !at->oh || !at->ow || !at->h || !at->w) {
    memset(out, 0, (size_t)j.outs * sizeof *out);
    return;
  }
  if (winograd_fits(at)) {
    winograd(call, at, x, y, out);
    parallel_ranges(call, j.outs, FINISHED, mend, &j);
    return;
  }
  int64_t *row_phase = scratch(call, taps + 2 * (at->kh + at->kw), sizeof *row_phase);
  if (call->failed) return;
  int64_t *column_phase = row_phase + at->kh, *down = column_phase + at->kw, *across = down + at->kh;
  int64_t *offset = across + at->kw;
  const Phases rows = phases_of(at->kh, at->sh, at->dh, row_phase, down);
  const Phases columns = phases_of(at->kw, at->sw, at->dw, column_phase, across);
  const int64_t widest = at->ow + columns.furthest;
  j.row_phases = rows.count;
  j.column_phases = columns.count;
  j.most_down = rows.furthest;
  j.row_phase = row_phase;
  j.column_phase = column_phase;
  j.offset = offset;
  j.as_it_is = one_tap(at);
  j.pitch = pitch_of(at, column_phase, j.column_phases, widest);
  j.tail = LANES + widest - least(widest, j.pitch);
  cut(&j, at);

  const int64_t c = at->groups > 1 ? at->c : up(at->c, j.panels), planes = j.row_phases * j.column_phases;
  const size_t count = (size_t)(j.shares * j.panels);
  const double size = (double)j.per_unit * ((double)c * planes * j.plane + (double)at->m * j.run) + j.tail;
  const double given = (double)at->images * at->groups * ((double)at->c * at->h * at->w + (double)at->m * at->oh * at->ow);
  const double met = (double)least(at->h * at->w, at->oh * at->ow), laid = (double)j.bands * j.run;
  if (!j.as_it_is && (size * count > ROOMY * given + MEMORY || laid > SPARSE * met + SPAN_MOST)) {
    parallel_ranges(call, j.outs, 1, all_plainly, &j);
    return;
  }
  for (int64_t i = 0; i < at->kh; i++)
    for (int64_t k = 0; k < at->kw; k++)
      offset[i * at->kw + k] =
          (i % j.row_phases * j.column_phases + k % j.column_phases) * j.plane + down[i] * j.pitch + across[k];
  const int64_t panels = at->m < FEW ? 0 : quotient(at->m, COLUMNS) * COLUMNS * j.run;
  const int64_t space = j.as_it_is ? panels : up((int64_t)size + panels * j.per_unit, LANES) * LANES;
  j.partial = scratch(call, j.shares * j.outs, sizeof(float));
  parallel_spaces(call, (int64_t)count, space, part, &j);
  parallel_ranges(call, at->groups * up(at->m, BLOCK), up(FINISHED, BLOCK * at->c * taps), finish, &j);
}

/* --- the operator ------------------------------------------------------------------------------------------------- */

typedef struct {
  int64_t kernel[2];
  Windows windows;
} Settings;

static void read(Attributes *from, void *settings) {
  Settings *s = settings;
  attribute_ints(from, "kernel", s->kernel, 2);
  read_windows(from, &s->windows);
}

static void compute(Call *call, const void *settings) {
  const Settings *s = settings;
  const Windows *by = &s->windows;
  const Shape big = shape_of(call, 0), small = shape_of(call, 1);
  const float *x = input(call, 0), *y = input(call, 1);
  if (call->failed) return;
  const int row = big.rank == 3; /* over one axis: pictures of one row, and weights of the first rank */
  int sound = (big.rank == 4 || row) && small.rank == big.rank && big.dims[0] == small.dims[0] && by->group > 0;
  if (row) sound = sound && s->kernel[0] == 1 && !by->pads[0];
  for (int i = 0; i < 2; i++)
    sound = sound && within_reach(s->kernel[i], by->strides[i], by->dilations[i], by->pads[i]);
  if (!sound || s->kernel[0] * s->kernel[1] > MOST_TAPS || big.dims[1] % by->group || small.dims[1] % by->group) {
    fail(call, "ConvWeightGrad: operands or attributes do not belong together");
    return;
  }
  const Correlation at = {
      .images = big.dims[0], .groups = by->group, .m = small.dims[1] / by->group, .c = big.dims[1] / by->group,
      .h = row ? 1 : big.dims[2], .w = big.dims[3 - row], .oh = row ? 1 : small.dims[2], .ow = small.dims[3 - row],
      .kh = s->kernel[0], .kw = s->kernel[1], .sh = by->strides[0], .sw = by->strides[1],
      .dh = by->dilations[0], .dw = by->dilations[1], .ph = by->pads[0], .pw = by->pads[1],
  };
  Shape shape = {.rank = 4, .dims = {small.dims[1], at.c, at.kh, at.kw}};
  if (row) shape = (Shape){.rank = 3, .dims = {small.dims[1], at.c, at.kw}};
  float *out = output(call, 0, &shape);
  if (!call->failed) correlate(call, &at, x, y, out);
}

const Kernel convolution_kernels[] = {
    {"ConvWeightGrad", "ff", "f", sizeof(Settings), read, compute},
    {0},
};
