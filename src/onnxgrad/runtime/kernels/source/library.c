/* The operators of the domain onnxgrad.native: registration, and what kernels call (see kernel.h). */
#include <stdlib.h>
#include <string.h>
#ifndef _WIN32
#include <unistd.h>
#endif
#include "kernel.h"

/* The version of ONNX Runtime's interface that kernels use: that of release 1.18. Newer releases have it, too. */
enum { INTERFACE_VERSION = 18 };

#define TABLES(X)                                                                 \
  X(optimizer) X(convolution) X(normalization) X(pooling) X(softmax) X(attention) \
  X(elementwise) X(elementwise_double) X(recurrence) X(product) X(sum) X(winograd) X(depthwise)
#define DECLARED(name) extern const Kernel name##_kernels[];
#define LISTED(name) name##_kernels,
TABLES(DECLARED)
static const Kernel *const tables[] = {TABLES(LISTED)};

static void failing(OrtStatus **first, const OrtApi *table, OrtStatus *status) {
  if (status && *first)
    table->ReleaseStatus(status);
  else if (status)
    *first = status;
}

/* Calls a function of the interface; what it fails with is what the call or the attributes `of` fail with. */
#define ASK(of, function, ...) failing(&(of)->failed, (of)->table, (of)->table->function(__VA_ARGS__))

#define ATTRIBUTE(type, function, ask)                \
  type function(Attributes *from, const char *name) { \
    type value = 0;                                   \
    ASK(from, ask, from->info, name, &value);         \
    return value;                                     \
  }
ATTRIBUTE(float, attribute_float, KernelInfoGetAttribute_float)
ATTRIBUTE(int64_t, attribute_int, KernelInfoGetAttribute_int64)

size_t attribute_some_ints(Attributes *from, const char *name, int64_t *out, size_t most) {
  size_t size = most;
  ASK(from, KernelInfoGetAttributeArray_int64, from->info, name, out, &size);
  return from->failed ? 0 : size;
}

void attribute_ints(Attributes *from, const char *name, int64_t *out, size_t count) {
  if (attribute_some_ints(from, name, out, count) != count) attributes_fail(from, "an attribute holds too few integers");
}

void attributes_fail(Attributes *from, const char *message) {
  if (!from->failed) from->failed = from->table->CreateStatus(ORT_INVALID_ARGUMENT, message);
}

void fail(Call *call, const char *message) {
  if (!call->failed) call->failed = call->table->CreateStatus(ORT_INVALID_ARGUMENT, message);
}

static const OrtValue *operand(Call *call, size_t index) {
  const OrtValue *value = NULL;
  if (!call->failed) ASK(call, KernelContext_GetInput, call->context, index, &value);
  return call->failed ? NULL : value;
}

static void *data_of(Call *call, const OrtValue *value) {
  void *data = NULL;
  if (value && !call->failed) ASK(call, GetTensorMutableData, (OrtValue *)value, &data);
  return call->failed ? NULL : data;
}

/* Whether the operand at `index` of those that `letters` stand for is required. */
static int required(const char *letters, size_t index) { return index < strlen(letters) && letters[index] & 32; }

const void *input(Call *call, size_t index) {
  const OrtValue *value = operand(call, index);
  if (!value && required(call->kernel->inputs, index)) fail(call, "an operand of a kernel of onnxgrad is missing");
  return data_of(call, value);
}

Shape shape_of(Call *call, size_t index) {
  Shape shape;
  shape.rank = 0, shape.count = 0; /* and dimensions as far as there are any */
  OrtTensorTypeAndShapeInfo *info = NULL;
  const OrtValue *value = operand(call, index);
  if (!value) return shape;
  ASK(call, GetTensorTypeAndShape, value, &info);
  if (call->failed) return shape;
  ASK(call, GetDimensionsCount, info, &shape.rank);
  if (shape.rank > MOST_DIMS)
    fail(call, "a tensor has more axes than the kernels of onnxgrad know");
  else if (!call->failed)
    ASK(call, GetDimensions, info, shape.dims, shape.rank);
  call->table->ReleaseTensorTypeAndShapeInfo(info);
  if (!call->failed) count_numbers(call, &shape);
  return shape;
}

