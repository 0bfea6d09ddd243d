/* The cotangent of the weights of a convolution over one to three axes.
 *
 *   w[m, c, i] = sum over n, p of y[n, m, p] * x[n, c, p * stride + i * dilation - padding]     (p and i: of all axes)
 *
 * It is one product of matrices: its rows are the taps of all channels, which are read from x where they are, or from
 * a copy with padding; its columns are channels of y; and the loops of its sums run over images and places of y. Where
 * groups have few channels, as in depthwise convolutions, vectors of groups are multiplied instead.
 *
 * The places are cut into boxes and these into shares, by the sizes alone, and the sums of shares are added in order:
 * the result is the same for every number of threads. */
#include "gemm.h"
#include "winograd.h"
#include <math.h>

enum {
  TASKS = 16,          /* of one call, if it is worth it */
  NUMBERS = 256,       /* places of a product, of which the operands stay near the processor, */
  PLACES_MOST = 4096,  /* and of a box at most, */
  CHUNK = 96 * 1024,   /* or of x and y as many as this */
  PARTIALS = 1 << 20,  /* numbers in all partial sums */
  FINISHED = 4096,     /* sums added up by one task, at least */
  SPARSE = 16,         /* numbers of a copy with padding, for each one that is met */
  TAPS = 9,            /* of groups at a time */
  FAR = 1 << 24,       /* no attribute is as large, and no window reaches as far */
  MOST_TAPS = 1 << 20, /* of one window */
};

typedef struct {
  const Correlation *at;
  const float *x, *y;
  float *out, *partial;
  int64_t places[4], box[4], part[4];   /* images and the axes of y; what is copied together, and multiplied together */
  int64_t reach[3];                     /* numbers of x on each axis of a box, */
  int64_t pitch[3];                     /* and from one to the next, there or in x */
  int64_t channel, image;               /* the same of channels and images */
  const int64_t *row_at;                /* where each tap of each channel is */
  int64_t taps, rows, wide;             /* rows and columns of the sums: taps of channels by channels of y, or groups */
  int64_t units, shares, panels, outs;  /* boxes; their shares, and panels of channels or groups; sums of a share */
  int in_place, by_groups, is_plain;    /* whether x has all that is met; columns are groups; nothing is laid out */
} Job;

/* Boxes of at most `room` places, whole along the last axes, and about equally large. */
static void cut(const int64_t size[4], int64_t room, int64_t box[4]) {
  for (int i = 3; i >= 0; i--) {
    box[i] = quotient(size[i], quotient(size[i], least(size[i], most(room, 1))));
    room = box[i] < size[i] ? 1 : room / size[i];
  }
}

static void corner_of(const Job *j, int64_t unit, int64_t corner[4], int64_t size[4]) {
  for (int i = 3; i >= 0; i--) {
    const int64_t count = quotient(j->places[i], j->box[i]);
    corner[i] = unit % count * j->box[i], unit /= count;
    size[i] = least(j->box[i], j->places[i] - corner[i]);
  }
}

/* A box of one channel, with zeros beyond x. */
static void lay_box(const Job *j, const float *from, const int64_t start[3], float *to) {
  const int64_t *size = j->at->size, width = j->reach[2];
  const int64_t left = least(most(-start[2], 0), width), right = most(least(size[2] - start[2], width), left);
  for (int64_t d = start[0]; d < start[0] + j->reach[0]; d++)
    for (int64_t h = start[1]; h < start[1] + j->reach[1]; h++, to += width) {
      const int is_there = d >= 0 && d < size[0] && h >= 0 && h < size[1];
      clear(to, is_there ? left : width);
      if (!is_there) continue;
      memcpy(to + left, from + (d * size[1] + h) * size[2] + start[2] + left, (size_t)(right - left) * sizeof *to);
      clear(to + right, width - right);
    }
}

static int64_t packed(const Job *j) { return quotient(j->wide, COLUMNS) * least(COLUMNS, j->wide); } /* y, of one place */

