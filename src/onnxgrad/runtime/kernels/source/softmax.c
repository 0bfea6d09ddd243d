/* Softmax cross-entropy and its cotangent: L = sum -w*log p, with p = softmax x at the label of a row, and k*w*(p - [label]).
 *
 * Numbers of a row, along the axis, lie side by side, or rows do: then a vector has a number of each.
 * Every number is computed by one thread, in the order of the axis. */
#include "exponential.h"
#include "moments.h"

typedef struct {
  const float *x, *weights, *share;
  const int64_t *labels; /* -1 where one is ignored */
  float *out, *losses;
  int64_t classes, inner, blocks, shares; /* neither, one, or one for each row */
} Loss;

INLINE float factor_of(const Loss *j, int64_t row) {
  if (j->labels[row] < 0) return 0;
  const float share = j->share[j->shares > 1 ? row : 0];
  return j->weights ? share * j->weights[j->labels[row]] : share;
}

INLINE void finish_row(const Loss *j, int64_t row, float x, float most, float log) {
  const int64_t label = j->labels[row];
  if (j->losses) j->losses[row] = label < 0 ? 0 : (log - (x - most)) * (j->weights ? j->weights[label] : 1);
}

/* A row that counts for nothing: zeros, or NaN where its softmax is. */
static void idle(const float *x, int64_t classes, float *out) {
  lanes doubt = {0}, most = lanes_of(-INFINITY); /* NaN times 0, and an infinity times 0, are NaN */
  for (int64_t k = 0; k < classes; k += LANES) {
    const lanes here = lanes_read(x + k, classes - k, -INFINITY);
    doubt += lanes_where(here == -INFINITY, lanes_of(0), here * 0);
    most = lanes_most(here, most);
  }
  const float all = lanes_sum(doubt) + (lanes_largest(most) == -INFINITY ? NAN : 0);
  for (int64_t k = 0; k < classes; k++) out[k] = all;
}

static void score_rows(void *data, int64_t from, int64_t to) {
  const Loss *j = data;
  for (int64_t row = from; row < to; row++) {
    const float *x = j->x + row * j->classes;
    const int64_t label = j->labels[row];
    float *out = j->out ? j->out + row * j->classes : NULL;
    if (label < 0) {
      finish_row(j, row, 0, 0, 0);
      if (out) idle(x, j->classes, out);
      continue;
    }
    lanes top[4] = {lanes_of(-INFINITY), lanes_of(-INFINITY), lanes_of(-INFINITY), lanes_of(-INFINITY)};
    int64_t k = 0;
    for (; k + 4 * LANES <= j->classes; k += 4 * LANES)
      for (int i = 0; i < 4; i++) top[i] = lanes_most(*(const lanes *)(x + k + i * LANES), top[i]);
    for (; k < j->classes; k += LANES) top[0] = lanes_most(lanes_read(x + k, j->classes - k, -INFINITY), top[0]);
    const float most = lanes_largest(lanes_most(lanes_most(top[0], top[1]), lanes_most(top[2], top[3])));
    const lanes mosts = lanes_of(most);
    const float chosen = x[label]; /* `out` may lie where x does */
    double sum = 0;
    k = 0;
    for (int64_t start = 0; start < j->classes; start += TOGETHER) {
      const int64_t end = least(start + TOGETHER, j->classes);
      lanes total = {0};
      for (; k < end; k += LANES) { /* beyond the row: e^-inf */
        const lanes e = lanes_exp(lanes_read(x + k, end - k, -INFINITY) - mosts);
        if (out) lanes_write(out + k, end - k, e);
        total += e;
      }
      k = end;
      sum += lanes_sum(total);
    }
    finish_row(j, row, chosen, most, logf((float)sum));
    if (!out) continue;
    const float factor = factor_of(j, row);
    const lanes scale = lanes_of((float)(factor / sum));
    for (k = 0; k < j->classes; k += LANES)
      lanes_write(out + k, j->classes - k, lanes_read(out + k, j->classes - k, 0) * scale);
    out[label] -= factor;
  }
}