void count_numbers(Call *call, Shape *shape) {
  int64_t others = 1; /* the product without zeros: an empty tensor may have dimensions of any size */
  shape->count = 1;
  for (size_t i = 0; i < shape->rank; i++) {
    const int64_t dim = shape->dims[i];
    if (dim < 0 || (dim && __builtin_mul_overflow(others, dim, &others)) || others > MOST_NUMBERS)
      fail(call, "a tensor has more numbers than the kernels of onnxgrad count"), others = 0;
    shape->count = dim && shape->count ? others : 0;
  }
}

size_t output_count_of(Call *call) {
  size_t count = 0;
  if (!call->failed) ASK(call, KernelContext_GetOutputCount, call->context, &count);
  return call->failed ? 0 : count;
}

void *output(Call *call, size_t index, Shape *shape) {
  OrtValue *value = NULL;
  count_numbers(call, shape);
  if (!call->failed) ASK(call, KernelContext_GetOutput, call->context, index, shape->dims, shape->rank, &value);
  if (!value && required(call->kernel->outputs, index)) fail(call, "a result of a kernel of onnxgrad is missing");
  return data_of(call, value);
}

void *scratch(Call *call, int64_t count, size_t size) {
  void *block = NULL;
  size_t bytes = 0;
  if (count < 0 || __builtin_mul_overflow((size_t)count, size, &bytes))
    fail(call, "a kernel of onnxgrad asks for too much memory");
  if (call->blocks == MOST_BLOCKS) fail(call, "a kernel of onnxgrad asks for too many blocks of memory");
  if (!call->failed) ASK(call, AllocatorAlloc, call->allocator, bytes ? bytes : 1, &block);
  if (!call->failed && !block) fail(call, "no memory for a kernel of onnxgrad");
  if (call->failed) return NULL;
  return call->block[call->blocks++] = block;
}

void parallel(Call *call, size_t pieces, void (*body)(void *, size_t), void *data) {
  if (call->failed || !pieces) return;
  if (pieces == 1)
    body(data, 0);
  else
    ASK(call, KernelContext_ParallelFor, call->context, body, pieces, 0, data);
}

typedef struct {
  int64_t count, length;
  void (*body)(void *, int64_t, int64_t);
  void *data;
} Ranges;

static void one_range(void *data, size_t i) {
  const Ranges *ranges = data;
  int64_t from = (int64_t)i * ranges->length;
  ranges->body(ranges->data, from, least(from + ranges->length, ranges->count));
}

void parallel_ranges(Call *call, int64_t count, int64_t unit, void (*body)(void *, int64_t, int64_t), void *data) {
  /* How many threads there are is not told: enough ranges that they even out, and few enough to cost nothing. */
  int64_t units = (count + unit - 1) / unit, pieces = least(units, 32);
  if (pieces < 1) return;
  Ranges ranges = {count, (units + pieces - 1) / pieces * unit, body, data};
  parallel(call, (size_t)((count + ranges.length - 1) / ranges.length), one_range, &ranges);
}

int64_t processors = 1;

typedef struct {
  float *memory;
  int64_t count, numbers;
  void (*body)(void *, int64_t, float *);
  void *data;
  unsigned char busy[256];
} Spaces;

/* In the first space that is free, which is most likely in the cache of this thread. */
static void one_space(void *data, size_t i) {
  Spaces *s = data;
  int64_t k = 0;
  while (__atomic_exchange_n(&s->busy[k], 1, __ATOMIC_ACQUIRE)) k = (k + 1) % s->count;
  s->body(s->data, (int64_t)i, s->memory + k * s->numbers);
  __atomic_store_n(&s->busy[k], 0, __ATOMIC_RELEASE);
}

