/* BatchNormalization with the statistics of the batch, GroupNormalization and InstanceNormalization, their cotangents, and
 * those of LayerNormalization.
 *
 * The numbers of a group share mean and variance: those of a channel in all images, of some channels of one image, or of
 * a row. With d = x - mean, r = 1 / sqrt(variance + epsilon) and the sums over the n numbers of a group,
 *
 *   x = r*s*g - r * sum s*g / n - r^3 * d * sum s*g*d / n        scale = sum r*g*d        bias = sum g
 *
 * where s and the last two are of a channel, of the channels of a group, or of a column. A group is runs of numbers that
 * lie side by side, and is most likely near the processor after the first pass over it. Where the output of a ReLU y is
 * given, g counts only where y is positive. The last two are added up by images or bands of rows, and these in double at
 * the end, in their order. */
#include <math.h>
#include "moments.h"

enum {
  BLOCK = 8,   /* rows taken together: for x, and once more, while they are near the processor, for sums over rows */
  BAND = 64,   /* rows of a band, at most, */
  FEWEST = 16, /* and at least, where more than this many numbers make its sums large */
  SMALL = 1 << 20,
  PIECES = 16, /* bands that are enough for all threads */
};

typedef struct {
  Numbers n;
  const float *mean, *spread, *scale, *bias; /* spread: a variance; of rows r */
  float *out, *d_scale, *d_bias, epsilon;
  float *means, *variances, *columns[3]; /* y as (x - centre) * gain + shift, by channel */
  float *sums; /* of r*g*d, and of g: of all channels or columns, by part */
  int64_t images, groups, channels, plane; /* channels of a group of one image */
  int64_t parts, all, band, rows;
  int across, by_row, per_channel; /* whether a group is of all images, or a row; a scale for each channel */
} Job;

/* A group: runs of a plane each, and the mean of all. */
typedef struct {
  int64_t runs, first, stride, number; /* of the group within an image */
  float mean, variance, r;
  double count;
} Group;

static Group group_of(const Job *j, int64_t index) {
  Group group = {j->channels, index * j->channels * j->plane, j->plane, index % j->groups, 0, 0, 0, 0};
  if (j->across) group.runs = j->images, group.stride = j->groups * j->plane;
  const int64_t runs = j->across ? group.runs : 1, plane = j->across ? j->plane : j->channels * j->plane;
  group.count = (double)group.runs * (double)j->plane;
  group.mean = j->mean ? j->mean[index] : (float)(sums_of(FIRST_SUM, &j->n, group.first, runs, group.stride, plane, 0).u / group.count);
  group.variance = j->spread ? j->spread[index]
                             : (float)(sums_of(0, &j->n, group.first, runs, group.stride, plane, group.mean).ud / group.count);
  group.r = j->by_row ? group.variance : 1 / sqrtf(group.variance + j->epsilon);
  return group;
}

INLINE int64_t parameter_of(const Job *j, const Group *group, int64_t run) {
  return j->across || !j->per_channel ? group->number : group->number * j->channels + run;
}

/* u * a + d * b + c, or without u, of a run. */
INLINE void give(const int kind, const Job *j, int64_t from, float mean, float a, float b, float c) {
  const lanes means = lanes_of(mean), as = lanes_of(a), bs = lanes_of(b), cs = lanes_of(c);
#define GIVEN(some)                                                                             \
  do {                                                                                         \
    const lanes d = lanes_read(j->n.x + from + k, some, 0) - means;                            \
    const lanes more = kind ? numbers_of(kind, &j->n, from, k, some, d) * as + d * bs : d * bs; \
    lanes_write(j->out + from + k, some, more + cs);                                           \
  } while (0)
  int64_t k = 0; /* two loops: compilers do not split one with the same condition throughout */
  for (; k + LANES <= j->plane; k += LANES) GIVEN(LANES);
  if (k < j->plane) GIVEN(j->plane - k);
}

static void forward(void *data, int64_t from, int64_t to) {
  const Job *j = data;
  for (int64_t index = from; index < to; index++) {
    const Group group = group_of(j, index);
    if (j->means) j->means[index] = group.mean;
    if (j->variances) j->variances[index] = group.variance;
    for (int64_t run = 0; run < group.runs; run++) {
      const int64_t at = parameter_of(j, &group, run), channel = j->across ? index : index * j->channels + run;
      const float column[] = {group.mean, j->scale[at] * group.r, j->bias[at]};
      for (int i = 0; i < 3; i++)
        if (j->columns[i]) j->columns[i][channel] = column[i];
      if (j->out) give(0, j, group.first + run * group.stride, column[0], 0, column[1], column[2]);
    }
  }
}

