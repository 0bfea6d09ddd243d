/* What programs of elementwise operators are made of: loops for the operations, and steps, which are read here.
 *
 * A program is a list of steps of five numbers: what is done, the register it goes to, and up to three registers (or
 * operands) it comes from.
 */
#ifndef ONNXGRAD_ELEMENTWISE_PROGRAM_H
#define ONNXGRAD_ELEMENTWISE_PROGRAM_H

#include "elementwise.h"
#include "kernel.h"
#include "reductions.h"

#ifdef __clang__
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

/* Most steps of a program, registers, operands and results. */
enum { STEPS = 192, REGISTERS = 64, OPERANDS = 32, RESULTS = 16 };

extern const Kernel elementwise_kernels[];
static inline int is_bool(const char *letters, int index) { return (letters[index] | 32) == 'b'; }

/* --- operations --------------------------------------------------------------------------------------------------- */

#define ONE_BY_ONE(name, operands, source, result, value)                                          \
  INLINE void each_##name(const int single, void *to, const void *from_x, const void *from_y, const void *from_z, \
                          int64_t count) {                                                         \
    const source *xs = from_x, *ys = operands > 1 ? from_y : from_x, *zs = operands > 2 ? from_z : from_x; \
    const source only_x = *xs, only_y = *ys, only_z = *zs;                                         \
    result *out = to;                                                                              \
    INDEPENDENT                                                                                    \
    for (int64_t i = 0; i < count; i++) {                                                          \
      const source x = single & 1 ? only_x : xs[i], y = single & 2 ? only_y : ys[i];               \
      const source z = single & 4 ? only_z : zs[i];                                                \
      (void)x, (void)y, (void)z;                                                                   \
      out[i] = (result)(value);                                                                    \
    }                                                                                              \
  }                                                                                                \
  static void run_##name(int single, void *to, const void *x, const void *y, const void *z, int64_t count) { \
    switch (single & (operands > 1 ? (1 << operands) - 1 : 0)) {                                   \
      case 1: each_##name(1, to, x, y, z, count); break;                                           \
      case 2: each_##name(2, to, x, y, z, count); break;                                           \
      case 3: each_##name(3, to, x, y, z, count); break;                                           \
      case 4: each_##name(4, to, x, y, z, count); break;                                           \
      case 5: each_##name(5, to, x, y, z, count); break;                                           \
      case 6: each_##name(6, to, x, y, z, count); break;                                           \
      default: each_##name(0, to, x, y, z, count);                                                 \
    }                                                                                              \
  }
typedef float real __attribute__((may_alias));
typedef int32_t whole __attribute__((may_alias));
typedef uint32_t natural __attribute__((may_alias));
#define REAL(name, operands, value) ONE_BY_ONE(name, operands, real, real, value)
#define WHOLE(name, operands, value) ONE_BY_ONE(name, operands, whole, whole, value)
#define NATURAL(name, operands, value) ONE_BY_ONE(name, operands, natural, natural, value)
#define REAL_MASK(name, operands, value) ONE_BY_ONE(name, operands, real, whole, -(value))
#define WHOLE_MASK(name, operands, value) ONE_BY_ONE(name, operands, whole, whole, -(value))
#define NATURAL_MASK(name, operands, value) ONE_BY_ONE(name, operands, natural, whole, -(value))
#define FROM_WHOLE(name, operands, value) ONE_BY_ONE(name, operands, whole, real, value)
#define VECTOR(name, operands, value)                                                                        \
  static void run_##name(int single, void *to, const void *from_x, const void *from_y, const void *from_z, \
                         int64_t count) {                                                          \
    const float *xs = from_x;                                                                      \
    float *out = to;                                                                               \
    int64_t i = 0;                                                                                 \
    (void)single, (void)from_y, (void)from_z;                                                                    \
    for (; i + LANES <= count; i += LANES) {                                                       \
      const lanes x = *(const lanes *)(xs + i);                                                    \
      *(lanes *)(out + i) = value;                                                                 \
    }                                                                                              \
    if (i == count) return;                                                                        \
    const lanes x = part_of(xs + i, count - i), last = value;                                      \
    memcpy(out + i, &last, (size_t)(count - i) * sizeof *out);                                     \
  }
#define DEFINED(name, operands, kind, value) kind(name, operands, value)
OPERATIONS(DEFINED)

/* What becomes of axes that are summed over. */
enum { GO, STAY, FLAT, WHAT_BECOMES };

enum {
#define NAMED(name, operands, kind, value) name,
  OPERATIONS(NAMED)
#undef NAMED
  /* register, operand */
  LOAD,
  /* register, bits */
  CONSTANT,
  /* result, register */
  STORE,
  /* result, register, axes that are summed over, as bits from the last one on; what becomes of them: gone, 1, or the
   * others as one */
  SUM,
  MEAN,
  CODES
};