void parallel_spaces(Call *call, int64_t pieces, int64_t numbers, void (*body)(void *, int64_t, float *), void *data) {
  Spaces spaces = {.numbers = numbers, .body = body, .data = data};
  spaces.count = least(least(pieces, processors), (int64_t)sizeof spaces.busy);
  spaces.memory = scratch(call, spaces.count * numbers, sizeof(float));
  if (pieces > 0) parallel(call, (size_t)pieces, one_space, &spaces);
}

typedef struct {
  OrtCustomOp callbacks; /* first: a pointer to it is one to this */
  const Kernel *kernel;
} Operator;

typedef struct {
  const Kernel *kernel;
  OrtAllocator *allocator;
  void *settings;
} Instance;
static const OrtApi *the_table;

static const Kernel *kernel_of(const OrtCustomOp *op) { return ((const Operator *)op)->kernel; }
static const char *get_name(const OrtCustomOp *op) { return kernel_of(op)->name; }
static const char *get_provider(const OrtCustomOp *op) { return (void)op, NULL; }

static ONNXTensorElementDataType element(char letter) {
  static const ONNXTensorElementDataType types[128] = {
      ['f'] = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,  ['i'] = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32,
      ['u'] = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32, ['l'] = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64,
      ['d'] = ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE, ['b'] = ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL}; /* of *: undefined */
  return types[letter | 32];
}
typedef OrtCustomOpInputOutputCharacteristic Characteristic;
static Characteristic characteristic(char letter) {
  return letter == '*' ? INPUT_OUTPUT_VARIADIC : letter & 32 ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
}

static ONNXTensorElementDataType input_type(const OrtCustomOp *op, size_t i) { return element(kernel_of(op)->inputs[i]); }
static ONNXTensorElementDataType output_type(const OrtCustomOp *op, size_t i) { return element(kernel_of(op)->outputs[i]); }
static size_t input_count(const OrtCustomOp *op) { return strlen(kernel_of(op)->inputs); }
static size_t output_count(const OrtCustomOp *op) { return strlen(kernel_of(op)->outputs); }
static Characteristic input_kind(const OrtCustomOp *op, size_t i) { return characteristic(kernel_of(op)->inputs[i]); }
static Characteristic output_kind(const OrtCustomOp *op, size_t i) { return characteristic(kernel_of(op)->outputs[i]); }
/* What is the same of all: the processor's memory, no operands of any number, versions. */
static OrtMemType memory_type(const OrtCustomOp *op, size_t i) { return (void)op, (void)i, OrtMemTypeDefault; }
static int zero(const OrtCustomOp *op) { return (void)op, 0; }
static int start_version(const OrtCustomOp *op) { return (void)op, 1; }
static int end_version(const OrtCustomOp *op) { return (void)op, INT32_MAX; }

/* The first result is the first operand, in its memory; or the first or second result may take the memory of that. */
static int places[] = {0, 1};
static size_t aliases(int **operands, int **results) { return *operands = *results = places, 1; }
static size_t replacements(int **operands, int **results) { return *operands = places, *results = places + 1, 1; }
static void keep(int *operands, int *results) { (void)operands, (void)results; }

static void destroy(void *kernel) {
  Instance *instance = kernel;
  if (!instance) return;
  if (instance->allocator) the_table->ReleaseAllocator(instance->allocator);
  free(instance->settings);
  free(instance);
}

static OrtStatus *create(const OrtCustomOp *op, const OrtApi *given, const OrtKernelInfo *info, void **out) {
  const Kernel *kernel = kernel_of(op);
  Attributes attributes = {the_table, info, NULL, NULL};
  Instance *instance = calloc(1, sizeof *instance);
  if (instance) instance->settings = calloc(1, kernel->settings + 1);
  if (!instance || !instance->settings) {
    free(instance);
    return the_table->CreateStatus(ORT_FAIL, "out of memory");
  }
  instance->kernel = kernel;
  ASK(&attributes, KernelInfoGetAllocator, info, OrtMemTypeDefault, &instance->allocator);
  if (kernel->read && !attributes.failed) kernel->read(&attributes, instance->settings);
  void *shorter = attributes.end ? realloc(instance->settings, (size_t)((char *)attributes.end - (char *)instance->settings)) : NULL;
  if (shorter) instance->settings = shorter;
  if (attributes.failed)
    destroy(instance);
  else
    *out = instance;
  return attributes.failed;
}

