/* Recurrences: one step after the other of a program on rows, which do not know of each other.
 *
 * A step reads its slices of some operands and the states, makes products with matrices that are the same for all
 * steps and elementwise operations, and gives the next states and slices of results. As no row reads another one, a few
 * rows go through all steps by themselves: what is between operations stays near the processor, threads wait for nothing, and a
 * matrix is laid out for its products once for all steps.
 *
 * Values have rows of `width` numbers. Steps of the program are ten numbers: what is done, on how many columns, and
 * four times a value and the column that is the first one: where it goes, and what it comes from.
 */
#include "elementwise.h"
#include "gemm.h"
#include "kernel.h"

enum { VALUES = 256, STEPS = 256, STATES = 16, OPERANDS = 40, RESULTS = 32, MATRICES = 16, PIECES = 32, FIELDS = 10 };
enum { WIDEST = 1 << 16, LARGE = 1 << 18 };

/* What a value is: of this step; a state; rows of an operand, other ones for each step or the same; one row for all;
 * one number; rows of a result. */
enum { REGISTER, STATE, SCANNED, FIXED, SHARED, CONSTANT, RESULT, KINDS };

enum {
#define NAMED(name, operands, kind, value) name,
  OPERATIONS(NAMED)
#undef NAMED
  /* rows, what is added (or a value of -1), number of a matrix */
  PRODUCT,
  /* one column, to all */
  SPREAD,
  COPY,
  CODES
};

typedef struct {
  int64_t kind, place, width, backwards; /* place: the first column of a register, or a number of its kind */
} Value;

typedef struct {
  int64_t code, width, at[4], first[4];
} Step;

typedef struct {
  int64_t operand, depth, columns, turned;
} Matrix;

typedef struct {
  int64_t operand, value, first, width; /* what it is at first; what it is next */
} State;

typedef struct {
  int64_t values, steps, states, matrices, columns; /* columns: of all registers */
  Value value[VALUES];
  Step step[STEPS];
  State state[STATES];
  Matrix matrix[MATRICES];
} Program;

/* --- programs ----------------------------------------------------------------------------------------------------- */

static int within(int64_t number, int64_t most) { return number >= 0 && number < most; }

/* Whether `count` columns from `first` on are of the value `at`, of which a constant has any number. */
static int reaches(const Program *p, int64_t at, int64_t first, int64_t count) {
  if (!within(at, p->values) || first < 0 || count < 1) return 0;
  return p->value[at].kind == CONSTANT || first + count <= p->value[at].width;
}

static const char *wrong_value(const Program *p, int64_t i) {
  const Value *v = &p->value[i];
  const int64_t most[] = {[REGISTER] = p->columns, [STATE] = p->states, [SCANNED] = OPERANDS, [FIXED] = OPERANDS,
                          [SHARED] = OPERANDS, [RESULT] = RESULTS};
  if (!within(v->kind, KINDS) || v->width < 1 || v->width > WIDEST) return "a value is of no kind";
  if (v->kind == CONSTANT) return v->place < INT32_MIN || v->place > UINT32_MAX ? "a constant has more than 32 bits" : NULL;
  if (!within(v->place, most[v->kind])) return "a value is nowhere";
  if (v->kind == REGISTER && v->place + v->width > p->columns) return "a register is too wide";
  if (v->kind == STATE && v->width != p->state[v->place].width) return "a state is too wide";
  if (v->kind != RESULT) return NULL;
  if (v->place < p->states) return "a state is a result by itself";
  for (int64_t k = 0; k < i; k++)
    if (p->value[k].kind == RESULT && p->value[k].place == v->place) return "a result is there twice";
  return NULL;
}