INLINE void pull_group(const int kind, const Job *j, int64_t index) {
  const Group group = group_of(j, index);
  const int64_t calls = j->across ? 1 : group.runs, runs = j->across ? group.runs : 1;
  const double r = group.r;
  double sum_g = 0, sum_gd = 0;
  for (int64_t call = 0; call < calls; call++) {
    const int64_t from = group.first + call * group.stride;
    const Sums here = sums_of(kind, &j->n, from, runs, group.stride, j->plane, group.mean);
    const float scale = j->by_row ? 1 : j->scale[parameter_of(j, &group, call)];
    sum_g += scale * here.u, sum_gd += scale * here.ud;
    if (j->by_row) continue;
    float *kept = j->sums + index / j->groups * 2 * j->all + group.number * j->channels + call;
    kept[0] = (float)(r * here.ud), kept[j->all] = (float)here.u;
  }
  const float constant = (float)(-r * sum_g / group.count), slope = (float)(-r * r * r * sum_gd / group.count);
  for (int64_t run = 0; run < group.runs && j->out; run++) {
    const float gain = (float)r * (j->by_row ? 1 : j->scale[parameter_of(j, &group, run)]);
    give(kind, j, group.first + run * group.stride, group.mean, gain, slope, constant);
  }
}

static void pull(void *data, int64_t from, int64_t to) {
  const Job *j = data;
  for (int64_t index = from; index < to; index++)
    if (j->by_row)
      pull_group(OF_G | SCALED, j, index);
    else if (j->n.y)
      pull_group(OF_G | MASKED, j, index);
    else
      pull_group(OF_G, j, index);
}

/* The sums over some rows, added to those of their band. */
static void add_columns(const Job *j, int64_t from, int64_t to, float *d_scale, float *d_bias) {
  for (int64_t k = 0; k < j->plane; k += LANES) {
    const int64_t some = j->plane - k;
    lanes scale = lanes_read(d_scale + k, some, 0), bias = lanes_read(d_bias + k, some, 0);
    for (int64_t row = from; row < to; row++) {
      const lanes g = lanes_read(j->n.g + row * j->plane + k, some, 0);
      scale += g * ((lanes_read(j->n.x + row * j->plane + k, some, 0) - j->mean[row]) * j->spread[row]);
      bias += g;
    }
    lanes_write(d_scale + k, some, scale);
    lanes_write(d_bias + k, some, bias);
  }
}

static void pull_band(void *data, size_t index) {
  const Job *j = data;
  const int64_t first = (int64_t)index * j->band, last = least(first + j->band, j->images);
  float *sums = j->sums + 2 * (int64_t)index * j->all;
  memset(sums, 0, (size_t)(2 * j->all) * sizeof *sums);
  for (int64_t from = first; from < last; from += BLOCK) {
    const int64_t to = least(from + BLOCK, last);
    if (j->out) pull(data, from, to);
    if (j->d_scale || j->d_bias) add_columns(j, from, to, sums, sums + j->all);
  }
}

static void total(void *data, int64_t from, int64_t to) {
  const Job *j = data;
  const int64_t together = j->per_channel ? 1 : j->channels;
  for (int64_t i = from; i < to; i++) {
    double scale = 0, bias = 0;
    for (int64_t part = 0; part < j->parts; part++)
      for (int64_t c = i * together; c < (i + 1) * together; c++) {
        scale += j->sums[2 * part * j->all + c];
        bias += j->sums[(2 * part + 1) * j->all + c];
      }
    if (j->d_scale) j->d_scale[i] = (float)scale;
    if (j->d_bias) j->d_bias[i] = (float)bias;
  }
}

enum { BATCH = -1, ROWS = -2 };

typedef struct {
  int64_t groups; /* of an image; 0 for as many as channels, or of the batch, or rows */
  float epsilon;
  int64_t axis; /* of rows: the first one */
} Settings;

static void read_batch(Attributes *from, void *settings) {
  *(Settings *)settings = (Settings){BATCH, attribute_float(from, "epsilon"), 0};
}

static void read_rows(Attributes *from, void *settings) {
  *(Settings *)settings = (Settings){ROWS, 0, attribute_int(from, "axis")};
}

static void read(Attributes *from, void *settings) {
  const int64_t groups = attribute_int(from, "groups");
  *(Settings *)settings = (Settings){groups, attribute_float(from, "epsilon"), 0};
  if (groups < 0) attributes_fail(from, "GroupNorm: there are no such groups");
}

