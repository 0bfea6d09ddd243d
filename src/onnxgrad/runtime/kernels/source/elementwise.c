/* Programs of elementwise operators, run over tiles that stay in the cache: one pass over memory.
 *
 * Registers hold the elements of a tile, or, of what is the same for all of them, one. An operand of the full shape is
 * read where it lies, and a result is written where it belongs. Where the last axis is long, no tile goes beyond its
 * end: then an operand lies there in a row, or is one number. Elsewhere what is broadcast is spread into a register,
 * once if it is the same for each tile.
 *
 * Shapes are those of the run: the shape of a result is what its operands broadcast to, or that without the axes over
 * which it is a sum. Where results are of different shapes, the program runs once for each, with the steps that lead to
 * it. `elementwise_double.c` is this file for doubles.
 *
 * The first result may take the memory of the first operand, where no step reads that after it is written. */
#include "operations.h"
#include "reductions.h"

/* Numbers of all registers, and of a register; the shortest rows that tiles are cut from; operands and results. */
enum { ROOM = 32768 / sizeof(real), TILE = 4096 / sizeof(real), ROW = TILE / 4, GIVEN = 28, MADE = 16, APART = 8192 };
_Static_assert(ROOM >= VALUES * LANES, "each value has room for a vector");

extern const Kernel elementwise_kernels[];
static int is_bool(const char *letters, int index) { return (letters[index] | 32) == 'b'; }

typedef struct {
  uint32_t needs[MADE]; /* operands that lead to a result, as bits, and bit 31; 0 for one that is not there */
  int sums[MADE];       /* the steps of those that are sums, or -1 */
  Program program;
} Settings;

static void read(Attributes *from, void *settings) {
  Settings *s = settings;
  const Program *p = &s->program;
  const uint32_t is_there = (uint32_t)1 << 31;
  uint32_t needs[VALUES] = {0}, all = 0; /* the same, of values */
  const char *wrong = NULL;
  read_program(from, &s->program, elementwise_kernels);
  for (int r = 0; r < MADE; r++) s->sums[r] = -1;
  for (int i = 0; i < p->values && !from->failed; i++) {
    const Value *v = &p->value[i];
    if (v->kind > RESULT || v->width != 1) wrong = "a program of elements has rows of more";
    if (v->kind == FIXED) needs[i] = is_there | (uint32_t)1 << v->place;
    if (v->kind == CONSTANT) needs[i] = is_there;
  }
  for (int i = 0; i < p->steps && !wrong && !from->failed; i++) {
    const Step *step = &p->step[i];
    const Value *to = &p->value[step->at[0]];
    uint32_t of = is_there;
    if (step->code == PRODUCT) wrong = "a program of elements has a product";
    for (int k = 1; k <= operands_of(step) && !wrong; k++) {
      const Value *v = &p->value[step->at[k]];
      if (!needs[step->at[k]] || (v->kind == RESULT && s->sums[v->place] >= 0)) wrong = "a program reads an empty register";
      of |= needs[step->at[k]];
    }
    if (is_sum(step)) {
      if (!within(step->at[2], 1 << AXES) || !within(step->at[3], WHAT_BECOMES)) wrong = "a program sums over unknown axes";
      if (to->kind != RESULT || elementwise_kernels->outputs[to->place] != *elementwise_kernels->outputs) wrong = "a program has sums that are no floats";
      if (!wrong) s->sums[to->place] = i;
    }
    needs[step->at[0]] = of;
    if (to->kind == RESULT && !wrong) s->needs[to->place] = all = of;
  }
  if (!all && !wrong) wrong = "a program stores nothing";
  if (wrong) attributes_fail(from, wrong);
}

typedef struct {
  const Settings *settings;
  const Program *program;
  Source sources[GIVEN];
  char *results[MADE]; /* NULL for one that nobody reads, or that is of another shape */
  char wanted[VALUES], live[STEPS];
  char single[STEPS], one[VALUES], gives_one[STEPS]; /* which of what a step reads, as bits, and what is one number */
  int places[VALUES]; /* in the room of a tile, of values that hold as much; -1 for none */
  Axes axes;
  int64_t count, tile, row; /* what no tile goes beyond a multiple of, or 0 */
  Sum sums[MADE];
  Pieces pieces;
} Job;

/* Puts a result where it belongs, if it is not there already. */
static void store(int letter_is_bool, char *result, const natural *value, int single, int64_t start, int64_t count) {
  if (letter_is_bool)
    for (int64_t k = 0; k < count; k++) result[start + k] = (char)(value[single ? 0 : k] & 1);
  else if (single)
    for (int64_t k = 0; k < count; k++) ((natural *)result)[start + k] = *value;
  else if ((natural *)result + start != value)
    memmove((natural *)result + start, value, (size_t)count * sizeof *value);
}

