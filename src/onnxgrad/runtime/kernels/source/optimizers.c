/* Optimizers in one pass over memory: what standard operators take ten or twelve passes for. Where the gradient of a table
 * is that of picking rows, rows are added up on the way; `GatherGrad` is that alone.
 *
 * Every product and sum is rounded by itself, in the order of the operators, so the results are the same to the last
 * bit: contraction to fused multiply-adds is off in this file. Memory is what takes the time. */
#include <math.h>
#include "gemm.h"

#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off", "no-math-errno", "no-trapping-math")
#endif

/* Elements that are worth a thread; elements of a block. */
enum { GRAIN = 8192, BLOCK = 128 };

/* Rows that were picked from a table, in the order of the table. */
typedef struct {
  const uint64_t *key;  /* sorted: which row of G, and above it, the row that it is added to; NULL for none */
  int64_t count, width; /* of keys; of a row */
} Picked;

enum { PICKED_BITS = 32, DIGIT = 11 };
static int64_t row_at(const Picked *p, int64_t at) { return (int64_t)(p->key[at] >> PICKED_BITS); }
static int64_t place_at(const Picked *p, int64_t at) { return (int64_t)(p->key[at] & UINT32_MAX); }
/* The first key of `row` or a later one. */
static int64_t first_of(const Picked *p, int64_t row) {
  int64_t from = 0, to = p->count;
  while (from < to) {
    const int64_t middle = from + (to - from) / 2;
    if (row_at(p, middle) < row) from = middle + 1;
    else to = middle;
  }
  return from;
}

/* Sorts the rows of an index into a table; those of one row stay in their order. Rows of G are those that `source` picks
 * of `sources`, or as many as there are in the index. */
static void pick(Call *call, Picked *p, const int64_t *index, int64_t count, const Shape *table, const int64_t *source,
                 int64_t sources) {
  const int64_t rows = table->rank ? table->dims[0] : 0;
  const int fits = rows >= 1 && rows <= UINT32_MAX && count <= UINT32_MAX && sources <= UINT32_MAX;
  if (refused(call, !fits, "rows are picked from no table, or too many")) return;
  uint64_t *key = scratch(call, count, sizeof *key), *other = scratch(call, count, sizeof *key);
  if (call->failed) return;
  for (int64_t k = 0; k < count; k++) {
    const int64_t row = index[k] < 0 ? index[k] + rows : index[k];
    const int64_t of = !source ? k : source[k] < 0 ? source[k] + sources : source[k];
    if (refused(call, row < 0 || row >= rows || of < 0 || of >= sources, "an index is out of range")) return;
    key[k] = (uint64_t)row << PICKED_BITS | (uint64_t)of;
  }
  for (int shift = 0; (rows - 1) >> shift; shift += DIGIT) { /* digit by digit, the lowest first */
    int64_t start[1 << DIGIT] = {0}, sum = 0;
    const uint64_t mask = (1 << DIGIT) - 1;
    for (int64_t k = 0; k < count; k++) start[key[k] >> (PICKED_BITS + shift) & mask]++;
    for (int d = 0; d < 1 << DIGIT; d++) {
      const int64_t here = start[d];
      start[d] = sum, sum += here;
    }
    for (int64_t k = 0; k < count; k++) other[start[key[k] >> (PICKED_BITS + shift) & mask]++] = key[k];
    uint64_t *swap = key;
    key = other, other = swap;
  }
  *p = (Picked){key, count, table->count / rows};
}

/* How many updates took the place of what they were computed from, in this process. */
__attribute__((visibility("default"))) int64_t onnxgrad_overwrites;

/* Operands, in this order: X, G, up to three states; scalars of shape [], left out for 1; constants, one vector; the
 * rows that G is added to, left out where G is of the size of X; two factors A and B, where AᵀB is added to G (it is never
 * there as a whole; G may be empty); then whatever has to be computed before, and is not looked at. Results:
 * X', and the states in their order. Each may lie where its operand lies. */
typedef struct {
  const float *x, *g, *state[3];
  float *x_new, *state_new[3];
  float scalar[6];
  const float *constant;
  Picked picked;
  int in_place;
  const float *a, *b; /* factors [sums, rows] and [sums, columns], if there are any */
  int64_t sums, rows, columns;
  int is_product;
  void (*range)(void *run, int64_t from, int64_t to);
} Run;

/* How many elements from `start` on, of those before `to`, are a block: some whole rows, or part of one. */
static int64_t block_at(const Run *run, int64_t start, int64_t to) {
  const int64_t width = run->picked.width;
  if (!run->picked.key) return least(to - start, BLOCK);
  return least(to - start, width < BLOCK ? BLOCK / width * width : least(BLOCK, width - start % width));
}