static const char *wrong_step(const Program *p, const Step *s, int64_t *written) {
  if (!within(s->code, CODES) || s->width < 1 || s->width > WIDEST) return "a program has an unknown operation";
  if (!reaches(p, s->at[0], s->first[0], s->width)) return "a step goes beyond its target";
  const Value *to = &p->value[s->at[0]];
  if (to->kind != REGISTER && to->kind != RESULT) return "a step writes what is given";
  written[s->at[0]] += s->width;
  if (s->code == PRODUCT) {
    if (!within(s->at[3], p->matrices)) return "a product has no matrix";
    const Matrix *m = &p->matrix[s->at[3]];
    if (m->columns != s->width || !reaches(p, s->at[1], s->first[1], m->depth)) return "a product has the wrong size";
    if (p->value[s->at[1]].kind == CONSTANT) return "a product is of a constant";
    return s->at[2] == -1 || reaches(p, s->at[2], s->first[2], s->width) ? NULL : "a product reads too much";
  }
  const int operands = s->code < PRODUCT ? elementwise_operations[s->code].operands : 1;
  for (int k = 1; k <= operands; k++)
    if (!reaches(p, s->at[k], s->first[k], s->code == SPREAD ? 1 : s->width)) return "a step reads too much";
  return NULL;
}

static const char *wrong(const Program *p) {
  int64_t written[VALUES] = {0};
  const char *found = within(p->columns, WIDEST + 1) ? NULL : "registers are too wide";
  for (int64_t i = 0; i < p->states && !found; i++)
    if (!within(p->state[i].operand, OPERANDS) || !within(p->state[i].width - 1, WIDEST)) found = "a state has no beginning";
  for (int64_t i = 0; i < p->matrices && !found; i++) {
    const Matrix *m = &p->matrix[i];
    if (!within(m->operand, OPERANDS) || !within(m->depth - 1, WIDEST) || !within(m->columns - 1, WIDEST) ||
        !within(m->turned, 2))
      found = "a matrix is of no size";
  }
  for (int64_t i = 0; i < p->values && !found; i++) found = wrong_value(p, i);
  for (int64_t i = 0; i < p->steps && !found; i++) found = wrong_step(p, &p->step[i], written);
  for (int64_t i = 0; i < p->states && !found; i++)
    if (!reaches(p, p->state[i].value, p->state[i].first, p->state[i].width)) found = "a state has no next one";
  for (int64_t i = 0; i < p->values && !found; i++)
    if (p->value[i].kind == RESULT && written[i] < p->value[i].width) found = "a result is not written";
  return found;
}

/* As many things of `size` integers as there are; they begin at `out`. */
static int64_t read_all(Attributes *from, const char *name, void *out, size_t size, size_t most) {
  const size_t count = attribute_some_ints(from, name, out, size * most);
  if (count % size) attributes_fail(from, "Recurrence: a program is cut off");
  return (int64_t)(count / size);
}

static void read(Attributes *from, void *settings) {
  Program *p = settings;
  int64_t numbers[FIELDS * STEPS];
  p->columns = attribute_int(from, "columns");
  p->values = read_all(from, "values", p->value, 4, VALUES);
  p->states = read_all(from, "states", p->state, 4, STATES);
  p->matrices = read_all(from, "matrices", p->matrix, 4, MATRICES);
  p->steps = read_all(from, "steps", numbers, FIELDS, STEPS);
  for (int64_t i = 0; i < p->steps && !from->failed; i++) {
    const int64_t *n = numbers + FIELDS * i;
    p->step[i] = (Step){n[0], n[1], {n[2], n[4], n[6], n[8]}, {n[3], n[5], n[7], n[9]}};
  }
  const char *why = from->failed ? NULL : wrong(p);
  if (why) attributes_fail(from, why);
}

/* --- runs --------------------------------------------------------------------------------------------------------- */

typedef struct {
  const Program *program;
  Call *call;
  int64_t times, rows, block, pieces, room; /* block: rows that go together; room: numbers that a piece has */
  const float *operand[OPERANDS];
  float *result[RESULTS];
  float *packed[MATRICES], *rooms, *constants;
  int64_t constant[VALUES], own[STATES]; /* where constants are, and a state in a room, in columns */
  int alone;
} Job;

/* Rows in memory; those of a constant are all one. */
typedef struct {
  float *at;
  int64_t pitch;
} Rows;