/* Where the result lies that a step writes in place, or NULL. */
static char *place_of(const Job *job, const Value *to) {
  return to->kind == RESULT && !is_bool(elementwise_kernels->outputs, to->place) ? job->results[to->place] : NULL;
}

static void tiles_of(const Job *job, int piece, int64_t from, int64_t end) {
  const Program *program = job->program;
  _Alignas(64) real room[ROOM];
  natural ones[VALUES];
  const void *values[VALUES];
  int64_t at[AXES], count;
  find(&job->axes, from, at);
  for (int64_t start = from; start < end; start += count, advance(&job->axes, at, count)) {
    count = least(job->tile, end - start);
    if (job->row) count = least(count, job->row - at[job->axes.count - 1]);
    for (int i = 0; i < program->values; i++) {
      const Value *v = &program->value[i];
      if (v->kind == CONSTANT) values[i] = &v->place;
      if (v->kind != FIXED || !job->wanted[i]) continue;
      const Source *source = &job->sources[v->place];
      natural *own = job->one[i] ? ones + i : (natural *)(room + job->places[i] * job->tile);
      values[i] = own;
      if (source->direct)
        values[i] = (const natural *)source->data + place_in(&job->axes, source->strides, at).offset;
      else if (job->one[i])
        *own = number_at(source, place_in(&job->axes, source->strides, at).offset);
      else if (!source->periodic || start == from)
        spread(&job->axes, source, own, at, source->periodic ? least(job->tile, job->count) : count);
    }
    for (int i = 0; i < program->steps; i++) {
      const Step *step = &program->step[i];
      if (!job->live[i]) continue;
      const int32_t to = step->at[0], one = job->gives_one[i], operands = operands_of(step);
      const Value *v = &program->value[to];
      const void *x = values[step->at[1]];
      if (is_sum(step)) {
        add_up(&job->axes, &job->sums[v->place], piece, job->single[i], x, at, count);
        continue;
      }
      char *result = place_of(job, v);
      if (step->code == COPY) {
        values[to] = x;
      } else {
        void *own = one ? (void *)(ones + to) : result ? (void *)((natural *)result + start) : room + job->places[to] * job->tile;
        elementwise_operations[step->code].loop(one ? 0 : job->single[i], own, x,
                                                operands > 1 ? values[step->at[2]] : NULL,
                                                operands > 2 ? values[step->at[3]] : NULL, one ? 1 : count);
        values[to] = own;
      }
      if (v->kind == RESULT && job->results[v->place]) store(!result, job->results[v->place], values[to], one, start, count);
    }
  }
}

static void tiles(void *data, int64_t from, int64_t to) { tiles_of(data, 0, from, to); }

static void piece_of(void *data, size_t index) {
  const Job *job = data;
  const Pieces *all = &job->pieces;
  const int piece = (int)index;
  for (int r = 0; r < MADE; r++) {
    const Sum *sum = &job->sums[r];
    if (sum->out) memset(sum->sums + sum->start[piece], 0, (size_t)(sum->end[piece] - sum->first[piece]) * sizeof(double));
  }
  for (int64_t slice = 0; slice < all->slices; slice++)
    tiles_of(job, piece, slice * all->size + all->from[piece], slice * all->size + all->from[piece + 1]);
}

static Shape shape_of_result(Call *call, const Shape *shapes, uint32_t needs) {
  Shape shape = {.rank = 0, .count = 1};
  for (int i = 0; i < GIVEN; i++)
    if (needs >> i & 1 && !broadcast(&shape, &shapes[i])) fail(call, "Elementwise: operands do not broadcast");
  count_numbers(call, &shape);
  return shape;
}

/* The steps that lead to results which are there; the operands that they read, as bits. */
static uint32_t live_steps(Job *job) {
  const Program *p = job->program;
  uint32_t loaded = 0;
  memset(job->wanted, 0, sizeof job->wanted);
  for (int i = p->steps; i-- > 0;) {
    const Step *step = &p->step[i];
    const Value *to = &p->value[step->at[0]];
    job->live[i] = job->wanted[step->at[0]] || (to->kind == RESULT && (job->results[to->place] || job->sums[to->place].out));
    job->wanted[step->at[0]] = 0;
    for (int k = 1; job->live[i] && k <= operands_of(step); k++) {
      job->wanted[step->at[k]] = 1;
      if (p->value[step->at[k]].kind == FIXED) loaded |= (uint32_t)1 << p->value[step->at[k]].place;
    }
  }
  return loaded;
}