/* `count` elements of the gradient from `start` on: the rows of G that were picked from there, added up in `room`. Keys
 * before `next` are of rows before that. */
static const float *added(const Run *run, int64_t *next, int64_t start, int64_t count, float *room) {
  const Picked *p = &run->picked;
  memset(room, 0, (size_t)count * sizeof(float));
  while (*next < p->count && (row_at(p, *next) + 1) * p->width <= start) ++*next;
  for (int64_t at = *next; at < p->count && row_at(p, at) * p->width < start + count; at++) {
    const int64_t begin = row_at(p, at) * p->width, from = begin > start ? begin : start;
    const int64_t end = least(begin + p->width, start + count);
    const float *g = run->g + place_at(p, at) * p->width - begin;
    float *sums = room - start;
    for (int64_t i = from; i < end; i += LANES)
      lanes_write(sums + i, end - i, lanes_read(sums + i, end - i, 0) + lanes_read(g + i, end - i, 0));
  }
  return room;
}

static void factors(Call *call, Run *run, const Shape *x, size_t at) {
  const Shape a = shape_of(call, at), b = shape_of(call, at + 1);
  run->a = input(call, at), run->b = input(call, at + 1);
  if (!a.rank && !b.rank) return;
  if (run->picked.key || a.rank != 2 || b.rank != 2 || x->rank != 2 || a.dims[0] != b.dims[0] ||
      a.dims[1] != x->dims[0] || b.dims[1] != x->dims[1])
    fail(call, "factors of a gradient have not the size of its parameter");
  run->sums = a.dims[0], run->rows = a.dims[1], run->columns = b.dims[1], run->is_product = 1;
}

/* Operands and results of a run, in `run`; false where it failed, or nothing is to be done. */
static int prepare(Call *call, Run *run, size_t states, size_t scalars, int64_t constants) {
  Shape shape = shape_of(call, 0);
  size_t at = 2 + states;
  run->x = input(call, 0), run->g = input(call, 1);
  run->x_new = output(call, 0, &shape);
  for (size_t i = 0; i < states; i++) {
    run->state[i] = input(call, 2 + i);
    run->state_new[i] = run->state[i] ? output(call, 1 + i, &shape) : NULL;
    if (run->state[i] && shape_of(call, 2 + i).count != shape.count)
      fail(call, "a state has not the size of its parameter");
  }
  for (size_t i = 0; i < scalars; i++) {
    const float *scalar = input(call, at + i);
    if (scalar && shape_of(call, at + i).count != 1) fail(call, "a rate or factor is no scalar");
    run->scalar[i] = scalar && !call->failed ? *scalar : 1;
  }
  run->constant = input(call, at + scalars);
  if (shape_of(call, at + scalars).count != constants) fail(call, "an optimizer has not its number of constants");
  const int64_t *index = input(call, at + scalars + 1);
  const Shape picked = shape_of(call, at + scalars + 1);
  const int some = (index || picked.rank) && shape.count && !call->failed;
  const Shape g = shape_of(call, 1);
  const int64_t *source = constants ? NULL : input(call, at + scalars + 2);
  const int64_t sources = source && g.rank ? g.dims[0] : picked.count;
  if (source && shape_of(call, at + scalars + 2).count != picked.count) fail(call, "two indices are not of one size");
  if (some && !call->failed) pick(call, &run->picked, index, picked.count, &shape, source, sources);
  if (constants) factors(call, run, &shape, at + scalars + 2);
  const int64_t size = some ? sources * run->picked.width : run->is_product && !g.count ? 0 : shape.count;
  if (!g.count) run->g = NULL;
  if (g.count != size) fail(call, "a gradient has not the size of its parameter");
  size_t same = run->x == run->x_new;
  for (size_t i = 0; i < states; i++) same += run->state[i] == run->state_new[i];
  run->in_place = same == 1 + states;
  if (same && shape.count && !call->failed) __atomic_fetch_add(&onnxgrad_overwrites, 1, __ATOMIC_RELAXED);
  return call->failed ? 0 : (int)(shape.count > 0);
}

/* Elements that are worth a thread, with the rows of G that belong to them: whole rows, unless these are long. */
static int64_t unit_of(const Picked *p, int64_t count) {
  if (!p->key) return GRAIN;
  const int64_t unit = GRAIN / least(p->count * p->width / count + 1, GRAIN);
  return p->width < GRAIN ? quotient(unit, p->width) * p->width : quotient(unit, BLOCK) * BLOCK;
}