static int64_t panels_of(const Matrix *m) { return quotient(m->columns, COLUMNS); }

/* Some panels of a matrix, from `from` to `to`. */
typedef struct {
  const Matrix *matrix;
  const float *from;
  float *to;
} Packing;

static void pack(void *data, int64_t from, int64_t to) {
  const Packing *j = data;
  const Matrix *m = j->matrix;
  const int64_t down = m->turned ? 1 : m->columns, along = m->turned ? m->depth : 1;
  const int64_t columns = least(to * COLUMNS, m->columns) - from * COLUMNS;
  pack_panels(j->from + from * COLUMNS * along, down, along, m->depth, columns, COLUMNS, j->to + from * m->depth * COLUMNS);
}

/* Columns of a product, by panels. */
static void multiply(void *data, int64_t from, int64_t to) {
  Product job = *(const Product *)data;
  job.columns = least(to * COLUMNS, job.columns) - from * COLUMNS;
  job.b += from * job.panel;
  job.add = job.add ? job.add + from * COLUMNS : NULL;
  job.c += from * COLUMNS;
  gemm(&job);
}

/* The rows of a value from `row` on, from a column on, at a time. */
static Rows rows_of(const Job *j, float *room, int64_t at, int64_t first, int64_t time, int64_t row) {
  const Value *v = &j->program->value[at];
  const int64_t slice = v->backwards ? j->times - 1 - time : time;
  float *from = NULL;
  int64_t pitch = v->width;
  switch (v->kind) {
    case REGISTER: from = room + v->place * j->block; break;
    case STATE: from = room + j->own[v->place] * j->block; break;
    case SCANNED: from = (float *)j->operand[v->place] + (slice * j->rows + row) * v->width; break;
    case FIXED: from = (float *)j->operand[v->place] + row * v->width; break;
    case SHARED: from = (float *)j->operand[v->place], pitch = 0; break;
    case CONSTANT: return (Rows){j->constants + j->constant[at], 0};
    default: from = j->result[v->place] + (slice * j->rows + row) * v->width;
  }
  return (Rows){from + first, pitch};
}

static void do_step(const Job *j, const Step *s, float *room, int64_t time, int64_t row, int64_t count) {
  const Program *p = j->program;
  const Rows to = rows_of(j, room, s->at[0], s->first[0], time, row);
  Rows x[3] = {{0}, {0}, {0}};
  const int operands = s->code < PRODUCT ? elementwise_operations[s->code].operands : s->code == PRODUCT ? 2 : 1;
  int dense = to.pitch == s->width;
  for (int k = 0; k < operands; k++) {
    if (s->code == PRODUCT && s->at[k + 1] < 0) continue;
    x[k] = rows_of(j, room, s->at[k + 1], s->first[k + 1], time, row);
    dense &= x[k].pitch == s->width || p->value[s->at[k + 1]].kind == CONSTANT;
  }
  if (s->code == PRODUCT) {
    const Matrix *m = &p->matrix[s->at[3]];
    Product job = {.a = x[0].at, .b = j->packed[s->at[3]], .add = x[1].at, .c = to.at, .rows = count,
                   .columns = m->columns, .count = {1, 1, m->depth}, .a_step = {0, 0, 1}, .b_step = {0, 0, COLUMNS},
                   .down = x[0].pitch, .panel = m->depth * COLUMNS, .add_pitch = x[1].pitch, .c_pitch = to.pitch};
    if (j->alone && m->depth * m->columns >= LARGE)
      parallel_ranges(j->call, panels_of(m), 2, multiply, &job);
    else
      gemm(&job);
  } else if (s->code == SPREAD) {
    for (int64_t r = 0; r < count; r++)
      for (int64_t c = 0; c < s->width; c++) to.at[r * to.pitch + c] = x[0].at[r * x[0].pitch];
  } else if (s->code == COPY) {
    for (int64_t r = 0; r < count; r++)
      memmove(to.at + r * to.pitch, x[0].at + r * x[0].pitch, (size_t)s->width * sizeof(float));
  } else {
    Loop *loop = elementwise_operations[s->code].loop;
    const int64_t calls = dense ? 1 : count, length = dense ? count * s->width : s->width;
    for (int64_t r = 0; r < calls; r++)
      loop(0, to.at + r * to.pitch, x[0].at + r * x[0].pitch, operands > 1 ? x[1].at + r * x[1].pitch : NULL,
           operands > 2 ? x[2].at + r * x[2].pitch : NULL, length);
  }
}