static OrtStatus *compute(void *kernel, OrtKernelContext *context) {
  const Instance *instance = kernel;
  Call call = {.table = the_table, .kernel = instance->kernel, .context = context, .allocator = instance->allocator};
  instance->kernel->compute(&call, instance->settings);
  while (call.blocks) ASK(&call, AllocatorFree, call.allocator, call.block[--call.blocks]);
  return call.failed;
}

static const OrtCustomOp callbacks = {
    .version = INTERFACE_VERSION, .GetName = get_name, .GetExecutionProviderType = get_provider,
    .GetInputType = input_type, .GetInputTypeCount = input_count, .GetInputCharacteristic = input_kind,
    .GetOutputType = output_type, .GetOutputTypeCount = output_count, .GetOutputCharacteristic = output_kind,
    .GetVariadicInputMinArity = zero, .GetVariadicInputHomogeneity = zero, .GetVariadicOutputMinArity = zero,
    .GetVariadicOutputHomogeneity = zero, .GetInputMemoryType = memory_type, .GetStartVersion = start_version,
    .GetEndVersion = end_version, .CreateKernelV2 = create, .KernelComputeV2 = compute, .KernelDestroy = destroy};

static OrtStatus *fill(OrtCustomOpDomain *domain) {
#ifdef _WIN32
  const char *told = getenv("NUMBER_OF_PROCESSORS");
  processors = most(told ? atol(told) : 1, 1);
#else
  processors = most(sysconf(_SC_NPROCESSORS_ONLN), 1);
#endif
  for (size_t t = 0; t < sizeof tables / sizeof *tables; t++)
    for (const Kernel *kernel = tables[t]; kernel->name; kernel++) {
      Operator *op = malloc(sizeof *op); /* as long as the domain: until the process ends */
      if (!op) return the_table->CreateStatus(ORT_FAIL, "out of memory");
      op->callbacks = callbacks;
      op->kernel = kernel;
      if (kernel->is_view) op->callbacks.GetAliasMap = aliases, op->callbacks.ReleaseAliasMap = keep;
      if (kernel->may_replace) op->callbacks.ReleaseMayInplace = keep;
      if (kernel->may_replace) op->callbacks.GetMayInplace = kernel->may_replace == 1 ? aliases : replacements;
      OrtStatus *failed = the_table->CustomOpDomain_Add(domain, &op->callbacks);
      if (failed) return failed;
    }
  return NULL;
}

/* ONNX Runtime calls this once for every session that asks for the library. All share one domain. */
__attribute__((visibility("default"))) OrtStatus *RegisterCustomOps(OrtSessionOptions *, const OrtApiBase *);
OrtStatus *RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *base) {
  static OrtCustomOpDomain *shared;
  const OrtApi *table = base->GetApi(INTERFACE_VERSION);
  if (!table) return NULL; /* older than any version that onnxgrad runs on: the operators will be unknown */
  __atomic_store_n(&the_table, table, __ATOMIC_RELEASE);
  OrtCustomOpDomain *domain = __atomic_load_n(&shared, __ATOMIC_ACQUIRE);
  if (!domain) {
    OrtStatus *failed = table->CreateCustomOpDomain("onnxgrad.native", &domain);
    if (!failed) failed = fill(domain);
    if (failed) return failed;
    OrtCustomOpDomain *first = NULL;
    if (!__atomic_compare_exchange_n(&shared, &first, domain, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
      table->ReleaseCustomOpDomain(domain); /* another thread was here in the meantime */
      domain = first;
    }
  }
  return table->AddCustomOpDomain(options, domain);
}
