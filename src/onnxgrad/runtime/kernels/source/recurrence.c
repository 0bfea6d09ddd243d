/* Recurrences: one step after the other of a program on rows, which do not know of each other.
 *
 * A step reads its slices of some operands and the states, makes products with matrices that are the same for all
 * steps and elementwise operations, and gives the next states and slices of results. As no row reads another one, a few
 * rows go through all steps by themselves: what is between operations stays near the processor, threads wait for nothing, and a
 * matrix is laid out for its products once for all steps. */
#include "gemm.h"
#include "program.h"

/* Most pieces of the rows; numbers of a matrix from which on it is large. */
enum { PIECES = 32, LARGE = 1 << 18 };

extern const Kernel recurrence_kernels[];

static void read(Attributes *from, void *settings) {
  const Program *p = settings;
  read_program(from, settings, recurrence_kernels);
  for (int i = 0; i < p->steps && !from->failed; i++) {
    const Step *s = &p->step[i];
    int rows = s->code >= COPY; /* whether an operation reads more than constants */
    for (int k = 1; k <= operands_of(s) && !rows; k++) rows = p->value[s->at[k]].kind != CONSTANT;
    if (!rows || is_sum(s)) attributes_fail(from, "Recurrence: a program has a step that does not depend on rows");
  }
}

typedef struct {
  const Program *program;
  Call *call;
  int64_t times, rows, block, pieces, room; /* block: rows that go together; room: numbers that a piece has */
  const float *operand[OPERANDS];
  float *result[RESULTS];
  float *packed[VALUES]; /* matrices, laid out */
  int64_t own[VALUES];           /* where registers and states are in a room, in columns */
} Job;

/* Rows in memory; those of a constant are all one number. */
typedef struct {
  float *at;
  int64_t pitch;
} Rows;

typedef struct {
  int64_t depth, columns, turned, panels;
} Matrix;

static Matrix matrix_of(const Program *p, const Step *s) {
  return (Matrix){s->first[3], s->width, p->value[s->at[3]].flag != 0, quotient(s->width, COLUMNS)};
}

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
  const int64_t slice = v->flag ? j->times - 1 - time : time;
  float *from = NULL;
  int64_t pitch = v->width;
  switch (v->kind) {
    case REGISTER:
    case STATE: from = room + j->own[at] * j->block; break;
    case SCANNED: from = (float *)j->operand[v->place] + (slice * j->rows + row) * v->width; break;
    case FIXED: from = (float *)j->operand[v->place] + row * v->width; break;
    case SHARED: from = (float *)j->operand[v->place], pitch = 0; break;
    case CONSTANT: return (Rows){(float *)&v->place, 0};
    default: from = j->result[v->place] + (slice * j->rows + row) * v->width;
  }
  return (Rows){from + first, pitch};
}

static void do_step(const Job *j, const Step *s, float *room, int64_t time, int64_t row, int64_t count) {
  const Program *p = j->program;
  const Rows to = rows_of(j, room, s->at[0], s->first[0], time, row);
  Rows x[3] = {to, to, to};
  const int operands = operands_of(s);
  int dense = to.pitch == s->width, single = 0;
  for (int k = 0; k < operands; k++) {
    if (s->at[k + 1] < 0) continue;
    x[k] = rows_of(j, room, s->at[k + 1], s->first[k + 1], time, row);
    if (p->value[s->at[k + 1]].kind == CONSTANT)
      single |= 1 << k;
    else
      dense &= x[k].pitch == s->width;
  }
  if (s->code == PRODUCT) {
    const Matrix m = matrix_of(p, s);
    Product job = {.a = x[0].at, .b = j->packed[s->at[3]], .add = s->at[2] < 0 ? NULL : x[1].at, .c = to.at, .rows = count,
                   .columns = m.columns, .count = {1, 1, m.depth}, .a_step = {0, 0, 1}, .b_step = {0, 0, COLUMNS},
                   .down = x[0].pitch, .panel = m.depth * COLUMNS, .add_pitch = x[1].pitch, .c_pitch = to.pitch};
    if (j->pieces == 1 && m.depth * m.columns >= LARGE)
      parallel_ranges(j->call, m.panels, 2, multiply, &job);
    else
      gemm(&job);
  } else if (s->code == COPY && (single || (p->value[s->at[1]].width == 1 && s->width > 1))) {
    for (int64_t r = 0; r < count; r++)
      for (int64_t c = 0; c < s->width; c++) memcpy(to.at + r * to.pitch + c, x[0].at + r * x[0].pitch, sizeof(float));
  } else {
    const int64_t calls = dense ? 1 : count, length = dense ? count * s->width : s->width;
    for (int64_t r = 0; r < calls; r++)
      if (s->code == COPY)
        memmove(to.at + r * to.pitch, x[0].at + r * x[0].pitch, (size_t)length * sizeof(float));
      else
        elementwise_operations[s->code].loop(single, to.at + r * to.pitch, x[0].at + r * x[0].pitch,
                                             x[1].at + r * x[1].pitch, x[2].at + r * x[2].pitch, length);
  }
}