/* Adds what else there is of the gradient to a part of a product, and updates what that is for. */
static void update_part(const void *data, const Part *part) {
  const Run *given = data;
  Run run = *given;
  for (int64_t i = 0; i < part->rows; i++) {
    const int64_t row = part->row + i, start = row * given->columns + part->column, n = part->columns;
    float *sum = part->at + i * part->pitch;
    for (int64_t c = 0; given->g && c < n; c++) sum[c] += given->g[start + c];
    run.g = sum - start;
    given->range(&run, start, start + n);
  }
}

/* A kernel: how many states, scalars and constants it has, whether a gradient of 0 changes nothing, and what it does to
 * element i, with scalars s and constants k.
 *
 * Results are made in a small block and go to memory from there, as they may take the place of what they are computed
 * from. */
#define OPTIMIZER(name, states, scalars, constants, still, ...)                                       \
  static void name##_range(void *data, int64_t from, int64_t to) {                                    \
    const Run *run = data;                                                                            \
    _Alignas(64) float room[1 + states][BLOCK], sums[BLOCK];                                          \
    float s[6], k[8] = {0};                                                                           \
    for (int i = 0; i < 6; i++) s[i] = run->scalar[i];                                                \
    for (int i = 0; i < constants; i++) k[i] = run->constant[i];                                      \
    int64_t next = run->picked.key ? first_of(&run->picked, from / run->picked.width) : 0;            \
    for (int64_t start = from, count; start < to; start += count) {                                   \
      count = block_at(run, start, to);                                                               \
      float *const into[4] = {run->x_new, run->state_new[0], run->state_new[1], run->state_new[2]};   \
      {                                                                                               \
        const float *restrict x = run->x + start;                                                     \
        const float *restrict g = run->picked.key ? added(run, &next, start, count, sums) : run->g + start; \
        const float *restrict a = states > 0 ? run->state[0] + start : NULL;                          \
        const float *restrict b = states > 1 ? run->state[1] + start : NULL;                          \
        const float *restrict c = states > 2 ? run->state[2] + start : NULL;                          \
        float *restrict x_new = room[0], *restrict a_new = room[states > 0];                          \
        float *restrict b_new = room[2 * (states > 1)], *restrict c_new = room[3 * (states > 2)];     \
        (void)x, (void)a, (void)b, (void)c, (void)a_new, (void)b_new, (void)c_new, (void)s, (void)k;  \
        INDEPENDENT                                                                                   \
        for (int64_t i = 0; i < count; i++) {                                                         \
          __VA_ARGS__                                                                                 \
        }                                                                                             \
      }                                                                                               \
      for (int r = 0; r <= states; r++) memcpy(into[r] + start, room[r], (size_t)count * sizeof(float)); \
    }                                                                                                 \
  }                                                                                                   \
  /* Each row that was picked, once. */                                                               \
  static void name##_rows(void *data, int64_t from, int64_t to) {                                     \
    const Picked *p = &((const Run *)data)->picked;                                                   \
    for (int64_t at = from; at < to; at++)                                                            \
      if (!at || row_at(p, at - 1) != row_at(p, at))                                                  \
        name##_range(data, row_at(p, at) * p->width, (row_at(p, at) + 1) * p->width);                 \
  }                                                                                                   \
  static void name(Call *call, const void *settings) {                                                \
    Run run = {.range = name##_range};                                                                \
    const Picked *p = &run.picked;                                                                    \
    const int64_t count = shape_of(call, 0).count;                                                    \
    if (!prepare(call, &run, states, scalars, constants)) return;                                     \
    const float *s = run.scalar, *k = run.constant;                                                   \
    (void)s, (void)k;                                                                                 \
    const int picks = p->key && run.in_place && (still);                                              \
    if (run.is_product) each_part(call, run.a, run.b, run.sums, run.rows, run.columns, update_part, &run); \
    else if (picks) parallel_ranges(call, p->count, GRAIN / least(p->width, GRAIN), name##_rows, &run); \
    else parallel_ranges(call, count, unit_of(p, count), name##_range, &run);                         \
  }

/* Weights do not shrink, and rates and factors of gradients are numbers: x - rate·0 is x. */
#define STILL (k[0] == 0 && s[1] == 1 && s[0] * (0 * s[2]) == 0)
/* The rate is s[0]; the weight and its gradient: */
#define GIVEN                        \
  const float xi = x[i] * s[1];      \
  const float gi = k[0] != 0 ? g[i] * s[2] + xi * k[0] : g[i] * s[2];
/* A share of what was, and the rest of what is new: two constants. */
#define MIXED(old, new, at) ((old) * k[at] + (new) * k[(at) + 1])
#define MOMENTS GIVEN const float v = a_new[i] = MIXED(a[i], gi, 1), h = b_new[i] = MIXED(b[i], gi * gi, 3);
#define SQUARES GIVEN const float h = a_new[i] = MIXED(a[i], gi * gi, 1);
#define CENTRED SQUARES const float mean = b_new[i] = MIXED(b[i], gi, 1), variance = h - mean * mean; \
  const float square = variance < 0 ? 0 : variance;
#define MOVED(square, epsilon) (gi / (sqrtf(square) + (epsilon)))

/* The rows of G that were picked, alone */
OPTIMIZER(gather_grad, 0, 0, 0, 0, x_new[i] = g[i];)
OPTIMIZER(sgd, 0, 3, 1, STILL, GIVEN x_new[i] = xi - s[0] * gi;)
/* V' = αV + β'G; X' = X - R·V', nesterov: X - R·(G + αV') */
OPTIMIZER(momentum, 1, 4, 3, 0, GIVEN
          const float v = a_new[i] = s[3] * gi + a[i] * k[1];
          x_new[i] = xi - s[0] * (k[2] != 0 ? gi + v * k[1] : v);)
/* V' = αV + (1-α)G, H' = βH + (1-β)G², X' = post·(X - R·V'/(√H' + scale·ε)) */
OPTIMIZER(adam, 2, 4, 7, 0, MOMENTS x_new[i] = (xi - s[0] * (v / (sqrtf(h) + s[3] * k[5]))) * k[6];)
/* As adam, with share·G + ahead·V' in the place of R·V' */
OPTIMIZER(nadam, 2, 5, 6, 0, MOMENTS x_new[i] = xi - (s[0] * gi + s[4] * v) / (sqrtf(h) / s[3] + k[5]);)
/* H' = H + G², X' = X - R·(G/(√H' + ε)) */
OPTIMIZER(adagrad, 1, 3, 2, STILL && k[1] > 0, GIVEN
          const float h = a_new[i] = a[i] + gi * gi;
          x_new[i] = xi - s[0] * MOVED(h, k[1]);)
/* H' = αH + (1-α)G², X' = X - R·G/(√H' + ε) */
OPTIMIZER(rmsprop, 1, 3, 5, 0, SQUARES x_new[i] = xi - s[0] * MOVED(h, k[3]);)
OPTIMIZER(rmsprop_moving, 2, 3, 5, 0, SQUARES
          const float move = b_new[i] = b[i] * k[4] + MOVED(h, k[3]);
          x_new[i] = xi - s[0] * move;)
OPTIMIZER(rmsprop_centered, 2, 3, 5, 0, CENTRED x_new[i] = xi - s[0] * MOVED(square, k[3]);)
OPTIMIZER(rmsprop_both, 3, 3, 5, 0, CENTRED
          const float move = c_new[i] = c[i] * k[4] + MOVED(square, k[3]);
          x_new[i] = xi - s[0] * move;)
/* X' = X - R·sign(β₁V + (1-β₁)G), V' = β₂V + (1-β₂)G */
OPTIMIZER(lion, 1, 3, 5, 0, GIVEN
          const float move = MIXED(a[i], gi, 1);
          a_new[i] = MIXED(a[i], gi, 3);
          x_new[i] = xi - s[0] * (move > 0 ? 1 : move < 0 ? -1 : move);) /* 0 and NaN as they are */

/* Lower case: X, G and states, and at the end the constants; upper case: scalars, which may be left out for 1, and L, the
 * rows that were picked, and the factors; *: what comes before. */
const Kernel optimizer_kernels[] = {
    {.name = "GatherGrad", .inputs = "ffFLL", .outputs = "f", .compute = gather_grad}, /* also rows of G, in their order */
    {.name = "Sgd", .inputs = "ffFFFfLFF*", .outputs = "f", .compute = sgd},
    {.name = "Momentum", .inputs = "fffFFFFfLFF*", .outputs = "ff", .compute = momentum},
    {.name = "Adam", .inputs = "ffffFFFFfLFF*", .outputs = "fff", .compute = adam},
    {.name = "NAdam", .inputs = "ffffFFFFFfLFF*", .outputs = "fff", .compute = nadam},
    {.name = "Adagrad", .inputs = "fffFFFfLFF*", .outputs = "ff", .compute = adagrad},
    {.name = "RMSProp", .inputs = "fffFFFfLFF*", .outputs = "ff", .compute = rmsprop},
    {.name = "RMSPropMoving", .inputs = "ffffFFFfLFF*", .outputs = "fff", .compute = rmsprop_moving},
    {.name = "RMSPropCentered", .inputs = "ffffFFFfLFF*", .outputs = "fff", .compute = rmsprop_centered},
    {.name = "RMSPropCenteredMoving", .inputs = "fffffFFFfLFF*", .outputs = "ffff", .compute = rmsprop_both},
    {.name = "Lion", .inputs = "fffFFFfLFF*", .outputs = "ff", .compute = lion},
    {0}};
