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
#include "winograd.h"
#include <math.h>

enum {
  TASKS = 16,          /* of one call, if it is worth it */
  NUMBERS = 256,       /* places of a box, at least, */
  PLACES_MOST = 1024,  /* and at most, so that they stay near the processor, */
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
  int64_t places[4], box[4];            /* images and the axes of y; those that are copied and multiplied together */
  int64_t reach[3];                     /* numbers of x on each axis of a box, */
  int64_t pitch[3];                     /* and from one to the next, there or in x */
  int64_t channel, image;               /* the same of channels and images */
  const int64_t *row_at;                /* where each tap of each channel is */
  int64_t taps, rows, wide;             /* rows and columns of the sums: taps of channels by channels of y, or groups */
  int64_t units, shares, panels, outs;  /* boxes; their shares, and panels of channels or groups; sums of a share */
  int in_place, by_groups, is_plain;    /* whether x has all that is met; columns are groups; nothing is laid out */
} Job;

void cut_box(const int64_t size[4], int64_t room, int64_t box[4]) {
  for (int i = 3; i >= 0; i--) {
    box[i] = quotient(size[i], quotient(size[i], least(size[i], most(room, 1))));
    room = box[i] < size[i] ? 1 : room / size[i];
  }
}

void find_box(const int64_t all[4], const int64_t box[4], int64_t unit, int64_t corner[4], int64_t size[4]) {
  for (int i = 3; i >= 0; i--) {
    const int64_t count = quotient(all[i], box[i]);
    corner[i] = unit % count * box[i], unit /= count;
    size[i] = least(box[i], all[i] - corner[i]);
  }
}

