/* Programs of elementwise operators, run over tiles that stay in the cache: one pass over memory.
 *
 * A program is a list of steps of five numbers: what is done, the register it goes to, and up to three registers (or
 * operands) it comes from. Registers hold TILE elements. An operand of the full shape is read where it lies, and a
 * result is written where it belongs; what is broadcast is spread into a register, once if it is the same for each tile.
 *
 * Shapes are those of the run: the shape of a result is what its operands broadcast to. Where results differ in shape,
 * the program runs once for each shape, with the steps that lead to it.
 */
#include "elementwise.h"

#include "kernel.h"

#ifdef __clang__
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

/* Most steps of a program, registers, operands, results and axes; floats of all registers, and of a register. */
enum { STEPS = 192, REGISTERS = 64, OPERANDS = 32, RESULTS = 16, AXES = 8, ROOM = 6144, TILE = 1024 };

extern const Kernel elementwise_kernels[];
static inline int is_bool(const char *letters, int index) { return (letters[index] | 32) == 'b'; }

/* --- operations --------------------------------------------------------------------------------------------------- */

typedef void Loop(void *to, const void *from_x, const void *from_y, const void *from_z, int64_t count);

#define ONE_BY_ONE(name, source, result, value)                                                    \
  static void run_##name(void *to, const void *from_x, const void *from_y, const void *from_z, int64_t count) { \
    const source *xs = from_x, *ys = from_y ? from_y : from_x, *zs = from_z ? from_z : from_x;     \
    result *out = to;                                                                              \
    INDEPENDENT                                                                                    \
    for (int64_t i = 0; i < count; i++) {                                                          \
      const source x = xs[i], y = ys[i], z = zs[i];                                                \
      (void)x, (void)y, (void)z;                                                                   \
      out[i] = (result)(value);                                                                    \
    }                                                                                              \
  }
typedef float real __attribute__((may_alias));
typedef int32_t whole __attribute__((may_alias));
typedef uint32_t natural __attribute__((may_alias));
#define REAL(name, value) ONE_BY_ONE(name, real, real, value)
#define WHOLE(name, value) ONE_BY_ONE(name, whole, whole, value)
#define NATURAL(name, value) ONE_BY_ONE(name, natural, natural, value)
#define REAL_MASK(name, value) ONE_BY_ONE(name, real, whole, -(value))
#define WHOLE_MASK(name, value) ONE_BY_ONE(name, whole, whole, -(value))
#define NATURAL_MASK(name, value) ONE_BY_ONE(name, natural, whole, -(value))
#define FROM_WHOLE(name, value) ONE_BY_ONE(name, whole, real, value)
#define VECTOR(name, value)                                                                        \
  static void run_##name(void *to, const void *from_x, const void *from_y, const void *from_z, int64_t count) { \
    const float *xs = from_x;                                                                      \
    float *out = to;                                                                               \
    int64_t i = 0;                                                                                 \
    (void)from_y, (void)from_z;                                                                    \
    for (; i + LANES <= count; i += LANES) {                                                       \
      const lanes x = *(const lanes *)(xs + i);                                                    \
      *(lanes *)(out + i) = value;                                                                 \
    }                                                                                              \
    if (i == count) return;                                                                        \
    const lanes x = part_of(xs + i, count - i), last = value;                                      \
    memcpy(out + i, &last, (size_t)(count - i) * sizeof *out);                                     \
  }
#define DEFINED(name, operands, kind, value) kind(name, value)
OPERATIONS(DEFINED)

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
  CODES
};

static const struct {
  Loop *loop;
  int operands;
} operations[] = {
#define LISTED(name, operands, kind, value) {run_##name, operands},
    OPERATIONS(LISTED)
#undef LISTED
};

/* --- programs ----------------------------------------------------------------------------------------------------- */

typedef struct {
  int32_t code, to, from[3];
  int32_t bits;   /* of a constant */
  int32_t direct; /* the result that is written in place, or -1 */
  int32_t kept;   /* whether what is loaded stays in its register from tile to tile */
} Step;

typedef struct {
  int count, registers;
  Step steps[STEPS];
  uint32_t loaded;         /* operands that are read, as bits */
  uint32_t needs[RESULTS]; /* the same, of those that lead to a result; 0 for one that is not stored */
  uint32_t stored;         /* results, as bits */
} Program;