static void score_neighbours(void *data, int64_t from, int64_t to) {
  const Loss *j = data;
  const int64_t apart = j->inner, end = j->classes * apart;
  for (int64_t block = from; block < to; block++) {
    const int64_t image = block / j->blocks, first = block % j->blocks * LANES, row = image * apart + first;
    const int64_t count = least(LANES, apart - first), *labels = j->labels + row;
    const float *x = j->x + image * end + first;
    float *out = j->out ? j->out + image * end + first : NULL, chosen[LANES];
    lanes largest = lanes_of(-INFINITY), sum = {0}, factor = {0};
    for (int64_t k = 0; k < count; k++) chosen[k] = x[most(labels[k], 0) * apart + k]; /* `out` may lie where x does */
    for (int64_t c = 0; c < end; c += apart) largest = lanes_most(lanes_read(x + c, count, 0), largest);
    for (int64_t c = 0; c < end; c += apart) {
      const lanes e = lanes_exp(lanes_read(x + c, count, 0) - largest);
      sum += e;
      if (out) lanes_write(out + c, count, e);
    }
    const lanes log = log_of_finite(sum) + sum * 0; /* NaN of NaN */
    for (int64_t k = 0; k < count; k++) {
      finish_row(j, row + k, chosen[k], largest[k], log[k]);
      factor[k] = factor_of(j, row + k);
    }
    const lanes scale = factor / sum; /* 0 where a label is ignored, or NaN where the softmax is */
    for (int64_t c = 0; c < end && out; c += apart) lanes_write(out + c, count, lanes_read(out + c, count, 0) * scale);
    for (int64_t k = 0; k < count && out; k++) out[most(labels[k], 0) * apart + k] -= factor[k];
  }
}

enum { NONE, SUM, MEAN };

typedef struct {
  int64_t ignored, ignores, reduction;
} Reduction;

static void read_reduction(Attributes *from, void *settings) {
  *(Reduction *)settings = (Reduction){attribute_int(from, "ignored"), attribute_int(from, "ignores"),
                                       attribute_int(from, "reduction")};
}

/* (scores, labels, weights of the classes, share of the loss of a row) to the loss and the cotangent of the scores */
static void cross_entropy(Call *call, const void *settings) {
  const Reduction *s = settings;
  const int64_t *given = input(call, 1);
  Shape x = shape_of(call, 0), labels = shape_of(call, 1), weights = shape_of(call, 2), share = shape_of(call, 3);
  Loss j = {.x = input(call, 0), .weights = input(call, 2), .share = input(call, 3), .inner = 1, .shares = share.count};
  if (call->failed) return;
  int sound = x.rank >= 2 && labels.rank == x.rank - 1 && s->reduction >= NONE && s->reduction <= MEAN;
  for (size_t i = 0; i < labels.rank && sound; i++) sound = labels.dims[i] == x.dims[i ? i + 1 : 0];
  sound = sound && (!j.weights || (weights.rank == 1 && weights.count == x.dims[1]));
  sound = sound && (share.count == 1 || (s->reduction == NONE && share.count == labels.count));
  if (refused(call, !sound, "SoftmaxCrossEntropy: operands do not belong together")) return;
  const int64_t rows = labels.count;
  int64_t *checked = scratch(call, rows, sizeof *checked);
  if (call->failed) return;
  j.labels = checked;
  j.classes = x.dims[1];
  double total = 0; /* of the weights */
  int64_t counted = 0;
  for (int64_t i = 0; i < rows; i++) {
    const int64_t label = given[i];
    const int ignored = s->ignores && label == s->ignored;
    const int is_wrong = !ignored && (label < 0 || label >= j.classes);
    if (refused(call, is_wrong, "SoftmaxCrossEntropy: a label is out of range")) return;
    checked[i] = ignored ? -1 : label;
    counted += !ignored;
    if (j.weights && !ignored) total += j.weights[label];
  }
  float *loss = output(call, 0, s->reduction == NONE ? &labels : &(Shape){.rank = 0});
  j.out = output(call, 1, &x);
  if (loss) j.losses = s->reduction == NONE ? loss : scratch(call, rows, sizeof(float));
  if (call->failed) return;
  if (j.losses) memset(j.losses, 0, (size_t)rows * sizeof(float)); /* of no classes */
  if (x.count) {
    for (size_t i = 2; i < x.rank; i++) j.inner *= x.dims[i];
    j.blocks = quotient(j.inner, LANES);
    const int64_t pieces = j.inner == 1 ? x.dims[0] : x.dims[0] * j.blocks;
    const int64_t unit = 4096 / (j.classes * least(j.inner, LANES)) + 1;
    parallel_ranges(call, pieces, unit, j.inner == 1 ? score_rows : score_neighbours, &j);
  }
  if (!loss || s->reduction == NONE) return;
  const double sum = sums_of(FIRST_SUM, &(Numbers){.x = j.losses}, 0, 1, 0, rows, 0).u;
  *loss = (float)(s->reduction == MEAN ? sum / (j.weights ? total : (double)counted) : sum);
}

const Kernel softmax_kernels[] = {
    {.name = "SoftmaxCrossEntropy", .inputs = "flFf", .outputs = "FF", .settings = sizeof(Reduction),
     .read = read_reduction, .compute = cross_entropy, .may_replace = 2},
    {0}};
