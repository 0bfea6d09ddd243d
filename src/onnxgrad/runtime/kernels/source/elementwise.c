/* Programs of elementwise operators, run over tiles that stay in the cache: one pass over memory.
 *
 * Registers hold the elements of a tile, or, of what is the same for all of them, one. An operand of the full shape is
 * read where it lies, and a result is written where it belongs. Where the last axis is long, no tile goes beyond its
 * end: then an operand lies there in a row, or is one number. Elsewhere what is broadcast is spread into a register,
 * once if it is the same for each tile.
 *
 * Shapes are those of the run: the shape of a result is what its operands broadcast to, or that without the axes over
 * which it is a sum. Where results are of different shapes, the program runs once for each, with the steps that lead to
 * it.
 */
#include "elementwise_program.h"

/* Floats of all registers, and of a register; the shortest rows that tiles are cut from. */
enum { ROOM = 6144, TILE = 1024, ROW = 256 };

typedef struct {
  const char *data;
  int64_t strides[AXES]; /* in elements, over the axes of the job; 0 along one that is broadcast */
  int direct, periodic;  /* read where it lies; the same for each tile */
  int bytes;             /* of an element: 4, or 1 for bool */
} Source;

typedef struct {
  const Program *program;
  Source sources[OPERANDS];
  char *results[RESULTS]; /* NULL for one that nobody reads, or that is of another shape */
  char live[STEPS];
  char single[STEPS], one[STEPS]; /* which of what a step reads, as bits, and whether what it gives is one number */
  int places[REGISTERS];          /* in the room of a tile, of registers that hold as much */
  Axes axes;
  int64_t count, tile, row; /* what no tile goes beyond a multiple of, or 0 */
  Sum sums[RESULTS];
  Pieces pieces;
} Job;

/* Rows of `width` numbers that lie `stride` apart, or of one number each. */
static void spread_short_rows(natural *to, const natural *from, int64_t stride, int single, int64_t rows, int64_t width) {
  if (single) {
    for (int64_t r = 0; r < rows; r++)
      for (int64_t i = 0; i < width; i++) to[r * width + i] = from[r * stride];
  } else if (stride) {
    for (int64_t r = 0; r < rows; r++)
      for (int64_t i = 0; i < width; i++) to[r * width + i] = from[r * stride + i];
  } else { /* the same row: what is there already, once more */
    memcpy(to, from, (size_t)width * 4);
    for (int64_t there = 1; there < rows; there *= 2)
      memcpy(to + there * width, to, (size_t)(least(there, rows - there) * width) * 4);
  }
}

/* `count` elements of a broadcast operand from the place `at` on, 4 bytes each. */
static void spread(const Job *job, const Source *source, natural *to, const int64_t *at, int64_t count) {
  const size_t last = job->axes.count - 1;
  Place place = place_in(&job->axes, source->strides, at);
  while (count > 0) {
    const char *from = source->data + place.offset * source->bytes;
    const int64_t rows = source->bytes == 1 ? 0 : short_rows(&place, &job->axes, count), width = job->axes.dims[last];
    if (rows) {
      spread_short_rows(to, (const natural *)from, source->strides[last - 1], !source->strides[last], rows, width);
      to += rows * width, count -= rows * width;
      next_rows(&place, &job->axes, source->strides, rows);
      continue;
    }
    const int64_t run = least(count, width - place.at[last]);
    if (source->bytes == 1)
      for (int64_t i = 0; i < run; i++) to[i] = from[source->strides[last] ? i : 0] ? UINT32_MAX : 0;
    else if (source->strides[last])
      memcpy(to, from, (size_t)run * 4);
    else
      for (int64_t i = 0; i < run; i++) to[i] = *(const natural *)from;
    to += run, count -= run;
    next_row(&place, &job->axes, source->strides);
  }
}

/* Puts a result where it belongs, if it is not there already. */
static void store(int letter_is_bool, char *result, const natural *value, int single, int64_t start, int64_t count) {
  if (letter_is_bool)
    for (int64_t k = 0; k < count; k++) result[start + k] = (char)(value[single ? 0 : k] & 1);
  else if (single)
    for (int64_t k = 0; k < count; k++) ((natural *)result)[start + k] = *value;
  else if (result + start * 4 != (const char *)value)
    memmove(result + start * 4, value, (size_t)count * 4);
}