static int is_operation(const Step *step) { return step->code < LOAD; }

/* Whether a number of a file is one from 0 to below `most`. */
static int within(int64_t number, int64_t most) { return number >= 0 && number < most; }

/* One step; what is wrong with it, or NULL. `needs` holds the operands that led to each register, and bit 31. */
static const char *parse(Program *program, Step *step, const int64_t *numbers, uint32_t *needs, int *writers) {
  const int64_t code = numbers[0], to = numbers[1];
  const uint32_t written = (uint32_t)1 << 31;
  if (!within(code, CODES)) return "a program has an unknown operation";
  *step = (Step){.code = (int32_t)code, .to = (int32_t)to, .direct = -1};
  if (!within(to, code == STORE ? (int64_t)strlen(elementwise_kernels->outputs) : REGISTERS)) return "a program has a wrong target";
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
    const int operands = code == STORE ? 1 : operations[code].operands;
    for (int k = 0; k < operands; k++) {
      if (!within(numbers[2 + k], REGISTERS) || !needs[numbers[2 + k]]) return "a program reads an empty register";
      step->from[k] = (int32_t)numbers[2 + k];
      from |= needs[numbers[2 + k]];
    }
  }
  if (code == STORE) {
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
  for (size_t i = 0; i < count / 5 && !wrong && !from->failed; i++)
    wrong = parse(program, &program->steps[program->count++], numbers + 5 * i, needs, writers);
  if (!wrong && !program->stored) wrong = "a program stores nothing";
  if (wrong) attributes_fail(from, wrong);
  if (from->failed) return;
  for (int i = 0; i < program->count; i++) {
    Step *step = &program->steps[i];
    if (!is_operation(step) && step->code != STORE) step->kept = writers[step->to] == 1;
    if (step->code != STORE || is_bool(elementwise_kernels->outputs, step->to)) continue;
    int maker = i;
    while (program->steps[--maker].code == STORE || program->steps[maker].to != step->from[0]) continue;
    if (is_operation(&program->steps[maker]) && program->steps[maker].direct < 0)
      program->steps[maker].direct = step->to;
  }
}

/* --- runs --------------------------------------------------------------------------------------------------------- */

typedef struct {
  const char *data;
  int64_t strides[AXES];   /* in elements, over the axes of the job; 0 along one that is broadcast */
  int full, periodic;      /* in the order of the elements, all of it; or the same for each tile */
  int bytes;               /* of an element: 4, or 1 for bool */
} Source;

typedef struct {
  const Program *program;
  Source sources[OPERANDS];
  char *results[RESULTS]; /* NULL for one that nobody reads, or that is of another shape */
  char live[STEPS];
  size_t axes;
  int64_t dims[AXES], count, tile;
} Job;

/* `count` elements of a broadcast operand from `start` on, 4 bytes each. */
static void spread(const Job *job, const Source *source, natural *to, int64_t start, int64_t count) {
  int64_t at[AXES], offset = 0, rest = start;
  for (size_t k = job->axes; k-- > 0; rest /= job->dims[k]) {
    at[k] = rest % job->dims[k];
    offset += at[k] * source->strides[k];
  }
  const size_t last = job->axes - 1;
  while (count > 0) {
    const int64_t run = least(count, job->dims[last] - at[last]);
    const char *from = source->data + offset * source->bytes;
    if (source->bytes == 1)
      for (int64_t i = 0; i < run; i++) to[i] = from[source->strides[last] ? i : 0] ? UINT32_MAX : 0;
    else if (source->strides[last])
      memcpy(to, from, (size_t)run * 4);
    else
      for (int64_t i = 0; i < run; i++) to[i] = *(const natural *)from;
    to += run, count -= run;
    offset -= at[last] * source->strides[last], at[last] = 0;
    for (size_t k = last; k-- > 0;) { /* the next row */
      offset += source->strides[k];
      if (++at[k] < job->dims[k]) break;
      offset -= job->dims[k] * source->strides[k], at[k] = 0;
    }
  }
}