static void piece(void *data, int64_t i, float *room) {
  const Job *j = data;
  const Program *p = j->program;
  memset(room, 0, (size_t)j->room * sizeof(float));
  for (int64_t row = i * j->block; row < j->rows; row += j->pieces * j->block) {
    const int64_t count = least(j->block, j->rows - row);
    for (int k = 0; k < p->values; k++)
      if (p->value[k].kind == STATE)
        memcpy(room + j->own[k] * j->block, j->operand[p->value[k].place] + row * p->value[k].width,
               (size_t)(count * p->value[k].width) * sizeof(float));
    for (int64_t time = 0; time < j->times; time++)
      for (int k = 0; k < p->steps; k++) do_step(j, &p->step[k], room, time, row, count);
    for (int k = 0; k < p->values; k++)
      if (p->value[k].kind == STATE && j->result[p->value[k].place])
        memcpy(j->result[p->value[k].place] + row * p->value[k].width, room + j->own[k] * j->block,
               (size_t)(count * p->value[k].width) * sizeof(float));
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
  for (int i = 0; i < p->values; i++) {
    const Value *v = &p->value[i];
    int64_t width = v->width;
    if (v->kind == SCANNED) expect(call, (size_t)v->place, 3, (int64_t *[]){&j->times, &j->rows, &width});
    if (v->kind == FIXED || v->kind == STATE) expect(call, (size_t)v->place, 2, (int64_t *[]){&j->rows, &width});
    if (v->kind == SHARED && shape_of(call, (size_t)v->place).count != width)
      fail(call, "Recurrence: operands do not belong together");
    if (v->kind != REGISTER && v->kind != CONSTANT && v->kind != RESULT) j->operand[v->place] = input(call, (size_t)v->place);
  }
  for (int i = 0; i < p->steps; i++) {
    if (p->step[i].code != PRODUCT) continue;
    Matrix m = matrix_of(p, &p->step[i]);
    int64_t *dims[] = {&m.depth, &m.columns}, *turned[] = {&m.columns, &m.depth};
    expect(call, (size_t)p->value[p->step[i].at[3]].place, 2, m.turned ? turned : dims);
  }
  if (j->times < 0 || j->rows < 0) fail(call, "Recurrence: nothing tells how many steps or rows there are");
}

static void give_results(Call *call, Job *j) {
  const Program *p = j->program;
  Shape shapes[RESULTS];
  for (size_t r = 0; r < RESULTS; r++) shapes[r] = (Shape){.rank = 1, .dims = {0}};
  for (int i = 0; i < p->values; i++) {
    const Value *v = &p->value[i];
    if (v->kind == STATE) shapes[v->place] = (Shape){.rank = 2, .dims = {j->rows, v->width}};
    if (v->kind == RESULT) shapes[v->place] = (Shape){.rank = 3, .dims = {j->times, j->rows, v->width}};
  }
  const size_t given = output_count_of(call);
  for (size_t r = 0; r < given && r < RESULTS; r++) j->result[r] = output(call, r, &shapes[r]);
  for (int i = 0; i < p->values && !call->failed; i++)
    if (p->value[i].kind == RESULT && !j->result[p->value[i].place] && j->times && j->rows)
      fail(call, "Recurrence: a result is missing");
}

static void compute(Call *call, const void *settings) {
  const Program *p = settings;
  Job j = {.program = p, .call = call};
  take_operands(call, &j);
  if (!call->failed) give_results(call, &j);
  if (call->failed || !j.rows) return;
  int64_t weight = 0; /* of a matrix that is multiplied twice, twice */
  for (int i = 0; i < p->steps; i++)
    if (p->step[i].code == PRODUCT) weight += matrix_of(p, &p->step[i]).panels * p->step[i].first[3] * COLUMNS;
  /* Where matrices come from beyond the second cache, more rows at a time. */
  j.block = j.rows <= 4 || j.rows >= 16 ? 8 : 6;
  if (weight > LARGE && j.rows >= 32) j.block = 16;
  j.pieces = least((j.rows + j.block - 1) / j.block, PIECES);
  j.room = p->columns;
  for (int i = 0; i < p->values; i++) {
    j.own[i] = p->value[i].kind == STATE ? j.room : p->value[i].place;
    if (p->value[i].kind == STATE) j.room += p->value[i].width;
  }
  j.room *= j.block;
  float *packed = scratch(call, weight, sizeof(float));
  for (int i = 0; i < p->steps && !call->failed; i++) {
    const Step *s = &p->step[i];
    if (s->code != PRODUCT || j.packed[s->at[3]]) continue;
    const Matrix m = matrix_of(p, s);
    pack_matrix(call, j.operand[p->value[s->at[3]].place], m.depth, m.columns, m.turned, packed);
    j.packed[s->at[3]] = packed;
    packed += m.panels * m.depth * COLUMNS;
  }
  parallel_spaces(call, j.pieces, j.room, piece, &j);
}

const Kernel recurrence_kernels[] = {
    {.name = "Recurrence", .inputs = "FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF", .outputs = "FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF",
     .settings = sizeof(Program), .read = read, .compute = compute},
    {0}};