/* Adds the products of a box for some channels of a group. */
static void multiply(const Job *j, int64_t g, int64_t from_c, int64_t c, int64_t unit, float *x, float *sums) {
  const Correlation *at = j->at;
  int64_t corner[4], size[4], start[3];
  corner_of(j, unit, corner, size);
  for (int i = 0; i < 3; i++) start[i] = corner[i + 1] * at->strides[i] - at->pads[i];
  const int64_t volume = at->size[0] * at->size[1] * at->size[2], outs = at->out[0] * at->out[1] * at->out[2];
  const int64_t pixels = size[1] * size[2] * size[3], width = least(COLUMNS, j->wide), per_image = packed(j) * pixels;
  const float *from = j->x + ((corner[0] * at->groups + g) * at->c + from_c) * volume;
  const float *small = j->y + (corner[0] * at->groups + g) * at->m * outs +
                       (corner[1] * at->out[1] + corner[2]) * at->out[2] + corner[3];
  float *y = x;
  if (j->in_place) {
    from += start[0] * j->pitch[0] + start[1] * j->pitch[1] + start[2];
  } else {
    for (int64_t n = 0; n < size[0]; n++)
      for (int64_t k = 0; k < c; k++)
        lay_box(j, from + (n * at->groups * at->c + k) * volume, start, x + n * j->image + k * j->channel);
    from = x, y += size[0] * j->image;
  }
  for (int64_t n = 0; n < size[0]; n++)
    pack_panels(small + n * at->groups * at->m * outs, 1, outs, pixels, at->m, width, y + n * per_image);
  const int outer = at->out[0] > 1; /* then there is one image */
  const int64_t line = size[3] * width, *part = j->part;
  const int64_t deep = at->strides[0] * j->pitch[0], down = at->strides[1] * j->pitch[1];
  const int64_t a_step[3] = {outer ? deep : j->image, down, at->strides[2]};
  const int64_t b_step[3] = {outer ? size[2] * line : per_image, line, width};
  for (int64_t o = 0; o < size[outer]; o += part[outer])
    for (int64_t p = 0; p < size[2]; p += part[2])
      for (int64_t q = 0; q < size[3]; q += part[3])
        gemm(&(Product){
            .a = from + o * a_step[0] + p * a_step[1] + q * a_step[2], .row_at = j->row_at, .add = sums, .c = sums,
            .b = y + o * b_step[0] + p * b_step[1] + q * b_step[2], .panel = pixels * width, .rows = c * j->taps,
            .columns = j->wide, .add_pitch = j->wide, .c_pitch = j->wide,
            .count = {least(part[outer], size[outer] - o), least(part[2], size[2] - p), least(part[3], size[3] - q)},
            .a_step = {a_step[0], a_step[1], a_step[2]}, .b_step = {b_step[0], b_step[1], b_step[2]}});
}

INLINE void add_taps(const int taps, const Job *j, const float *x, const float *y, const int64_t size[4],
                     const int64_t *offset, float *sums) {
  lanes sum[TAPS];
#pragma GCC unroll 16
  for (int k = 0; k < taps; k++) sum[k] = *(const lanes *)(sums + k * LANES);
  const int64_t along = j->at->strides[2] * LANES, down = j->at->strides[1] * j->pitch[1];
  for (int64_t p = 0; p < size[2]; p++) {
    const float *from = x + p * down;
    for (int64_t q = 0; q < size[3]; q++, from += along, y += LANES) {
      const lanes here = *(const lanes *)y;
#pragma GCC unroll 16
      for (int k = 0; k < taps; k++) sum[k] += here * *(const lanes *)(from + offset[k]);
    }
  }
#pragma GCC unroll 16
  for (int k = 0; k < taps; k++) *(lanes *)(sums + k * LANES) = sum[k];
}