static void tiles(void *data, int64_t from, int64_t to) {
  const Job *job = data;
  const Program *program = job->program;
  _Alignas(64) float room[ROOM];
  void *at[REGISTERS] = {0};
  for (int64_t start = from; start < to; start += job->tile) {
    const int64_t count = least(job->tile, to - start);
    for (int i = 0; i < program->count; i++) {
      const Step *step = &program->steps[i];
      if (!job->live[i]) continue;
      float *own = step->code == STORE ? NULL : room + step->to * job->tile;
      if (is_operation(step)) {
        char *result = step->direct < 0 ? NULL : job->results[step->direct];
        void *target = result ? (void *)(result + start * 4) : (void *)own;
        const int operands = operations[step->code].operands;
        operations[step->code].loop(target, at[step->from[0]], operands > 1 ? at[step->from[1]] : NULL,
                                    operands > 2 ? at[step->from[2]] : NULL, count);
        at[step->to] = target;
      } else if (step->code == STORE) {
        char *result = job->results[step->to];
        const natural *value = at[step->from[0]];
        if (!result || result + start * 4 == (const char *)value) continue;
        if (is_bool(elementwise_kernels->outputs, step->to))
          for (int64_t k = 0; k < count; k++) result[start + k] = (char)(value[k] & 1);
        else
          memmove(result + start * 4, value, (size_t)count * 4);
      } else if (step->code == CONSTANT) {
        if (!step->kept || start == from)
          for (int64_t k = 0; k < job->tile; k++) ((whole *)own)[k] = step->bits;
        at[step->to] = own;
      } else {
        const Source *source = &job->sources[step->from[0]];
        at[step->to] = own;
        if (source->full && source->bytes == 4)
          at[step->to] = (void *)(source->data + start * 4);
        else if (source->full)
          for (int64_t k = 0; k < count; k++) ((natural *)own)[k] = source->data[start + k] ? UINT32_MAX : 0;
        else if (!source->periodic || !step->kept || start == from)
          spread(job, source, (natural *)own, start, source->periodic ? least(job->tile, job->count) : count);
      }
    }
  }
}

/* `shape` as what it and `other` broadcast to; false where they do not. */
static int broadcast(Shape *shape, const Shape *other) {
  if (other->rank > shape->rank) {
    const size_t more = other->rank - shape->rank;
    memmove(shape->dims + more, shape->dims, shape->rank * sizeof *shape->dims);
    for (size_t k = 0; k < more; k++) shape->dims[k] = 1;
    shape->rank = other->rank;
  }
  const size_t more = shape->rank - other->rank;
  for (size_t k = 0; k < other->rank; k++) {
    int64_t *dim = &shape->dims[more + k];
    if (*dim == 1)
      *dim = other->dims[k];
    else if (other->dims[k] != 1 && other->dims[k] != *dim)
      return 0;
  }
  return 1;
}

/* What the operands of the bits `needs` broadcast to. */
static Shape shape_of_result(Call *call, const Shape *shapes, uint32_t needs) {
  Shape shape = {.rank = 0, .count = 1};
  for (int i = 0; i < OPERANDS; i++)
    if (needs >> i & 1 && !broadcast(&shape, &shapes[i])) fail(call, "Elementwise: operands do not broadcast");
  for (size_t k = 0; k < shape.rank && !call->failed; k++)
    if (__builtin_mul_overflow(shape.count, shape.dims[k], &shape.count) || shape.count > MOST_NUMBERS)
      fail(call, "Elementwise: a result is too large");
  return shape;
}

/* The steps that lead to results which are there; the operands that they read, as bits. */
static uint32_t live_steps(Job *job) {
  char wanted[REGISTERS] = {0};
  uint32_t loaded = 0;
  for (int i = job->program->count; i-- > 0;) {
    const Step *step = &job->program->steps[i];
    if (step->code == STORE) {
      if ((job->live[i] = job->results[step->to] != NULL)) wanted[step->from[0]] = 1;
      continue;
    }
    job->live[i] = wanted[step->to];
    wanted[step->to] = 0;
    if (!job->live[i]) continue;
    if (step->code == LOAD) loaded |= (uint32_t)1 << step->from[0];
    for (int k = 0; is_operation(step) && k < operations[step->code].operands; k++) wanted[step->from[k]] = 1;
  }
  return loaded;
}

