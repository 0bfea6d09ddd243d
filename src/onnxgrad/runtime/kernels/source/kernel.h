/* What a kernel is written against.
 *
 * A kernel is a function `compute(Call *, const void *settings)` and an entry in the table of its file:
 *
 *     typedef struct { float alpha; } Settings;
 *     static void read(Attributes *from, void *settings) {
 *       ((Settings *)settings)->alpha = attribute_float(from, "alpha");
 *     }
 *     static void compute(Call *call, const void *settings) {
 *       Shape shape = shape_of(call, 0);
 *       const float *x = input(call, 0);
 *       float *y = output(call, 0, &shape);
 *       if (call->failed) return;
 *       …
 *     }
 *     const Kernel my_kernels[] = {
 *       {.name = "Mine", .inputs = "f", .outputs = "f",
 *        .settings = sizeof(Settings), .read = read, .compute = compute},
 *       {0}};
 *
 * `inputs` and `outputs` hold a letter for each operand: f float, d double, i int32, u uint32, l int64, b bool; upper
 * case where it may be left out: `input` and `output` are NULL then. A * at the end of `inputs` stands for any number of
 * anything, which is only waited for. The table is named in `library.c`.
 *
 * A node of a file may call a kernel with any operands of these types and with any attributes. So a kernel first sees
 * that ranks, sizes and attributes belong together, and fails where they do not. Of one tensor, the product of any
 * dimensions is at most `MOST_NUMBERS` (zeros among them apart); products over several tensors may not fit an int64.
 *
 * The numbers are those of the graph that the kernel stands for, NaN and infinities included. Work is divided by
 * `parallel`, among the threads that the session has; kernels start none. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32) && !defined(_MSC_VER)
#define _Return_type_success_(condition) /* the header leaves this one to Microsoft's compiler */
#endif
#include "vendored/onnxruntime_c_api.h"

enum { MOST_DIMS = 64, MOST_BLOCKS = 8 };
static const int64_t MOST_NUMBERS = (int64_t)1 << 38;

typedef struct {
  size_t rank;
  int64_t count; /* of elements */
  int64_t dims[MOST_DIMS];
} Shape;

/* One run of a kernel. Once `failed` is set, everything below does nothing, and the run ends with that error. */
typedef struct {
  const OrtApi *table;
  const struct Kernel *kernel;
  OrtKernelContext *context;
  OrtAllocator *allocator;
  OrtStatus *failed;
  size_t blocks;
  void *block[MOST_BLOCKS];
} Call;

/* The attributes of a node, while a session is made. */
typedef struct {
  const OrtApi *table;
  const OrtKernelInfo *info;
  OrtStatus *failed;
  const void *end; /* of what is used of the settings; NULL: all of them */
} Attributes;

typedef struct Kernel {
  const char *name;
  const char *inputs, *outputs;
  size_t settings; /* how many bytes `read` fills */
  void (*read)(Attributes *, void *settings);
  void (*compute)(Call *, const void *settings);
  int is_view; /* whether the first result is given the memory of the first operand, which a caller may prevent */
  int may_replace; /* the first result or the second (1, 2) that may be, where nothing else reads that; or 0 */
} Kernel;

float attribute_float(Attributes *, const char *name);
int64_t attribute_int(Attributes *, const char *name);
/* As many integers as `count`. */
void attribute_ints(Attributes *, const char *name, int64_t *out, size_t count);
/* How many integers there are; more than `most` are an error. */
size_t attribute_some_ints(Attributes *, const char *name, int64_t *out, size_t most);
void attributes_fail(Attributes *, const char *message);

/* NULL where it was left out. */
const void *input(Call *, size_t index);
Shape shape_of(Call *, size_t index);
/* How many results the node has, those that nobody reads among them. */
size_t output_count_of(Call *);
/* The product of the dimensions, as `count`; fails where it is too large. */
void count_numbers(Call *, Shape *);
/* NULL where nobody reads it. Counts the numbers of its shape. */
void *output(Call *, size_t index, Shape *);
/* Memory for `count` things of `size` bytes, the kernel's until the end of the run; from the arena of the session, so
 * not cleared. */
void *scratch(Call *, int64_t count, size_t size);
void fail(Call *, const char *message);
/* Fails if something is wrong; whether the run has failed, then or before. */
static inline int refused(Call *call, int is_wrong, const char *message) {
  if (is_wrong) fail(call, message);
  return call->failed != NULL;
}

/* body(data, i) for i = 0 … pieces - 1, in any order, on the threads of the session. */
void parallel(Call *, size_t pieces, void (*body)(void *data, size_t i), void *data);
/* body(data, from, to) for ranges that cover 0 … count, each of whole multiples of `unit` but the last. */
void parallel_ranges(Call *, int64_t count, int64_t unit, void (*body)(void *data, int64_t from, int64_t to),
                     void *data);
extern int64_t processors; /* of the machine: at least as many as threads */
/* body(data, i, space) likewise, where each one at work has `numbers` floats to itself. */
void parallel_spaces(Call *, int64_t pieces, int64_t numbers, void (*body)(void *data, int64_t i, float *space),
                     void *data);

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t quotient(int64_t a, int64_t b) { return (a + b - 1) / b; } /* rounded up */

static inline int same_shape(const Shape *a, const Shape *b) {
  int same = a->rank == b->rank;
  for (size_t i = 0; i < a->rank && same; i++) same = a->dims[i] == b->dims[i];
  return same;
}
/* The sum that is an operand of `call`, if the one behind it says that it is one. */
float *sum_of(Call *, size_t at);
void pass_sum_on(Call *, size_t index, const float *sum);
/* The sum of `deep` tensors of `count` numbers that follow each other, to `out` or added to it; zeros of none. */
void add_parts(Call *, float *out, int adds, const float *parts, int64_t count, int64_t deep);