/* Some blocks of rows through all times. */
static void piece(void *data, size_t i) {
  const Job *j = data;
  const Program *p = j->program;
  float *room = j->rooms + (int64_t)i * j->room;
  memset(room, 0, (size_t)j->room * sizeof(float));
  for (int64_t row = (int64_t)i * j->block; row < j->rows; row += j->pieces * j->block) {
    const int64_t count = least(j->block, j->rows - row);
    for (int64_t k = 0; k < p->states; k++)
      memcpy(room + j->own[k] * j->block, j->operand[p->state[k].operand] + row * p->state[k].width,
             (size_t)(count * p->state[k].width) * sizeof(float));
    for (int64_t time = 0; time < j->times; time++) {
      for (int64_t k = 0; k < p->steps; k++) do_step(j, &p->step[k], room, time, row, count);
      for (int64_t k = 0; k < p->states; k++) {
        const State *s = &p->state[k];
        const Rows next = rows_of(j, room, s->value, s->first, time, row);
        float *to = room + j->own[k] * j->block;
        for (int64_t r = 0; r < count; r++)
          memmove(to + r * s->width, next.at + r * next.pitch, (size_t)s->width * sizeof(float));
      }
    }
    for (int64_t k = 0; k < p->states; k++)
      if (j->result[k])
        memcpy(j->result[k] + row * p->state[k].width, room + j->own[k] * j->block,
               (size_t)(count * p->state[k].width) * sizeof(float));
  }
}

/* Sees that an operand has the dimensions that it must have; those of -1 are told by the first that has them. */
static void expect(Call *call, size_t operand, size_t rank, int64_t **dims) {
  const Shape shape = shape_of(call, operand);
  int fits = shape.rank == rank;
  for (size_t k = 0; k < rank && fits; k++) {
    if (*dims[k] < 0) *dims[k] = shape.dims[k];
    fits = shape.dims[k] == *dims[k];
  }
  if (!fits) fail(call, "Recurrence: operands do not belong together");
}

static void take_operands(Call *call, Job *j) {
  const Program *p = j->program;
  j->times = j->rows = -1;
  for (int64_t i = 0; i < p->states; i++) {
    int64_t width = p->state[i].width;
    expect(call, (size_t)p->state[i].operand, 2, (int64_t *[]){&j->rows, &width});
    j->operand[p->state[i].operand] = input(call, (size_t)p->state[i].operand);
  }
  for (int64_t i = 0; i < p->matrices; i++) {
    int64_t depth = p->matrix[i].depth, columns = p->matrix[i].columns;
    int64_t *dims[] = {&depth, &columns}, *turned[] = {&columns, &depth};
    expect(call, (size_t)p->matrix[i].operand, 2, p->matrix[i].turned ? turned : dims);
    j->operand[p->matrix[i].operand] = input(call, (size_t)p->matrix[i].operand);
  }
  for (int64_t i = 0; i < p->values; i++) {
    const Value *v = &p->value[i];
    int64_t width = v->width;
    if (v->kind == SCANNED) expect(call, (size_t)v->place, 3, (int64_t *[]){&j->times, &j->rows, &width});
    if (v->kind == FIXED) expect(call, (size_t)v->place, 2, (int64_t *[]){&j->rows, &width});
    if (v->kind == SHARED && shape_of(call, (size_t)v->place).count != width)
      fail(call, "Recurrence: operands do not belong together");
    if (v->kind == SCANNED || v->kind == FIXED || v->kind == SHARED) j->operand[v->place] = input(call, (size_t)v->place);
  }
  if (j->times < 0 || j->rows < 0) fail(call, "Recurrence: nothing tells how many steps or rows there are");
}