/* The axes of `shape` as few as the operands and sums allow: those that all of them go through as one are one. */
static void fold(Job *job, const Shape *shape, const Shape *shapes, uint32_t loaded) {
  Axes *axes = &job->axes;
  int64_t *strides[GIVEN + MADE]; /* of operands, and of sums */
  const Shape *of[GIVEN + MADE];
  Shape kept[MADE]; /* the shapes of sums, with 1 where an axis is gone */
  size_t many = 0;
  for (int i = 0; i < GIVEN; i++)
    if (loaded >> i & 1) strides[many] = job->sources[i].strides, of[many++] = &shapes[i];
  for (int r = 0; r < MADE; r++) {
    if (!job->sums[r].out) continue;
    kept[r] = without_axes(shape, job->program->step[job->settings->sums[r]].at[2], STAY);
    strides[many] = job->sums[r].strides, of[many++] = &kept[r];
  }
  axes->count = 1, axes->dims[0] = 1;
  for (size_t i = 0; i < many; i++) strides[i][0] = 0;
  for (size_t axis = 0; axis < shape->rank; axis++) {
    if (shape->dims[axis] == 1) continue;
    const size_t k = axes->count;
    axes->dims[k] = shape->dims[axis];
    int one = 1;
    for (size_t i = 0; i < many; i++) {
      int64_t stride = 1;
      const size_t missing = shape->rank - of[i]->rank;
      for (size_t q = axis + 1; q < shape->rank; q++) stride *= q < missing ? 1 : of[i]->dims[q - missing];
      strides[i][k] = axis < missing || of[i]->dims[axis - missing] == 1 ? 0 : stride;
      one = one && strides[i][k - 1] == strides[i][k] * axes->dims[k];
    }
    axes->count += !one && axes->dims[k - 1] > 1;
    if (axes->count > k) continue;
    axes->dims[k - 1] *= axes->dims[k];
    for (size_t i = 0; i < many; i++) strides[i][k - 1] = strides[i][k];
  }
}

/* What is one number for all of a tile, and where values that hold more are; how many of these there are. */
static int place_values(Job *job) {
  const Program *p = job->program;
  int most = 0;
  for (int i = 0; i < p->values; i++) {
    const Value *v = &p->value[i];
    job->one[i] = v->kind == CONSTANT, job->places[i] = -1;
    if (v->kind != FIXED || !job->wanted[i]) continue;
    const Source *source = &job->sources[v->place];
    job->one[i] = !source->strides[job->axes.count - 1];
    for (size_t k = 0; !job->row && k < job->axes.count; k++) job->one[i] &= !source->strides[k];
    if (!job->one[i] && !source->direct) job->places[i] = most++;
  }
  for (int i = 0; i < p->steps; i++) {
    const Step *step = &p->step[i];
    if (!job->live[i]) continue;
    const int operands = operands_of(step), to = step->at[0];
    job->single[i] = 0;
    for (int k = 0; k < operands; k++) job->single[i] |= (char)(job->one[step->at[k + 1]] << k);
    job->one[to] = job->gives_one[i] = job->single[i] == (1 << operands) - 1;
    if (!job->one[to] && job->places[to] < 0 && step->code < COPY && !place_of(job, &p->value[to])) job->places[to] = most++;
  }
  return most;
}

/* How long a tile is: what the registers have room for, in equal parts of a row that is long, or in whole runs of the
 * last axes where these fit. How long those runs are. */
static int64_t cut(Job *job, uint32_t loaded) {
  const Axes *axes = &job->axes;
  job->row = axes->count > 1 && axes->dims[axes->count - 1] >= ROW ? axes->dims[axes->count - 1] : 0;
  for (int i = 0; i < GIVEN; i++) {
    if (!(loaded >> i & 1)) continue;
    Source *source = &job->sources[i];
    int64_t expected = 1;
    source->direct = 1;
    for (size_t k = axes->count; k-- > 0; expected *= axes->dims[k])
      source->direct &= source->strides[k] == expected || axes->dims[k] == 1;
    if (job->row) source->direct = 1; /* in a row, or one number */
    source->direct &= source->bytes > 1;
  }
  const int places = place_values(job);
  const int64_t longest = most(least(ROOM * 3 / 4 / (places > 4 ? places : 4), TILE) / LANES, 1) * LANES;
  int64_t runs = 1;
  size_t first = axes->count; /* the axes from here on are gone through within a tile */
  while (!job->row && first > 0 && runs * axes->dims[first - 1] <= longest) runs *= axes->dims[--first];
  job->tile = first ? longest / runs * runs : longest;
  if (job->row) {
    const int64_t parts = (job->row + longest - 1) / longest;
    job->tile = ((job->row + parts - 1) / parts + LANES - 1) / LANES * LANES;
  }
  for (int i = 0; i < GIVEN; i++) {
    if (!(loaded >> i & 1)) continue;
    Source *source = &job->sources[i];
    source->periodic = !job->row;
    for (size_t k = 0; k < first; k++) source->periodic &= source->strides[k] == 0;
  }
  return runs;
}

