/* A sum over the steps of a Scan, in one buffer.
 *
 * `RunningSum` makes it, `RunningSumAdd` is called by each step, or `RunningSumProduct` (`products.c`), and
 * `RunningSumEnd` gives what has become of it. What goes from one to the next, and is the state of the Scan, is where
 * the buffer lies: nothing else is ever written to. */
#include "kernel.h"
#include "lanes.h"

typedef struct {
  float *out;
  const float *parts;
  int64_t count, deep;
  int adds;
} Parts;

static void add_up(void *data, int64_t from, int64_t to) {
  const Parts *j = data;
  for (int64_t i = from; i < to; i += LANES) {
    lanes sum = j->deep ? lanes_read(j->parts + i, to - i, 0) : lanes_of(0);
    for (int64_t d = 1; d < j->deep; d++) sum += lanes_read(j->parts + d * j->count + i, to - i, 0);
    if (j->adds) sum = lanes_read(j->out + i, to - i, 0) + sum;
    lanes_write(j->out + i, to - i, sum);
  }
}

void add_parts(Call *call, float *out, int adds, const float *parts, int64_t count, int64_t deep) {
  Parts job = {out, parts, count, deep, adds};
  parallel_ranges(call, count, 4096, add_up, &job);
}

void pass_sum_on(Call *call, size_t index, const float *sum) {
  Shape one = {.rank = 1, .dims = {1}};
  int64_t *place = output(call, index, &one);
  if (place) *place = (int64_t)(intptr_t)sum;
}

float *sum_of(Call *call, size_t at) {
  const float *sum = input(call, at);
  const int64_t *place = input(call, at + 1);
  const Shape shape = shape_of(call, at + 1);
  if (call->failed) return NULL;
  if (shape.count != 1 || *place != (int64_t)(intptr_t)sum) fail(call, "RunningSum: this is none, or another one");
  return call->failed ? NULL : (float *)sum;
}

/* (sizes) to (zeros, where they are) */
static void start(Call *call, const void *settings) {
  const Shape sizes = shape_of(call, 0);
  const int64_t *dims = input(call, 0);
  Shape shape = {.rank = (size_t)sizes.count};
  if (refused(call, sizes.rank != 1 || shape.rank > MOST_DIMS, "RunningSum: these are no sizes")) return;
  for (size_t i = 0; i < shape.rank; i++) {
    if (refused(call, dims[i] < 0, "RunningSum: these are no sizes of a sum")) return;
    shape.dims[i] = dims[i];
  }
  float *sum = output(call, 0, &shape);
  pass_sum_on(call, 1, sum);
  if (!call->failed) add_parts(call, sum, 0, NULL, shape.count, 0);
}

/* (sum, where it is, x) to where it is */
static void step(Call *call, const void *settings) {
  float *sum = sum_of(call, 0);
  const Shape shape = shape_of(call, 0), x = shape_of(call, 2);
  if (!call->failed && !same_shape(&shape, &x)) fail(call, "RunningSum: a step adds something of another shape");
  pass_sum_on(call, 0, sum);
  if (!call->failed) add_parts(call, sum, 1, input(call, 2), x.count, 1);
}

/* (x, …) to x, in its memory (see `library.c`) but where a caller wants it elsewhere */
static void after(Call *call, const void *settings) {
  const float *x = input(call, 0);
  Shape shape = shape_of(call, 0);
  float *out = output(call, 0, &shape);
  if (!call->failed && out != x && shape.count) memcpy(out, x, (size_t)shape.count * sizeof(float));
}

/* (sum, where it is) to the sum likewise */
static void end(Call *call, const void *settings) {
  sum_of(call, 0);
  if (!call->failed) after(call, settings);
}

const Kernel sum_kernels[] = {
    {"RunningSum", "l", "fl", 0, NULL, start},
    {"RunningSumAdd", "flf", "l", 0, NULL, step},
    {.name = "After", .inputs = "f*", .outputs = "f", .compute = after, .is_view = 1},
    {.name = "RunningSumEnd", .inputs = "fl", .outputs = "f", .compute = end, .is_view = 1},
    {0}};