static void give_results(Call *call, Job *j) {
  const Program *p = j->program;
  Shape shapes[RESULTS];
  for (size_t r = 0; r < RESULTS; r++) shapes[r] = (Shape){.rank = 1, .dims = {0}};
  for (int64_t i = 0; i < p->states; i++) shapes[i] = (Shape){.rank = 2, .dims = {j->rows, p->state[i].width}};
  for (int64_t i = 0; i < p->values; i++)
    if (p->value[i].kind == RESULT)
      shapes[p->value[i].place] = (Shape){.rank = 3, .dims = {j->times, j->rows, p->value[i].width}};
  const size_t given = output_count_of(call);
  for (size_t r = 0; r < given && r < RESULTS && !call->failed; r++) {
    int64_t count = 1;
    for (size_t k = 0; k < shapes[r].rank; k++)
      if (__builtin_mul_overflow(count, shapes[r].dims[k], &count) || count > MOST_NUMBERS) {
        fail(call, "Recurrence: a result is too large");
        return;
      }
    j->result[r] = output(call, r, &shapes[r]);
  }
  for (int64_t i = 0; i < p->values && !call->failed; i++)
    if (p->value[i].kind == RESULT && !j->result[p->value[i].place] && j->times && j->rows)
      fail(call, "Recurrence: a result is missing");
}

static void compute(Call *call, const void *settings) {
  const Program *p = settings;
  Job j = {.program = p, .call = call};
  take_operands(call, &j);
  if (!call->failed) give_results(call, &j);
  if (call->failed || !j.rows) return;

  int64_t weight = 0, widest = 1, constants = 0;
  for (int64_t i = 0; i < p->matrices; i++) weight += panels_of(&p->matrix[i]) * p->matrix[i].depth * COLUMNS;
  for (int64_t i = 0; i < p->steps; i++) widest = p->step[i].width > widest ? p->step[i].width : widest;
  for (int64_t i = 0; i < p->states; i++) widest = p->state[i].width > widest ? p->state[i].width : widest;
  /* Where matrices come from beyond the second cache, more rows at a time. */
  j.block = j.rows <= 4 || j.rows >= 16 ? 8 : 6;
  if (weight > LARGE && j.rows >= 32) j.block = 16;
  j.pieces = least((j.rows + j.block - 1) / j.block, PIECES);
  j.alone = j.pieces == 1;
  j.room = p->columns;
  for (int64_t i = 0; i < p->states; i++) j.own[i] = j.room, j.room += p->state[i].width;
  for (int64_t i = 0; i < p->values; i++)
    if (p->value[i].kind == CONSTANT) j.constant[i] = constants, constants += widest * j.block;
  j.room *= j.block;

  float *packed = scratch(call, weight, sizeof(float));
  j.rooms = scratch(call, j.pieces * j.room, sizeof(float));
  j.constants = scratch(call, constants, sizeof(float));
  if (call->failed) return;
  for (int64_t i = 0; i < p->values; i++)
    for (int64_t k = 0; k < widest * j.block && p->value[i].kind == CONSTANT; k++) {
      const uint32_t bits = (uint32_t)p->value[i].place;
      memcpy(j.constants + j.constant[i] + k, &bits, sizeof bits);
    }
  for (int64_t i = 0; i < p->matrices; i++) {
    const Matrix *m = &p->matrix[i];
    Packing job = {m, j.operand[m->operand], j.packed[i] = packed};
    parallel_ranges(call, panels_of(m), m->depth * COLUMNS < 16384 ? 16384 / (m->depth * COLUMNS) : 1, pack, &job);
    packed += panels_of(m) * m->depth * COLUMNS;
  }
  parallel(call, (size_t)j.pieces, piece, &j);
}

const Kernel recurrence_kernels[] = {
    {.name = "Recurrence", .inputs = "FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF", .outputs = "FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF",
     .settings = sizeof(Program), .read = read, .compute = compute},
    {0},
};