const Operation elementwise_operations[] = {
#define LISTED(name, operands, kind, value) {run_##name, operands},
    OPERATIONS(LISTED)
#undef LISTED
};

/* --- programs ----------------------------------------------------------------------------------------------------- */

typedef struct {
  int32_t code, to, from[3];
  int32_t bits;   /* of a constant */
  int32_t direct; /* the result that is written in place, or -1 */
  int32_t kept;   /* whether what is loaded stays in its register */
} Step;

typedef struct {
  int count, registers;
  Step steps[STEPS];
  uint32_t loaded;         /* operands that are read, as bits */
  uint32_t needs[RESULTS]; /* the same, of those that lead to a result; 0 for one that is not stored */
  uint32_t stored;         /* results, as bits */
  int sums[RESULTS];       /* the steps of those that are sums, or -1 */
} Program;

static int is_operation(const Step *step) { return step->code < LOAD; }
static int is_result(int64_t code) { return code >= STORE; }
static int is_sum(int64_t code) { return code > STORE; }

/* Whether a number of a file is one from 0 to below `most`. */
static int within(int64_t number, int64_t most) { return number >= 0 && number < most; }

/* One step; what is wrong with it, or NULL. `needs` holds the operands that led to each register, and bit 31. */
static const char *parse(Program *program, Step *step, const int64_t *numbers, uint32_t *needs, int *writers) {
  const int64_t code = numbers[0], to = numbers[1];
  const uint32_t written = (uint32_t)1 << 31;
  if (!within(code, CODES)) return "a program has an unknown operation";
  *step = (Step){.code = (int32_t)code, .to = (int32_t)to, .direct = -1};
  const int64_t targets = is_result(code) ? (int64_t)strlen(elementwise_kernels->outputs) : REGISTERS;
  if (!within(to, targets)) return "a program has a wrong target";
  uint32_t from = 0;
  if (code == LOAD) {
    if (!within(numbers[2], (int64_t)strlen(elementwise_kernels->inputs))) return "a program reads no operand";
    step->from[0] = (int32_t)numbers[2];
    from = (uint32_t)1 << numbers[2];
    program->loaded |= from;
  } else if (code == CONSTANT) {
    if (numbers[2] < INT32_MIN || numbers[2] > UINT32_MAX) return "a program has a constant of more than 32 bits";
    step->bits = (int32_t)(uint32_t)numbers[2];
  } else {
    const int operands = is_result(code) ? 1 : elementwise_operations[code].operands;
    for (int k = 0; k < operands; k++) {
      if (!within(numbers[2 + k], REGISTERS) || !needs[numbers[2 + k]]) return "a program reads an empty register";
      step->from[k] = (int32_t)numbers[2 + k];
      from |= needs[numbers[2 + k]];
    }
  }
  if (is_sum(code)) {
    if (!within(numbers[3], 1 << AXES) || !within(numbers[4], WHAT_BECOMES)) return "a program sums over unknown axes";
    if (elementwise_kernels->outputs[to] != 'F') return "a program has sums that are no floats";
    step->from[1] = (int32_t)numbers[3], step->from[2] = (int32_t)numbers[4];
    program->sums[to] = (int)(step - program->steps);
  }
  if (is_result(code)) {
    if (program->stored >> to & 1) return "a program stores a result twice";
    program->stored |= (uint32_t)1 << to;
    program->needs[to] = from & ~written;
  } else {
    needs[to] = from | written;
    writers[to]++;
    if (to >= program->registers) program->registers = (int)to + 1;
  }
  return NULL;
}

static void read(Attributes *from, void *settings) {
  Program *program = settings;
  int64_t numbers[5 * STEPS];
  const size_t count = attribute_some_ints(from, "program", numbers, 5 * STEPS);
  uint32_t needs[REGISTERS] = {0};
  int writers[REGISTERS] = {0};
  const char *wrong = count % 5 ? "a program is cut off" : NULL;
  for (int r = 0; r < RESULTS; r++) program->sums[r] = -1;
  for (size_t i = 0; i < count / 5 && !wrong && !from->failed; i++)
    wrong = parse(program, &program->steps[program->count++], numbers + 5 * i, needs, writers);
  if (!wrong && !program->stored) wrong = "a program stores nothing";
  if (wrong) attributes_fail(from, wrong);
  if (from->failed) return;
  for (int i = 0; i < program->count; i++) {
    Step *step = &program->steps[i];
    if (!is_operation(step) && !is_result(step->code)) step->kept = writers[step->to] == 1;
    if (step->code != STORE || is_bool(elementwise_kernels->outputs, step->to)) continue;
    int maker = i;
    while (is_result(program->steps[--maker].code) || program->steps[maker].to != step->from[0]) continue;
    if (is_operation(&program->steps[maker]) && program->steps[maker].direct < 0)
      program->steps[maker].direct = step->to;
  }
}

#endif