/* Adds the products of a box for as many groups as a vector holds, from `first` on. */
static void multiply_groups(const Job *j, int64_t first, int64_t unit, float *x, float *sums) {
  const Correlation *at = j->at;
  int64_t corner[4], size[4];
  corner_of(j, unit, corner, size);
  const int64_t groups = least(LANES, at->groups - first), h = at->size[1], w = at->size[2];
  const int64_t oh = at->out[1], ow = at->out[2], taps = j->taps, image = corner[0] * at->groups + first;
  float *y = x + at->c * j->channel;
  for (int64_t c = 0; c < at->c; c++)
    lay_pixels(x + c * j->channel, j->reach[1], j->reach[2], LANES, j->x + (image * at->c + c) * h * w, groups,
               at->c * h * w, h, w, corner[2] * at->strides[1] - at->pads[1], corner[3] * at->strides[2] - at->pads[2]);
  for (int64_t m = 0; m < at->m; m++) {
    lay_pixels(y, size[2], size[3], LANES, j->y + (image * at->m + m) * oh * ow, groups, at->m * oh * ow, oh, ow,
               corner[2], corner[3]);
    for (int64_t c = 0; c < at->c; c++, sums += taps * LANES)
      for (int64_t k = 0; k < taps;) {
        const int64_t *offset = j->row_at + k;
        const float *from = x + c * j->channel;
        float *to = sums + k * LANES;
#define SOME(n) add_taps(n, j, from, y, size, offset, to), k += n; break
        switch (taps - k) {
          case 1: SOME(1);
          case 2: SOME(2);
          case 3: SOME(3);
          case 4: SOME(4);
          case 5: case 10: SOME(5);
          case 6: SOME(6);
          case 7: case 14: SOME(7);
          case 8: case 16: SOME(8);
          default: SOME(TAPS);
        }
      }
  }
}

static void share(void *state, int64_t index, float *space) {
  const Job *j = state;
  const Correlation *at = j->at;
  const int64_t turn = index / j->panels, panel = index % j->panels;
  const int64_t whole = j->by_groups ? quotient(at->groups, LANES) : at->groups > 1 ? at->groups : at->c;
  const int64_t first = whole * panel / j->panels, last = whole * (panel + 1) / j->panels;
  const int is_one = at->groups == 1;
  for (int64_t g = is_one ? 0 : first; g < (is_one ? 1 : last); g++) {
    const int64_t from_c = is_one ? first : 0, c = is_one ? last - first : at->c;
    float *sums = j->partial + turn * j->outs + (g * j->rows + from_c * j->taps) * j->wide;
    clear(sums, (is_one ? c * j->taps : j->rows) * j->wide);
    for (int64_t u = j->units * turn / j->shares; u < j->units * (turn + 1) / j->shares; u++)
      if (j->by_groups)
        multiply_groups(j, g * LANES, u, space, sums);
      else
        multiply(j, g, from_c, c, u, space, sums);
  }
}

/* Adds up the shares; of each row of the sums, a vector at a time. */
static void finish(void *data, int64_t from, int64_t to) {
  const Job *j = data;
  const Correlation *at = j->at;
  const int64_t vectors = j->wide / LANES, all = j->by_groups ? at->groups : at->m;
  for (int64_t i = from; i < to; i++) {
    const int64_t block = i / vectors, first = j->by_groups ? block * LANES : i % vectors * LANES;
    const int64_t some = least(LANES, all - first);
    const float *sums = j->partial + block * j->rows * j->wide + i % vectors * LANES;
    float *out = j->out + (j->by_groups ? first : block * at->m + first) * j->rows;
    for (int64_t r = 0; r < j->rows; r++, sums += j->wide) {
      lanes sum = *(const lanes *)sums;
      for (int64_t k = 1; k < j->shares; k++) sum += *(const lanes *)(sums + k * j->outs);
      for (int64_t k = 0; k < some; k++) out[k * j->rows + r] = sum[k];
    }
  }
}

/* One sum in full, number by number: where x or y hold an infinity, zeros that were laid beside it are not harmless;
 * and where windows reach far, there would be little but zeros. */
static float plainly(const Job *j, int64_t index) {
  const Correlation *at = j->at;
  const int64_t *s = at->strides;
  int64_t start[3], first[3], last[3], rest = index;
  for (int i = 2; i >= 0; i--) {
    start[i] = rest % at->kernel[i] * at->dilations[i] - at->pads[i], rest /= at->kernel[i];
    first[i] = least(start[i] < 0 ? quotient(-start[i], s[i]) : 0, at->out[i]); /* from here on windows meet x */
    last[i] = start[i] < at->size[i] ? most(least(quotient(at->size[i] - start[i], s[i]), at->out[i]), first[i]) : first[i];
  }
  const int64_t c = rest % at->c, channel = rest / at->c, g = channel / at->m;
  float sum = 0;
  for (int64_t n = 0; n < at->images; n++)
    for (int64_t o = first[0]; o < last[0]; o++)
      for (int64_t p = first[1]; p < last[1]; p++) {
        const int64_t y = (((n * at->groups * at->m + channel) * at->out[0] + o) * at->out[1] + p) * at->out[2];
        const int64_t row = ((n * at->groups + g) * at->c + c) * at->size[0] + o * s[0] + start[0];
        const int64_t x = (row * at->size[1] + p * s[1] + start[1]) * at->size[2] + start[2];
        for (int64_t q = first[2]; q < last[2]; q++) sum += j->x[x + q * s[2]] * j->y[y + q];
      }
  return sum;
}