/* Goes through all numbers of a shape, for the results that `job` has. */
static void run(Call *call, Job *job, const Shape *shape, const Shape *shapes) {
  const uint32_t loaded = live_steps(job);
  Sum *sums[MADE];
  size_t many = 0;
  for (int r = 0; r < MADE; r++)
    if (job->sums[r].out) sums[many++] = &job->sums[r];
  job->count = shape->count;
  if (!job->count) { /* sums of nothing */
    for (size_t s = 0; s < many; s++)
      for (int64_t i = 0; i < sums[s]->count; i++) sums[s]->out[i] = (real)(0 / sums[s]->divisor);
    return;
  }
  fold(job, shape, shapes, loaded);
  const int64_t runs = cut(job, loaded);
  if (!many) {
    const int64_t unit = (APART + job->tile - 1) / job->tile * job->tile;
    parallel_ranges(call, job->count, unit, tiles, job);
    return;
  }
  double *room = scratch(call, cut_pieces(&job->pieces, &job->axes, runs, sums, many), sizeof *room);
  if (call->failed) return;
  for (size_t s = 0; s < many; s++) sums[s]->sums = room;
  parallel(call, (size_t)job->pieces.count, piece_of, job);
  for (size_t s = 0; s < many; s++) {
    Total total = {sums[s], job->pieces.count};
    parallel_ranges(call, sums[s]->count, 4 * RESULTS_TOGETHER, add_pieces, &total);
  }
}

static void compute(Call *call, const void *settings) {
  const Settings *s = settings;
  Shape shapes[GIVEN];
  Job job; /* large: what is read of it is written before */
  job.settings = s, job.program = &s->program;
  uint32_t all = 0;
  for (int r = 0; r < MADE; r++) all |= s->needs[r];
  for (int i = 0; i < GIVEN; i++) {
    if (!(all >> i & 1)) continue;
    job.sources[i].data = input(call, (size_t)i);
    job.sources[i].bytes = is_bool(elementwise_kernels->inputs, i) ? 1 : sizeof(real);
    shapes[i] = shape_of(call, (size_t)i);
    if (!call->failed && !job.sources[i].data && (shapes[i].count || !shapes[i].rank))
      fail(call, "Elementwise: an operand of the program is missing");
    if (shapes[i].rank > AXES) fail(call, "Elementwise: an operand has more than eight axes");
    if (call->failed) return;
  }
  char *results[MADE] = {0};
  Shape of[MADE]; /* what is gone through */
  Sum sums[MADE];
  const size_t given = output_count_of(call);
  for (size_t r = 0; r < given && r < MADE && !call->failed; r++) {
    of[r].rank = 1, of[r].count = of[r].dims[0] = 0; /* of one that no step stores */
    sums[r].out = NULL;
    if (s->needs[r]) of[r] = shape_of_result(call, shapes, s->needs[r]);
    if (s->sums[r] < 0) {
      results[r] = output(call, r, &of[r]);
      if (!of[r].count) results[r] = NULL;
      continue;
    }
    const Step *step = &s->program.step[s->sums[r]];
    if (step->at[2] >> of[r].rank) fail(call, "Elementwise: a sum is over more axes than there are");
    Shape shape = without_axes(&of[r], step->at[2], step->at[3]);
    results[r] = output(call, r, &shape);
    if (call->failed || !shape.count) results[r] = NULL;
    sums[r].out = (real *)results[r];
    sums[r].count = shape.count;
    sums[r].divisor = step->code == MEAN ? (double)of[r].count / (double)shape.count : 1;
  }
  for (size_t r = MADE; r-- > 0 && !call->failed;) { /* the shape of the first one comes last: an operand may lie there */
    if (!results[r] || (r && results[0] && same_shape(&of[r], of))) continue;
    for (size_t q = 0; q < MADE; q++) {
      const int now = results[q] && same_shape(&of[r], &of[q]);
      job.results[q] = now && s->sums[q] < 0 ? results[q] : NULL;
      job.sums[q].out = NULL;
      if (now && s->sums[q] >= 0) job.sums[q] = sums[q];
      if (now) results[q] = NULL;
    }
    run(call, &job, &of[r], shapes);
  }
}

const Kernel elementwise_kernels[] = {
#ifdef DOUBLE
    {.name = "ElementwiseDouble", .inputs = "DDDDDDDDDDDDDDDDDDDDLLLLBBBB", .outputs = "DDDDDDDDDDDDDDBB",
#else
    {.name = "Elementwise", .inputs = "FFFFFFFFFFFFFFFFIIIIUUUUBBBB", .outputs = "FFFFFFFFIIUUUUBB",
#endif
     .settings = sizeof(Settings), .read = read, .compute = compute, .may_replace = 1},
    {0}};