static void tiles_of(const Job *job, int piece, int64_t from, int64_t to) {
  const Program *program = job->program;
  _Alignas(64) float room[ROOM];
  natural ones[REGISTERS];
  const void *values[REGISTERS] = {0};
  int64_t at[AXES], count;
  find(&job->axes, from, at);
  for (int64_t start = from; start < to; start += count, advance(&job->axes, at, count)) {
    count = least(job->tile, to - start);
    if (job->row) count = least(count, job->row - at[job->axes.count - 1]);
    for (int i = 0; i < program->count; i++) {
      const Step *step = &program->steps[i];
      if (!job->live[i]) continue;
      const void *value = values[step->from[0]];
      void *own = is_result(step->code) ? NULL
                  : job->one[i]         ? (void *)(ones + step->to)
                                        : room + job->places[step->to] * job->tile;
      if (is_operation(step)) {
        char *result = step->direct < 0 || job->one[i] ? NULL : job->results[step->direct];
        void *target = result ? (void *)(result + start * 4) : own;
        const int operands = elementwise_operations[step->code].operands;
        elementwise_operations[step->code].loop(job->one[i] ? 0 : job->single[i], target, value,
                                    operands > 1 ? values[step->from[1]] : NULL,
                                    operands > 2 ? values[step->from[2]] : NULL, job->one[i] ? 1 : count);
        values[step->to] = target;
      } else if (is_sum(step->code)) {
        add_up(&job->axes, &job->sums[step->to], piece, job->single[i], value, at, count);
      } else if (step->code == STORE) {
        store(is_bool(elementwise_kernels->outputs, step->to), job->results[step->to], value, job->single[i], start, count);
      } else if (step->code == CONSTANT) {
        values[step->to] = &step->bits;
      } else {
        const Source *source = &job->sources[step->from[0]];
        values[step->to] = own;
        if (source->direct)
          values[step->to] = source->data + 4 * place_in(&job->axes, source->strides, at).offset;
        else if (job->one[i])
          spread(job, source, own, at, 1);
        else if (!source->periodic || !step->kept || start == from)
          spread(job, source, own, at, source->periodic ? least(job->tile, job->count) : count);
      }
    }
  }
}

static void tiles(void *data, int64_t from, int64_t to) { tiles_of(data, 0, from, to); }