static void mend(void *data, int64_t from, int64_t to) {
  const Job *j = data;
  for (int64_t k = from; k < to; k++)
    if (j->is_plain || !isfinite(j->out[k])) j->out[k] = plainly(j, k);
}

/* How the work is cut: by the sizes alone. Whether it can be laid out. */
static int plan(Job *j) {
  const Correlation *at = j->at;
  const int64_t numbers = at->groups * at->m * at->c * j->taps;
  const double places = (double)at->images * at->out[0] * at->out[1] * at->out[2];
  const int64_t tasks = places * numbers < 1e5 ? 1 : TASKS;
  j->by_groups = at->m < LANES && at->m < at->groups && at->size[0] * at->out[0] * at->kernel[0] == 1 && !at->pads[0];
  j->wide = j->by_groups ? LANES : rounded(at->m);
  j->rows = (j->by_groups ? at->m : 1) * at->c * j->taps;
  j->in_place = !j->by_groups;
  for (int i = 0; i < 3; i++)
    j->in_place &= at->pads[i] <= 0 && (at->out[i] - 1) * at->strides[i] + (at->kernel[i] - 1) * at->dilations[i] <
                                           at->size[i] + at->pads[i];
  const int64_t *by = at->strides, wider = least(by[0], 4) * least(by[1], 4) * least(by[2], 4);
  const int64_t together = CHUNK / (at->m + (j->in_place ? 0 : at->c * wider));
  const int64_t room = j->by_groups ? NUMBERS : least(most(together, NUMBERS), PLACES_MOST);
  cut(j->places, room, j->box);
  const int64_t pixels = j->box[1] * j->box[2] * j->box[3];
  j->box[0] = at->out[0] > 1 || j->by_groups ? 1 : least(j->box[0], most(at->images / tasks, quotient(NUMBERS, pixels)));
  cut(j->box, NUMBERS, j->part);
  double laid = 1, met = 1;
  for (int i = 0; i < 3; i++) {
    j->reach[i] = (j->box[i + 1] - 1) * at->strides[i] + (at->kernel[i] - 1) * at->dilations[i] + 1;
    laid *= (double)j->reach[i], met *= (double)least(at->size[i], at->out[i]);
  }
  const int64_t *size = j->in_place ? at->size : j->reach, each = j->by_groups ? LANES : 1;
  if (!j->in_place && laid > SPARSE * met + PLACES_MOST) return 0;
  j->pitch[2] = each, j->pitch[1] = each * size[2], j->pitch[0] = j->pitch[1] * size[1];
  j->channel = j->pitch[0] * size[0];
  const int64_t blocks = j->by_groups ? quotient(at->groups, LANES) : at->groups;
  j->outs = blocks * j->rows * j->wide;
  j->units = 1;
  for (int i = 0; i < 4; i++) j->units *= quotient(j->places[i], j->box[i]);
  j->panels = at->groups > 1 ? least(blocks, tasks) : 1;
  j->shares = least(least(j->units, quotient(tasks, j->panels)), most(PARTIALS / j->outs, 1));
  if (at->groups == 1) j->panels = least(at->c, quotient(tasks, j->shares));
  j->image = j->channel * (j->in_place ? at->groups * at->c : at->groups > 1 ? at->c : quotient(at->c, j->panels));
  return 1;
}

