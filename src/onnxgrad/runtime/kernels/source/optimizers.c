/* Optimizers in one pass over memory: what standard operators take ten or twelve passes for.
 *
 * Every product and sum is rounded by itself, in the order of the operators, so the results are the same to the last
 * bit: contraction to fused multiply-adds is off in this file. Memory is what takes the time.
 */

#include <math.h>

#include "kernel.h"
#include "picked.h"

#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#pragma GCC optimize("fp-contract=off", "no-math-errno", "no-trapping-math")
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

/* Elements that are worth a thread; elements of a block. */
enum { GRAIN = 8192, BLOCK = 64 };

/* How many updates took the place of what they were computed from, in this process. */
__attribute__((visibility("default"))) int64_t onnxgrad_overwrites;

/* Operands, in this order: X, G, up to three states; scalars of shape [], left out for 1; constants, one vector; the
 * rows that G is added to, left out where G is of the size of X; then whatever has to be computed before, and is not
 * looked at. Results: X', and the states in their order. Each may lie where its operand lies. */
typedef struct {
  const float *x, *g, *state[3];
  float *x_new, *state_new[3];
  float scalar[6];
  const float *constant;
  Picked picked;
  int in_place;
} Run;

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
    for (int64_t i = from; i < end; i++) room[i - start] += g[i];
  }
  return room;
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
    if (!run->state[i]) continue;
    if (shape_of(call, 2 + i).count != shape.count) fail(call, "a state has not the size of its parameter");
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
  if (some) pick(call, &run->picked, index, picked.count, &shape);
  if (shape_of(call, 1).count != (some ? run->picked.count * run->picked.width : shape.count))
    fail(call, "a gradient has not the size of its parameter");
  int in_place = run->x == run->x_new;
  for (size_t i = 0; i < states; i++) in_place |= run->state[i] == run->state_new[i];
  run->in_place = run->x == run->x_new;
  for (size_t i = 0; i < states; i++) run->in_place &= run->state[i] == run->state_new[i];
  if (in_place && shape.count && !call->failed) __atomic_fetch_add(&onnxgrad_overwrites, 1, __ATOMIC_RELAXED);
  return call->failed ? 0 : (int)(shape.count > 0);
}

/* A kernel: how many states, scalars and constants it has, whether a gradient of 0 changes nothing, and what it does to
 * element i.
 *
 * Results are made in a small block and go to memory from there, as they may take the place of what they are computed
 * from.
 */