/* One of the pieces that have sums. */
static void piece_of(void *data, size_t index) {
  const Job *job = data;
  const Pieces *all = &job->pieces;
  const int piece = (int)index;
  for (int r = 0; r < RESULTS; r++) {
    const Sum *sum = &job->sums[r];
    if (sum->out) memset(sum->sums + sum->start[piece], 0, (size_t)(sum->end[piece] - sum->first[piece]) * sizeof(double));
  }
  for (int64_t slice = 0; slice < all->slices; slice++)
    tiles_of(job, piece, slice * all->size + all->from[piece], slice * all->size + all->from[piece + 1]);
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

/* `shape` without the axes of a sum. */
static Shape shape_of_sum(Call *call, const Shape *shape, const Step *sum) {
  Shape found = {.rank = 0, .count = 1};
  if (sum->from[1] >> shape->rank) fail(call, "Elementwise: a sum is over more axes than there are");
  for (size_t k = 0; k < shape->rank; k++) {
    const int gone = sum->from[1] >> (shape->rank - 1 - k) & 1;
    if (!gone || sum->from[2] == STAY) found.dims[found.rank++] = gone ? 1 : shape->dims[k];
    if (!gone) found.count *= shape->dims[k];
  }
  if (sum->from[2] == FLAT) found = (Shape){.rank = 1, .dims = {found.count}, .count = found.count};
  return found;
}

/* The steps that lead to results which are there; the operands that they read, as bits. */
static uint32_t live_steps(Job *job) {
  char wanted[REGISTERS] = {0};
  uint32_t loaded = 0;
  for (int i = job->program->count; i-- > 0;) {
    const Step *step = &job->program->steps[i];
    if (is_result(step->code)) {
      if ((job->live[i] = job->results[step->to] != NULL)) wanted[step->from[0]] = 1;
      continue;
    }
    job->live[i] = wanted[step->to];
    wanted[step->to] = 0;
    if (!job->live[i]) continue;
    if (step->code == LOAD) loaded |= (uint32_t)1 << step->from[0];
    for (int k = 0; is_operation(step) && k < elementwise_operations[step->code].operands; k++) wanted[step->from[k]] = 1;
  }
  return loaded;
}

/* The axes of `shape` as few as the operands and sums allow: those that all of them go through as one are one. */
static void fold(Job *job, const Shape *shape, const Shape *shapes, uint32_t loaded) {
  Axes *axes = &job->axes;
  int64_t *strides[OPERANDS + RESULTS]; /* of operands, and of sums */
  const Shape *of[OPERANDS];
  size_t operands = 0, many;
  for (int i = 0; i < OPERANDS; i++)
    if (loaded >> i & 1) strides[operands] = job->sources[i].strides, of[operands++] = &shapes[i];
  many = operands;
  for (int r = 0; r < RESULTS; r++)
    if (job->sums[r].out) strides[many++] = job->sums[r].strides;
  axes->count = 0;
  for (size_t axis = 0; axis < shape->rank; axis++) {
    if (shape->dims[axis] == 1) continue;
    const size_t k = axes->count++;
    axes->dims[k] = shape->dims[axis];
    for (size_t i = 0; i < operands; i++) {
      int64_t stride = 1;
      const size_t missing = shape->rank - of[i]->rank;
      for (size_t q = axis + 1; q < shape->rank; q++) stride *= q < missing ? 1 : of[i]->dims[q - missing];
      strides[i][k] = axis < missing || of[i]->dims[axis - missing] == 1 ? 0 : stride;
    }
    for (int r = 0; r < RESULTS; r++) {
      if (!job->sums[r].out) continue;
      const int32_t gone = job->program->steps[job->program->sums[r]].from[1];
      int64_t stride = 1;
      for (size_t q = axis + 1; q < shape->rank; q++)
        if (!(gone >> (shape->rank - 1 - q) & 1)) stride *= shape->dims[q];
      job->sums[r].strides[k] = gone >> (shape->rank - 1 - axis) & 1 ? 0 : stride;
    }
    int one = k > 0;
    for (size_t i = 0; i < many && one; i++) one = strides[i][k - 1] == strides[i][k] * axes->dims[k];
    if (!one) continue;
    axes->count--;
    axes->dims[k - 1] *= axes->dims[k];
    for (size_t i = 0; i < many; i++) strides[i][k - 1] = strides[i][k];
  }
  if (!axes->count) {
    axes->dims[axes->count++] = 1;
    for (size_t i = 0; i < many; i++) strides[i][0] = 0;
  }
}

/* What is one number for all of a tile, and where registers that hold more are; how many of these there are. */
static int place_registers(Job *job) {
  char one[REGISTERS] = {0}, placed[REGISTERS] = {0};
  int most = 0;
  for (int i = 0; i < job->program->count; i++) {
    const Step *step = &job->program->steps[i];
    if (!job->live[i]) continue;
    const int reads = is_result(step->code) ? 1 : is_operation(step) ? elementwise_operations[step->code].operands : 0;
    job->single[i] = 0;
    for (int k = 0; k < reads; k++) job->single[i] |= (char)(one[step->from[k]] << k);
    if (is_result(step->code)) continue;
    const Source *source = step->code == LOAD ? &job->sources[step->from[0]] : NULL;
    int same = !source || !source->strides[job->axes.count - 1];
    for (size_t k = 0; source && !job->row && k < job->axes.count; k++) same &= !source->strides[k];
    if (is_operation(step)) same = job->single[i] == (1 << reads) - 1;
    one[step->to] = job->one[i] = (char)same;
    if (same || (source && source->direct) || placed[step->to]) continue;
    job->places[step->to] = most++;
    placed[step->to] = 1;
  }
  return most;
}

/* How long a tile is: what the registers have room for, in equal parts of a row that is long, or in whole runs of the
 * last axes where these fit. How long those runs are. */
static int64_t cut(Job *job, uint32_t loaded) {
  const Axes *axes = &job->axes;
  job->row = axes->count > 1 && axes->dims[axes->count - 1] >= ROW ? axes->dims[axes->count - 1] : 0;
  for (int i = 0; i < OPERANDS; i++) {
    if (!(loaded >> i & 1)) continue;
    Source *source = &job->sources[i];
    int64_t expected = 1;
    source->direct = 1;
    for (size_t k = axes->count; k-- > 0; expected *= axes->dims[k])
      source->direct &= source->strides[k] == expected || axes->dims[k] == 1;
    if (job->row) source->direct = 1; /* in a row, or one number */
    source->direct &= source->bytes == 4;
  }
  const int places = place_registers(job);
  const int64_t most = least(ROOM / (places > 4 ? places : 4), TILE) / LANES * LANES;
  int64_t runs = 1;
  size_t first = axes->count; /* the axes from here on are gone through within a tile */
  while (!job->row && first > 0 && runs * axes->dims[first - 1] <= most) runs *= axes->dims[--first];
  job->tile = first ? most / runs * runs : most;
  if (job->row) {
    const int64_t parts = (job->row + most - 1) / most;
    job->tile = ((job->row + parts - 1) / parts + LANES - 1) / LANES * LANES;
  }
  for (int i = 0; i < OPERANDS; i++) {
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
  Sum *sums[RESULTS];
  size_t many = 0;
  for (int r = 0; r < RESULTS; r++)
    if (job->sums[r].out) sums[many++] = &job->sums[r];
  job->count = shape->count;
  if (!job->count) { /* sums of nothing */
    for (size_t s = 0; s < many; s++)
      for (int64_t i = 0; i < sums[s]->count; i++) sums[s]->out[i] = (float)(0 / sums[s]->divisor);
    return;
  }
  fold(job, shape, shapes, loaded);
  const int64_t runs = cut(job, loaded);
  if (!many) {
    const int64_t unit = (8192 + job->tile - 1) / job->tile * job->tile;
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
  Shape of[RESULTS]; /* what is gone through */
  Sum sums[RESULTS] = {{0}};
  const size_t given = output_count_of(call);
  for (size_t r = 0; r < given && r < RESULTS && !call->failed; r++) {
    of[r] = (Shape){.rank = 1, .dims = {0}}; /* of one that no step stores */
    if (program->stored >> r & 1) of[r] = shape_of_result(call, shapes, program->needs[r]);
    if (program->sums[r] < 0) {
      results[r] = output(call, r, &of[r]);
      if (!(program->stored >> r & 1) || !of[r].count) results[r] = NULL;
      continue;
    }
    const Step *step = &program->steps[program->sums[r]];
    const Shape shape = shape_of_sum(call, &of[r], step);
    results[r] = output(call, r, &shape);
    if (call->failed || !shape.count) results[r] = NULL;
    sums[r].out = (float *)results[r];
    sums[r].count = shape.count;
    sums[r].divisor = step->code == MEAN ? (double)of[r].count / (double)shape.count : 1;
  }
  for (size_t r = 0; r < RESULTS && !call->failed; r++) {
    if (!results[r]) continue;
    for (size_t s = 0; s < RESULTS; s++) {
      const int now = results[s] && same_shape(&of[r], &of[s]);
      job.results[s] = now ? results[s] : NULL;
      job.sums[s] = now ? sums[s] : (Sum){0};
      if (now) results[s] = NULL;
    }
    run(call, &job, &of[r], shapes);
  }
}

const Kernel elementwise_kernels[] = {
    {.name = "Elementwise", .inputs = "FFFFFFFFFFFFFFFFIIIIUUUUBBBB", .outputs = "FFFFFFFFIIUUUUBB",
     .settings = sizeof(Program), .read = read, .compute = compute},
    {0},
};