/* The axes of `shape` as few as the operands allow: those that all of them go through as one are one. */
static void fold(Job *job, const Shape *shape, const Shape *shapes, uint32_t loaded) {
  job->axes = 0;
  for (size_t axis = 0; axis < shape->rank; axis++) {
    if (shape->dims[axis] == 1) continue;
    const size_t k = job->axes++;
    job->dims[k] = shape->dims[axis];
    int one = k > 0;
    for (int i = 0; i < OPERANDS; i++) {
      if (!(loaded >> i & 1)) continue;
      const Shape *own = &shapes[i];
      int64_t stride = 1;
      const size_t missing = shape->rank - own->rank;
      for (size_t q = axis + 1; q < shape->rank; q++) stride *= q < missing ? 1 : own->dims[q - missing];
      if (axis < missing || own->dims[axis - missing] == 1) stride = 0;
      job->sources[i].strides[k] = stride;
      one &= k > 0 && job->sources[i].strides[k - 1] == stride * job->dims[k];
    }
    if (!one) continue;
    job->axes--;
    job->dims[k - 1] *= job->dims[k];
    for (int i = 0; i < OPERANDS; i++) job->sources[i].strides[k - 1] = job->sources[i].strides[k];
  }
  if (!job->axes) {
    job->dims[job->axes++] = 1;
    for (int i = 0; i < OPERANDS; i++) job->sources[i].strides[0] = 0;
  }
}

/* How long a tile is: what the registers have room for, in whole runs of the last axes where these fit. */
static void cut(Job *job, uint32_t loaded) {
  const int registers = job->program->registers > 4 ? job->program->registers : 4;
  int64_t most = least(ROOM / registers, TILE) / LANES * LANES, runs = 1;
  size_t first = job->axes; /* the axes from here on are gone through within a tile */
  while (first > 0 && runs * job->dims[first - 1] <= most) runs *= job->dims[--first];
  job->tile = first ? most / runs * runs : most;
  for (int i = 0; i < OPERANDS; i++) {
    if (!(loaded >> i & 1)) continue;
    Source *source = &job->sources[i];
    int64_t expected = 1;
    source->full = source->periodic = 1;
    for (size_t k = job->axes; k-- > 0; expected *= job->dims[k]) {
      source->full &= source->strides[k] == expected || job->dims[k] == 1;
      source->periodic &= k >= first || source->strides[k] == 0;
    }
  }
}

static void compute(Call *call, const void *settings) {
  const Program *program = settings;
  Shape shapes[OPERANDS];
  Job job = {.program = program};
  for (int i = 0; i < OPERANDS; i++) {
    if (!(program->loaded >> i & 1)) continue;
    job.sources[i].data = input(call, (size_t)i);
    job.sources[i].bytes = is_bool(elementwise_kernels->inputs, i) ? 1 : 4;
    shapes[i] = shape_of(call, (size_t)i);
    if (!call->failed && !job.sources[i].data && (shapes[i].count || !shapes[i].rank))
      fail(call, "Elementwise: an operand of the program is missing");
    if (shapes[i].rank > AXES) fail(call, "Elementwise: an operand has more than eight axes");
    if (call->failed) return;
  }
  char *results[RESULTS] = {0};
  Shape of[RESULTS];
  const size_t given = output_count_of(call);
  for (size_t r = 0; r < given && r < RESULTS && !call->failed; r++) {
    of[r] = (Shape){.rank = 1, .dims = {0}}; /* of one that no step stores */
    if (program->stored >> r & 1) of[r] = shape_of_result(call, shapes, program->needs[r]);
    results[r] = output(call, r, &of[r]);
    if (!(program->stored >> r & 1) || !of[r].count) results[r] = NULL;
  }
  for (size_t r = 0; r < RESULTS && !call->failed; r++) {
    if (!results[r]) continue;
    for (size_t s = 0; s < RESULTS; s++) {
      job.results[s] = results[s] && same_shape(&of[r], &of[s]) ? results[s] : NULL;
      if (job.results[s]) results[s] = NULL;
    }
    const uint32_t loaded = live_steps(&job);
    job.count = of[r].count;
    fold(&job, &of[r], shapes, loaded);
    cut(&job, loaded);
    const int64_t unit = (8192 + job.tile - 1) / job.tile * job.tile;
    parallel_ranges(call, job.count, unit, tiles, &job);
  }
}

const Kernel elementwise_kernels[] = {
    {.name = "Elementwise", .inputs = "FFFFFFFFFFFFFFFFIIIIUUUUBBBB", .outputs = "FFFFFFFFIIUUUUBB",
     .settings = sizeof(Program), .read = read, .compute = compute},
    {0},
};