static void correlate(Call *call, const Correlation *at, const float *x, const float *y, float *out) {
  Job j = {.at = at, .x = x, .y = y, .out = out, .taps = at->kernel[0] * at->kernel[1] * at->kernel[2],
           .places = {at->images, at->out[0], at->out[1], at->out[2]}};
  const int64_t all = at->groups * at->m * at->c * j.taps;
  if (winograd_fits(at)) {
    winograd(call, at, x, y, out);
  } else if (plan(&j)) {
    const int64_t c = j.by_groups ? 1 : at->c, outputs = j.box[0] * j.box[1] * j.box[2] * j.box[3];
    int64_t *row_at = scratch(call, c * j.taps, sizeof *row_at);
    for (int64_t k = 0; k < c * j.taps && !call->failed; k++) {
      int64_t rest = k, offset = 0;
      for (int i = 2; i >= 0; rest /= at->kernel[i--])
        offset += rest % at->kernel[i] * at->dilations[i] * j.pitch[i];
      row_at[k] = offset + rest * j.channel;
    }
    j.row_at = row_at;
    j.partial = scratch(call, j.shares * j.outs, sizeof(float));
    const int64_t laid = j.by_groups ? at->c * j.channel : j.in_place ? 0 : j.box[0] * j.image;
    parallel_spaces(call, j.shares * j.panels, rounded(laid) + packed(&j) * outputs, share, &j);
    parallel_ranges(call, j.outs / (j.rows * LANES), quotient(FINISHED, LANES * j.rows), finish, &j);
  } else {
    j.is_plain = 1;
  }
  parallel_ranges(call, all, j.is_plain ? 1 : FINISHED, mend, &j);
}

static void read(Attributes *from, void *settings) {
  Correlation *s = settings;
  s->groups = attribute_int(from, "group");
  attribute_ints(from, "kernel", s->kernel, 3);
  attribute_ints(from, "strides", s->strides, 3);
  attribute_ints(from, "dilations", s->dilations, 3);
  attribute_ints(from, "pads", s->pads, 3);
}

/* Whether a kernel knows what to do with one axis: so many taps, so far apart. */
static int within_reach(int64_t taps, int64_t stride, int64_t dilation, int64_t padding) {
  return taps > 0 && taps <= MOST_TAPS && stride > 0 && stride < FAR && dilation > 0 && dilation < FAR &&
         (taps - 1) * dilation < FAR && padding > -FAR && padding < FAR;
}

/* (x, y); of one axis or two, the first ones are of one number. */
static void compute(Call *call, const void *settings) {
  Correlation at = *(const Correlation *)settings;
  const Shape big = shape_of(call, 0), small = shape_of(call, 1);
  const float *x = input(call, 0), *y = input(call, 1);
  if (call->failed) return;
  int sound = big.rank >= 3 && big.rank <= 5 && small.rank == big.rank && big.dims[0] == small.dims[0] && at.groups > 0;
  sound = sound && big.dims[1] % at.groups == 0 && small.dims[1] % at.groups == 0;
  const int missing = sound ? 5 - (int)big.rank : 0;
  int64_t taps = 1;
  for (int i = 0; i < 3 && sound; i++) {
    at.size[i] = i < missing ? 1 : big.dims[2 + i - missing], at.out[i] = i < missing ? 1 : small.dims[2 + i - missing];
    sound = within_reach(at.kernel[i], at.strides[i], at.dilations[i], at.pads[i]) && at.kernel[i] <= MOST_TAPS / taps;
    sound = sound && (i >= missing || (at.kernel[i] == 1 && !at.pads[i]));
    taps *= sound ? at.kernel[i] : 1;
  }
  if (refused(call, !sound, "ConvWeightGrad: operands or attributes do not belong together")) return;
  at.images = big.dims[0], at.m = small.dims[1] / at.groups, at.c = big.dims[1] / at.groups;
  Shape shape = {.rank = big.rank, .dims = {small.dims[1], at.c}};
  for (int i = missing; i < 3; i++) shape.dims[2 + i - missing] = at.kernel[i];
  float *out = output(call, 0, &shape);
  if (call->failed) return;
  if (!big.count || !small.count) {
    memset(out, 0, (size_t)(small.dims[1] * at.c * taps) * sizeof *out);
    return;
  }
  int is_plain = 1; /* whether the axes are as good as one */
  for (int i = 0; i < 3; i++)
    is_plain &= at.kernel[i] == 1 && at.strides[i] == 1 && !at.pads[i] && at.size[i] == at.out[i];
  if (is_plain) {
    at.size[2] = at.out[2] = at.size[0] * at.size[1] * at.size[2];
    at.size[0] = at.size[1] = at.out[0] = at.out[1] = 1;
  }
  correlate(call, &at, x, y, out);
}

const Kernel convolution_kernels[] = {
    {"ConvWeightGrad", "ff", "f", sizeof(Correlation), read, compute},
    {0}};