/* How x is divided; 0 where the scale does not fit. */
static int divided(Job *j, const Settings *s, const Shape *x, const Shape *scale) {
  const size_t axis = s->groups == ROWS ? (size_t)s->axis : 2;
  if (s->axis < 0 || axis + (s->groups == ROWS) > x->rank) return 0;
  j->across = s->groups == BATCH, j->by_row = s->groups == ROWS;
  j->epsilon = s->epsilon, j->plane = 1;
  for (size_t i = axis; i < x->rank; i++)
    if (__builtin_mul_overflow(j->plane, x->dims[i], &j->plane) && x->count) return 0;
  if (j->by_row) {
    j->groups = j->channels = 1, j->all = scale->count;
    j->images = x->count ? x->count / j->plane : 0;
    j->band = least((j->images + PIECES - 1) / PIECES, BAND);
    if (j->band < FEWEST) j->band = x->count > SMALL ? FEWEST : j->band + !j->band;
    j->parts = (j->images + j->band - 1) / j->band;
    j->rows = 1;
    for (size_t i = 0; i < axis && !x->count; i++)
      if (__builtin_mul_overflow(j->rows, x->dims[i], &j->rows)) return 0;
    if (x->count) j->rows = j->images;
    return j->per_channel = scale->count == j->plane;
  }
  if (scale->rank != 1) return 0;
  const int64_t all = x->dims[1];
  j->groups = s->groups > 0 ? s->groups : all;
  if (all && (j->groups > all || all % j->groups)) return 0;
  j->per_channel = scale->count == all;
  if (!j->per_channel && (j->across || scale->count != j->groups)) return 0;
  if (!all) j->groups = scale->count;
  j->channels = j->groups ? all / j->groups : 0;
  j->images = x->count ? x->dims[0] : 0;
  j->all = j->groups * j->channels, j->parts = j->across ? 1 : j->images;
  j->rows = j->groups; /* as many as there are means */
  return 1;
}

static void each_group(Call *call, Job *j, void (*body)(void *, int64_t, int64_t)) {
  const int64_t runs = j->across ? j->images : j->channels, count = j->across ? j->groups : j->images * j->groups;
  if (count) parallel_ranges(call, count, 4096 / (runs * j->plane + 1) + 1, body, j);
}

/* (x, scale, bias) to y, of a batch also to (mean, variance), and to the columns, which make y of x */
static void compute(Call *call, const void *settings) {
  const Settings *s = settings;
  Shape x = shape_of(call, 0), scale = shape_of(call, 1), bias = shape_of(call, 2);
  Job j = {.n = {.x = input(call, 0)}, .scale = input(call, 1), .bias = input(call, 2)};
  if (call->failed) return;
  const int sound = divided(&j, s, &x, &scale) && same_shape(&scale, &bias);
  if (refused(call, !sound, "BatchNorm, GroupNorm: operands do not belong together")) return;
  const size_t first = j.across; /* axis of the columns */
  Shape column = {.rank = x.rank - first};
  for (size_t i = 0; i < column.rank; i++) column.dims[i] = first + i < 2 ? x.dims[first + i] : 1;
  j.out = output(call, 0, &x);
  if (j.across) j.means = output(call, 1, &scale), j.variances = output(call, 2, &scale);
  for (size_t i = 0; i < 3; i++) {
    j.columns[i] = output(call, (j.across ? 3 : 1) + i, &column);
    if (j.columns[i] && !j.images && !call->failed) /* of nothing */
      memset(j.columns[i], 0, (size_t)column.count * sizeof **j.columns);
  }
  if (!call->failed) each_group(call, &j, forward);
}

/* (g, x, scale) of groups, or (g, x, mean, variance or of rows r, scale, y of a ReLU) to the cotangents of (x, scale, bias) */
static void compute_grad(Call *call, const void *settings) {
  const Settings *s = settings;
  const size_t at = s->groups < 0 ? 4 : 2;
  Shape g = shape_of(call, 0), x = shape_of(call, 1), scale = shape_of(call, at);
  Job j = {.n = {.g = input(call, 0), .x = input(call, 1)}, .scale = input(call, at)};
  j.n.s = j.scale;
  if (call->failed) return;
  int sound = divided(&j, s, &x, &scale) && same_shape(&g, &x);
  if (at == 4) {
    const Shape mean = shape_of(call, 2), spread = shape_of(call, 3), y = shape_of(call, 5);
    j.mean = input(call, 2), j.spread = input(call, 3), j.n.y = input(call, 5);
    sound = sound && (!j.mean || mean.count == j.rows) && (!j.spread || spread.count == j.rows);
    sound = sound && (!j.n.y || same_shape(&y, &x));
  }
  if (refused(call, !sound, "BatchNormGrad, GroupNormGrad, LayerNormGrad: operands do not belong together")) return;
  j.out = output(call, 0, &x);
  j.d_scale = output(call, 1, &scale);
  j.d_bias = output(call, 2, &scale);
  j.sums = scratch(call, 2 * j.parts * j.all, sizeof(float));
  if (call->failed) return;
  if (j.by_row)
    parallel(call, (size_t)j.parts, pull_band, &j);
  else
    each_group(call, &j, pull);
  parallel_ranges(call, scale.count, 512, total, &j);
}

const Kernel normalization_kernels[] = {
    {"BatchNorm", "fff", "FFFFFF", sizeof(Settings), read_batch, compute},
    {"BatchNormGrad", "ffFFfF", "FFF", sizeof(Settings), read_batch, compute_grad},
    {"GroupNorm", "fff", "FFFF", sizeof(Settings), read, compute},
    {"GroupNormGrad", "fff", "FFF", sizeof(Settings), read, compute_grad},
    {"LayerNormGrad", "fffff", "FFF", sizeof(Settings), read_rows, compute_grad},
    {0}};