/* A box of one channel, `reach` numbers from `start` on, with zeros beyond it. */
static void lay_box(const float *from, const int64_t size[3], const int64_t start[3], const int64_t reach[3], float *to) {
  const int64_t width = reach[2];
  const int64_t left = least(most(-start[2], 0), width), right = most(least(size[2] - start[2], width), left);
  for (int64_t d = start[0]; d < start[0] + reach[0]; d++)
    for (int64_t h = start[1]; h < start[1] + reach[1]; h++, to += width) {
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
  find_box(j->places, j->box, unit, corner, size);
  for (int i = 0; i < 3; i++) start[i] = corner[i + 1] * at->strides[i] - at->pads[i];
  const int64_t volume = at->size[0] * at->size[1] * at->size[2], outs = at->out[0] * at->out[1] * at->out[2];
  const int64_t pixels = size[1] * size[2] * size[3], width = least(COLUMNS, j->wide), per_image = packed(j) * pixels;
  const float *from = j->x + ((corner[0] * at->groups + g) * at->c + from_c) * volume;
  const float *small = j->y + (corner[0] * at->groups + g) * at->m * outs +
                       (corner[1] * at->out[1] + corner[2]) * at->out[2] + corner[3];
  for (int64_t n = 0; n < size[0] && !j->in_place; n++)
    for (int64_t k = 0; k < c; k++)
      lay_box(from + (n * at->groups * at->c + k) * volume, at->size, start, j->reach, x + n * j->image + k * j->channel);
  float *y = j->in_place ? x : x + size[0] * j->image;
  from = j->in_place ? from + start[0] * j->pitch[0] + start[1] * j->pitch[1] + start[2] : x;
  for (int64_t n = 0; n < size[0]; n++)
    pack_panels(small + n * at->groups * at->m * outs, 1, outs, pixels, at->m, width, y + n * per_image);
  const int outer = at->out[0] > 1; /* then there is one image */
  gemm(&(Product){
      .a = from, .row_at = j->row_at, .b = y, .panel = pixels * width, .add = sums, .c = sums, .rows = c * j->taps,
      .columns = j->wide, .add_pitch = j->wide, .c_pitch = j->wide, .count = {size[outer], size[2], size[3]},
      .a_step = {outer ? at->strides[0] * j->pitch[0] : j->image, at->strides[1] * j->pitch[1], at->strides[2]},
      .b_step = {outer ? size[2] * size[3] * width : per_image, size[3] * width, width}});
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
  find_box(j->places, j->box, unit, corner, size);
  const int64_t groups = least(LANES, at->groups - first), h = at->size[1], w = at->size[2];
  const int64_t oh = at->out[1], ow = at->out[2], taps = j->taps, image = corner[0] * at->groups + first;
  float *y = x + at->c * j->channel;
  for (int64_t c = 0; c < at->c; c++)
    lay_pixels(x + c * j->channel, j->reach[1], j->reach[2], LANES, j->x + (image * at->c + c) * h * w, groups,
               at->c * h * w, h, w, corner[2] * at->strides[1] - at->pads[1], corner[3] * at->strides[2] - at->pads[2], 1, 1);
  for (int64_t m = 0; m < at->m; m++) {
    lay_pixels(y, size[2], size[3], LANES, j->y + (image * at->m + m) * oh * ow, groups, at->m * oh * ow, oh, ow,
               corner[2], corner[3], 1, 1);
    for (int64_t c = 0; c < at->c; c++, sums += taps * LANES)
      for (int64_t k = 0; k < taps;) {
        const int64_t *offset = j->row_at + k;
        const float *from = x + c * j->channel;
        float *to = sums + k * LANES;
#define SOME(n) if (taps - k >= n) add_taps(n, j, from, y, size, offset, to), k += n
        SOME(TAPS); else SOME(7); else SOME(5); else SOME(4); else SOME(3); else SOME(2); else SOME(1);
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

/* Some vectors of the sums, as weights. */
static void finish(void *data, int64_t from, int64_t to) {
  const Job *j = data;
  const int64_t vectors = j->wide / LANES, each = j->by_groups ? LANES : j->at->m;
  for (int64_t i = from; i < to; i++) {
    const int64_t block = i / vectors, first = i % vectors * LANES, done = block * each + first;
    const int64_t some = least(least(each - first, LANES), (j->by_groups ? 1 : j->at->m) * j->at->groups - done);
    turn_rows(j->out + done * j->rows, j->rows, j->rows, some, some, j->partial + block * j->rows * j->wide + first, j->wide,
              j->rows, some);
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
  cut_box(j->places, room, j->box);
  const int64_t pixels = j->box[1] * j->box[2] * j->box[3];
  j->box[0] = at->out[0] > 1 || j->by_groups ? 1 : least(j->box[0], most(at->images / tasks, quotient(NUMBERS, pixels)));
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
    if (j.shares > 1) add_parts(call, j.partial, 0, j.partial, j.outs, j.shares);
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

void read_convolution(Attributes *from, void *settings) {
  Convolution *v = settings;
  read(from, &v->at);
  v->turned = attribute_int(from, "turned") != 0;
  attribute_ints(from, "size", v->size, 3);
}

/* What the sides say: the shape of the weights. Of fewer axes than three, the first are of one number. */
static int correlates(Correlation *at, const Shape *big, const Shape *small, Shape *weights) {
  int sound = big->rank >= 3 && big->rank <= 5 && small->rank == big->rank && big->dims[0] == small->dims[0];
  if (!sound || at->groups < 1 || big->dims[1] % at->groups || small->dims[1] % at->groups) return 0;
  const int missing = 5 - (int)big->rank;
  at->images = big->dims[0], at->m = small->dims[1] / at->groups, at->c = big->dims[1] / at->groups;
  *weights = (Shape){.rank = big->rank, .dims = {small->dims[1], at->c}};
  for (int64_t i = 0, taps = 1; i < 3 && sound; taps *= at->kernel[i++]) {
    const int64_t last = at->kernel[i] - 1, dilation = at->dilations[i], stride = at->strides[i], pad = at->pads[i];
    at->size[i] = i < missing ? 1 : big->dims[2 + i - missing], at->out[i] = i < missing ? 1 : small->dims[2 + i - missing];
    sound = last >= 0 && last < MOST_TAPS / taps && stride > 0 && stride < FAR && dilation > 0 && dilation < FAR &&
            last * dilation < FAR && pad > -FAR && pad < FAR && (i >= missing || (!last && !pad));
    if (i >= missing) weights->dims[2 + i - missing] = last + 1;
  }
  return sound;
}

int open_convolution(Call *call, const void *settings, Convolution *v) {
  const Shape x = shape_of(call, 0), w = shape_of(call, 1), bias = shape_of(call, 2);
  *v = *(const Convolution *)settings;
  v->x = input(call, 0), v->w = input(call, 1), v->bias = input(call, 2);
  Shape y = {.rank = x.rank}, like;
  int sound = !call->failed && x.rank >= 3 && x.rank <= 5 && w.rank == x.rank;
  sound = sound && !__builtin_mul_overflow(w.dims[v->turned], v->turned ? v->at.groups : 1, &y.dims[1]);
  for (size_t i = 2; i < x.rank && sound; i++) y.dims[i] = v->size[i + 3 - x.rank], sound = y.dims[i] >= 0;
  if (sound) y.dims[0] = x.dims[0];
  sound = sound && correlates(&v->at, v->turned ? &y : &x, v->turned ? &x : &y, &like) && same_shape(&w, &like);
  sound = sound && (!v->bias || (bias.rank == 1 && bias.dims[0] == y.dims[1]));
  if (refused(call, !sound, "Conv3x3, Depthwise: operands or attributes do not belong together")) return 0;
  v->c = v->turned ? v->at.m : v->at.c, v->m = v->turned ? v->at.c : v->at.m;
  memcpy(v->in, v->turned ? v->at.out : v->at.size, sizeof v->in);
  memcpy(v->out, v->turned ? v->at.size : v->at.out, sizeof v->out);
  v->y = output(call, 0, &y);
  return !call->failed && y.count;
}

/* (x, y) to the cotangent of the weights */
static void compute(Call *call, const void *settings) {
  Correlation at = *(const Correlation *)settings;
  const Shape big = shape_of(call, 0), small = shape_of(call, 1);
  const float *x = input(call, 0), *y = input(call, 1);
  Shape shape;
  if (call->failed) return;
  if (refused(call, !correlates(&at, &big, &small, &shape), "ConvWeightGrad: operands or attributes do not belong together")) return;
  float *out = output(call, 0, &shape);
  if (call->failed) return;
  if (!big.count || !small.count) {
    memset(out, 0, (size_t)shape.count * sizeof *out);
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