#define OPTIMIZER(name, states, scalars, constants, still, before, ...)                         \
  static void name##_range(void *data, int64_t from, int64_t to) {                        \
    const Run *run = data;                                                                \
    const float *s = run->scalar, *k = run->constant;                                            \
    const float rate = s[0], shrink = s[1], clip = s[2];                                         \
    _Alignas(64) float room[1 + states][BLOCK], sums[BLOCK];                                     \
    int64_t next = run->picked.key ? first_of(&run->picked, from / run->picked.width) : 0;      \
    before;                                                                                     \
    for (int64_t start = from; start < to; start += BLOCK) {                                    \
      const int64_t count = least(BLOCK, to - start);                                           \
      float *const into[4] = {run->x_new, run->state_new[0], run->state_new[1], run->state_new[2]}; \
      {                                                                                         \
      const float *restrict x = run->x + start;                                                  \
      const float *restrict g = run->picked.key ? added(run, &next, start, count, sums) : run->g + start; \
      const float *restrict a = states > 0 ? run->state[0] + start : NULL;                       \
      const float *restrict b = states > 1 ? run->state[1] + start : NULL;                       \
      const float *restrict c = states > 2 ? run->state[2] + start : NULL;                       \
      float *restrict x_new = room[0], *restrict a_new = room[states > 0];                      \
      float *restrict b_new = room[2 * (states > 1)], *restrict c_new = room[3 * (states > 2)]; \
      (void)a, (void)b, (void)c, (void)a_new, (void)b_new, (void)c_new;                         \
      INDEPENDENT                                                                               \
      for (int64_t i = 0; i < count; i++) __VA_ARGS__                                           \
      }                                                                                         \
      for (int r = 0; r <= states; r++) memcpy(into[r] + start, room[r], (size_t)count * sizeof(float)); \
    }                                                                                           \
  }                                                                                             \
  /* Each row that was picked, once. */                                                         \
  static void name##_rows(void *data, int64_t from, int64_t to) {                         \
    const Picked *p = &((const Run *)data)->picked;                                       \
    for (int64_t at = from; at < to; at++) {                                                    \
      const int64_t row = row_at(p, at);                                                        \
      if (!at || row_at(p, at - 1) != row)                                                      \
        name##_range(data, row * p->width, (row + 1) * p->width);                         \
    }                                                                                           \
  }                                                                                             \
  static void name(Call *call, const void *settings) {                                    \
    (void)settings;                                                                             \
    Run run = {0};                                                                        \
    int64_t count = shape_of(call, 0).count;                                                    \
    if (!prepare(call, &run, states, scalars, constants)) return;                         \
    const float *s = run.scalar, *k = run.constant;                                              \
    (void)s, (void)k;                                                                           \
    if (run.picked.key && run.in_place && (still))                                              \
      parallel_ranges(call, run.picked.count, GRAIN / least(run.picked.width, GRAIN), name##_rows, &run); \
    else                                                                                        \
      parallel_ranges(call, count, GRAIN, name##_range, &run);                            \
  }

/* Weights do not shrink, and rates and factors of gradients are numbers: x - rate·0 is x. */
#define STILL (k[0] == 0 && s[1] == 1 && s[0] * (0 * s[2]) == 0)
#define MIXED(old, new, share, rest) ((old) * (share) + (new) * (rest))
#define DECAYED (norm != 0 ? g[i] * clip + xi * norm : g[i] * clip)

OPTIMIZER(sgd, 0, 3, 1, STILL, const float norm = k[0], {
  const float xi = x[i] * shrink, gi = DECAYED;
  x_new[i] = xi - rate * gi;
})

/* V' = αV + β'G; X' = X - R·V', nesterov: X - R·(G + αV') */
OPTIMIZER(momentum, 1, 4, 3, 0,
          const float norm = k[0]; const float alpha = k[1]; const int nesterov = k[2] != 0;
          const float first = s[3], {
  const float xi = x[i] * shrink, gi = DECAYED;
  const float v = first * gi + a[i] * alpha;
  a_new[i] = v;
  x_new[i] = xi - rate * (nesterov ? gi + v * alpha : v);
})

#define MOMENTS                                                                                  \
  const float xi = x[i] * shrink, gi = DECAYED;                                                   \
  const float v = MIXED(a[i], gi, alpha, alpha_rest), h = MIXED(b[i], gi * gi, beta, beta_rest);  \
  a_new[i] = v;                                                                                  \
  b_new[i] = h;
/* V' = αV + (1-α)G, H' = βH + (1-β)G², X' = post·(X - R·V'/(√H' + scale·ε)) */
OPTIMIZER(adam, 2, 4, 7, 0,
          const float norm = k[0]; const float epsilon = s[3] * k[5]; const float alpha = k[1]; const float alpha_rest = k[2];
          const float beta = k[3]; const float beta_rest = k[4]; const float post = k[6], {
  MOMENTS
  x_new[i] = (xi - rate * (v / (sqrtf(h) + epsilon))) * post;
})

/* As adam, with share·G + ahead·V' in the place of R·V' */
OPTIMIZER(nadam, 2, 5, 6, 0,
          const float norm = k[0]; const float root = s[3]; const float ahead = s[4]; const float alpha = k[1];
          const float alpha_rest = k[2]; const float beta = k[3]; const float beta_rest = k[4]; const float epsilon = k[5], {
  MOMENTS
  x_new[i] = xi - (rate * gi + ahead * v) / (sqrtf(h) / root + epsilon);
})

/* H' = H + G², X' = X - R·(G/(√H' + ε)) */
OPTIMIZER(adagrad, 1, 3, 2, STILL && k[1] > 0, const float norm = k[0]; const float epsilon = k[1], {
  const float xi = x[i] * shrink, gi = DECAYED;
  const float h = a[i] + gi * gi;
  a_new[i] = h;
  x_new[i] = xi - rate * (gi / (sqrtf(h) + epsilon));
})

/* H' = αH + (1-α)G², X' = X - R·G/(√H' + ε) */
#define RMSPROP                                                  \
  const float norm = k[0], alpha = k[1], rest = k[2], epsilon = k[3]; \
  const float momentum = k[4];                                    \
  (void)momentum
#define SQUARE                                                   \
  const float xi = x[i] * shrink, gi = DECAYED;                   \
  const float h = MIXED(a[i], gi * gi, alpha, rest);              \
  a_new[i] = h;
#define CENTERED                                                 \
  const float mean = MIXED(b[i], gi, alpha, rest);                \
  const float variance = h - mean * mean;                         \
  const float square = variance < 0 ? 0 : variance;               \
  b_new[i] = mean;
#define MOVED(square) (gi / (sqrtf(square) + epsilon))
OPTIMIZER(rmsprop, 1, 3, 5, 0, RMSPROP, {
  SQUARE
  x_new[i] = xi - rate * MOVED(h);
})
OPTIMIZER(rmsprop_moving, 2, 3, 5, 0, RMSPROP, {
  SQUARE
  const float move = b[i] * momentum + MOVED(h);
  b_new[i] = move;
  x_new[i] = xi - rate * move;
})
OPTIMIZER(rmsprop_centered, 2, 3, 5, 0, RMSPROP, {
  SQUARE CENTERED
  x_new[i] = xi - rate * MOVED(square);
})
OPTIMIZER(rmsprop_both, 3, 3, 5, 0, RMSPROP, {
  SQUARE CENTERED
  const float move = c[i] * momentum + MOVED(square);
  c_new[i] = move;
  x_new[i] = xi - rate * move;
})

/* X' = X - R·sign(β₁V + (1-β₁)G), V' = β₂V + (1-β₂)G */
OPTIMIZER(lion, 1, 3, 5, 0,
          const float norm = k[0]; const float now = k[1]; const float now_rest = k[2]; const float later = k[3];
          const float later_rest = k[4], {
  const float xi = x[i] * shrink, gi = DECAYED;
  const float move = MIXED(a[i], gi, now, now_rest);
  a_new[i] = MIXED(a[i], gi, later, later_rest);
  x_new[i] = xi - rate * (move > 0 ? 1 : move < 0 ? -1 : move); /* 0 and NaN as they are */
})

/* Lower case: X, G and states, and at the end the constants; upper case: scalars, which may be left out for 1, and L, the
 * rows that were picked; *: what comes before. */
const Kernel optimizer_kernels[] = {
    {.name = "Sgd", .inputs = "ffFFFfL*", .outputs = "f", .compute = sgd},
    {.name = "Momentum", .inputs = "fffFFFFfL*", .outputs = "ff", .compute = momentum},
    {.name = "Adam", .inputs = "ffffFFFFfL*", .outputs = "fff", .compute = adam},
    {.name = "NAdam", .inputs = "ffffFFFFFfL*", .outputs = "fff", .compute = nadam},
    {.name = "Adagrad", .inputs = "fffFFFfL*", .outputs = "ff", .compute = adagrad},
    {.name = "RMSProp", .inputs = "fffFFFfL*", .outputs = "ff", .compute = rmsprop},
    {.name = "RMSPropMoving", .inputs = "ffffFFFfL*", .outputs = "fff", .compute = rmsprop_moving},
    {.name = "RMSPropCentered", .inputs = "ffffFFFfL*", .outputs = "fff", .compute = rmsprop_centered},
    {.name = "RMSPropCenteredMoving", .inputs = "fffffFFFfL*", .outputs = "ffff", .compute = rmsprop_both},
    {.name = "Lion", .inputs = "fffFFFfL*", .outputs = "ff", .compute = lion},
    {0},
};
