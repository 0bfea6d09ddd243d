/* Runs calls of kernels from a file without ONNX Runtime, and compares their results (see foreign.py).
 *
 * The few functions of ONNX Runtime's interface that kernels call are written here. A file holds calls one after the
 * other, in the byte order of the machine:
 *
 *     name, number of attributes, attributes, number of operands, tensors, number of results, tensors
 *
 * Names are a length and bytes; an attribute is a name, 'f' and a float or 'i', a length and integers; a tensor is its
 * type (0: left out), the number of axes, its dimensions and its data. All integers have 64 bits. */

#include <math.h>
#include <stdio.h>

#include "vendored/onnxruntime_c_api.h"

enum { MOST = 64 };

struct OrtTensorTypeAndShapeInfo {
  int64_t type, rank, dims[MOST];
};
struct OrtValue {
  struct OrtTensorTypeAndShapeInfo shape;
  size_t bytes;
  char *data;
};
typedef struct {
  char name[MOST];
  int is_float;
  float number;
  int64_t count, numbers[20480];
} Attribute;
struct OrtKernelInfo {
  char name[MOST];
  int64_t attributes, operands, results;
  Attribute attribute[MOST];
  OrtValue operand[MOST], expected[MOST], result[MOST];
  int is_view;
};
struct OrtStatus {
  char text[256];
};
static OrtAllocator the_allocator;
static const OrtCustomOp *operators[256];
static size_t operator_count;

/* --- the interface ------------------------------------------------------------------------------------------------ */

static OrtStatus *CreateStatus(OrtErrorCode code, const char *text) {
  OrtStatus *status = calloc(1, sizeof *status);
  (void)code;
  strncpy(status->text, text, sizeof status->text - 1);
  return status;
}
static void ReleaseStatus(OrtStatus *status) { free(status); }

static const Attribute *attribute(const OrtKernelInfo *info, const char *name) {
  for (int64_t i = 0; i < info->attributes; i++)
    if (!strcmp(info->attribute[i].name, name)) return &info->attribute[i];
  return NULL;
}
static OrtStatus *KernelInfoGetAttribute_float(const OrtKernelInfo *info, const char *name, float *out) {
  const Attribute *found = attribute(info, name);
  if (!found || !found->is_float) return CreateStatus(ORT_FAIL, "no such float");
  *out = found->number;
  return NULL;
}
static OrtStatus *KernelInfoGetAttribute_int64(const OrtKernelInfo *info, const char *name, int64_t *out) {
  const Attribute *found = attribute(info, name);
  if (!found || found->is_float) return CreateStatus(ORT_FAIL, "no such integer");
  *out = found->numbers[0];
  return NULL;
}
static OrtStatus *KernelInfoGetAttributeArray_int64(const OrtKernelInfo *info, const char *name, int64_t *out,
                                                    size_t *size) {
  const Attribute *found = attribute(info, name);
  if (!found || found->is_float) return CreateStatus(ORT_FAIL, "no such integers");
  if (out && *size < (size_t)found->count) return CreateStatus(ORT_FAIL, "too many integers");
  if (out) memcpy(out, found->numbers, (size_t)found->count * sizeof *out);
  *size = (size_t)found->count;
  return NULL;
}
static OrtStatus *KernelInfoGetAllocator(const OrtKernelInfo *info, OrtMemType kind, OrtAllocator **out) {
  (void)info, (void)kind;
  *out = &the_allocator;
  return NULL;
}
static OrtStatus *AllocatorAlloc(OrtAllocator *allocator, size_t size, void **out) {
  (void)allocator;
  *out = aligned_alloc(64, (size + 63) / 64 * 64);
  memset(*out, 0xff, size); /* memory is not cleared */
  return NULL;
}
static OrtStatus *AllocatorFree(OrtAllocator *allocator, void *block) {
  (void)allocator;
  free(block);
  return NULL;
}
static void ReleaseAllocator(OrtAllocator *allocator) { (void)allocator; }

static size_t width(int64_t type) {
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8: return 1;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE: return 8;
    default: return 4;
  }
}
static int64_t count_of(const OrtTensorTypeAndShapeInfo *shape) {
  int64_t count = 1;
  for (int64_t i = 0; i < shape->rank; i++) count *= shape->dims[i];
  return count;
}
static const OrtKernelInfo *call_of(const OrtKernelContext *context) { return (const OrtKernelInfo *)context; }

static OrtStatus *KernelContext_GetInput(const OrtKernelContext *context, size_t i, const OrtValue **out) {
  const OrtKernelInfo *call = call_of(context);
  *out = i < (size_t)call->operands && call->operand[i].shape.type ? &call->operand[i] : NULL;
  return NULL;
}
static OrtStatus *KernelContext_GetOutputCount(const OrtKernelContext *context, size_t *out) {
  *out = (size_t)call_of(context)->results;
  return NULL;
}
static OrtStatus *KernelContext_GetOutput(OrtKernelContext *context, size_t i, const int64_t *dims, size_t rank,
                                          OrtValue **out) {
  OrtKernelInfo *call = (OrtKernelInfo *)context;
  OrtValue *value = &call->result[i];
  *out = NULL;
  if (i >= (size_t)call->results || !call->expected[i].shape.type) return NULL; /* not read */
  value->shape.type = call->expected[i].shape.type;
  value->shape.rank = (int64_t)rank;
  memcpy(value->shape.dims, dims, rank * sizeof *dims);
  value->bytes = (size_t)count_of(&value->shape) * width(value->shape.type);
  value->data = i == 0 && call->is_view ? call->operand[0].data : aligned_alloc(64, value->bytes / 64 * 64 + 64);
  if (!(i == 0 && call->is_view)) memset(value->data, 0xff, value->bytes);
  *out = value;
  return NULL;
}
static OrtStatus *KernelContext_ParallelFor(const OrtKernelContext *context, void (*body)(void *, size_t), size_t total,
                                            size_t batches, void *data) {
  (void)context, (void)batches;
  for (size_t i = total; i-- > 0;) body(data, i); /* any order */
  return NULL;
}
static OrtStatus *GetTensorMutableData(OrtValue *value, void **out) {
  *out = value->data;
  return NULL;
}
static OrtStatus *GetTensorTypeAndShape(const OrtValue *value, OrtTensorTypeAndShapeInfo **out) {
  *out = (OrtTensorTypeAndShapeInfo *)&value->shape;
  return NULL;
}
static void ReleaseTensorTypeAndShapeInfo(OrtTensorTypeAndShapeInfo *info) { (void)info; }
static OrtStatus *GetDimensionsCount(const OrtTensorTypeAndShapeInfo *info, size_t *out) {
  *out = (size_t)info->rank;
  return NULL;
}
static OrtStatus *GetDimensions(const OrtTensorTypeAndShapeInfo *info, int64_t *dims, size_t rank) {
  memcpy(dims, info->dims, rank * sizeof *dims);
  return NULL;
}
static OrtStatus *CreateCustomOpDomain(const char *name, OrtCustomOpDomain **out) {
  (void)name;
  *out = (OrtCustomOpDomain *)operators;
  return NULL;
}
static OrtStatus *CustomOpDomain_Add(OrtCustomOpDomain *domain, const OrtCustomOp *op) {
  (void)domain;
  operators[operator_count++] = op;
  return NULL;
}
static OrtStatus *AddCustomOpDomain(OrtSessionOptions *options, OrtCustomOpDomain *domain) {
  (void)options, (void)domain;
  return NULL;
}

static const OrtApi table = {
    .CreateStatus = CreateStatus, .ReleaseStatus = ReleaseStatus,
    .KernelInfoGetAttribute_float = KernelInfoGetAttribute_float,
    .KernelInfoGetAttribute_int64 = KernelInfoGetAttribute_int64,
    .KernelInfoGetAttributeArray_int64 = KernelInfoGetAttributeArray_int64,
    .KernelInfoGetAllocator = KernelInfoGetAllocator, .AllocatorAlloc = AllocatorAlloc, .AllocatorFree = AllocatorFree,
    .ReleaseAllocator = ReleaseAllocator, .KernelContext_GetInput = KernelContext_GetInput,
    .KernelContext_GetOutputCount = KernelContext_GetOutputCount, .KernelContext_GetOutput = KernelContext_GetOutput,
    .KernelContext_ParallelFor = KernelContext_ParallelFor, .GetTensorMutableData = GetTensorMutableData,
    .GetTensorTypeAndShape = GetTensorTypeAndShape, .ReleaseTensorTypeAndShapeInfo = ReleaseTensorTypeAndShapeInfo,
    .GetDimensionsCount = GetDimensionsCount, .GetDimensions = GetDimensions,
    .CreateCustomOpDomain = CreateCustomOpDomain, .CustomOpDomain_Add = CustomOpDomain_Add,
    .AddCustomOpDomain = AddCustomOpDomain,
};
static const OrtApi *get_api(uint32_t version) {
  (void)version;
  return &table;
}
OrtStatus *RegisterCustomOps(OrtSessionOptions *, const OrtApiBase *);

/* --- reading and comparing ---------------------------------------------------------------------------------------- */

static int64_t integer(FILE *file) {
  int64_t found = -1;
  if (fread(&found, sizeof found, 1, file) != 1) return -1;
  return found;
}
static void text(FILE *file, char *into) {
  int64_t length = integer(file);
  if (length < 0 || length >= MOST || fread(into, 1, (size_t)length, file) != (size_t)length) exit(3);
  into[length] = 0;
}
static void tensor(FILE *file, OrtValue *into) {
  memset(into, 0, sizeof *into);
  into->shape.type = integer(file);
  if (!into->shape.type) return;
  into->shape.rank = integer(file);
  for (int64_t i = 0; i < into->shape.rank; i++) into->shape.dims[i] = integer(file);
  into->bytes = (size_t)count_of(&into->shape) * width(into->shape.type);
  into->data = aligned_alloc(64, into->bytes / 64 * 64 + 64);
  if (fread(into->data, 1, into->bytes, file) != into->bytes) exit(3);
}
static int next(FILE *file, OrtKernelInfo *call) {
  int64_t length = integer(file);
  if (length < 0) return 0;
  memset(call, 0, sizeof *call);
  if (length >= MOST || fread(call->name, 1, (size_t)length, file) != (size_t)length) exit(3);
  call->attributes = integer(file);
  for (int64_t i = 0; i < call->attributes; i++) {
    Attribute *a = &call->attribute[i];
    text(file, a->name);
    a->is_float = integer(file) == 'f';
    if (a->is_float) {
      if (fread(&a->number, sizeof a->number, 1, file) != 1) exit(3);
    } else {
      a->count = integer(file);
      for (int64_t k = 0; k < a->count; k++) a->numbers[k] = integer(file);
    }
  }
  call->operands = integer(file);
  for (int64_t i = 0; i < call->operands; i++) tensor(file, &call->operand[i]);
  call->results = integer(file);
  for (int64_t i = 0; i < call->results; i++) tensor(file, &call->expected[i]);
  return 1;
}

/* The largest difference, as a share of the largest expected number; infinite if shapes, NaN or infinities differ. */
static double difference(const OrtValue *found, const OrtValue *expected) {
  int64_t count = count_of(&expected->shape);
  if (!found->data && count) return INFINITY;
  if (found->shape.rank != expected->shape.rank ||
      memcmp(found->shape.dims, expected->shape.dims, (size_t)expected->shape.rank * sizeof(int64_t)))
    return INFINITY;
  int is_float = expected->shape.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  if (!is_float && expected->shape.type != ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE)
    return memcmp(found->data, expected->data, expected->bytes) ? INFINITY : 0;
  double largest = 0, off = 0;
  for (int64_t i = 0; i < count; i++) {
    double x = is_float ? ((float *)found->data)[i] : ((double *)found->data)[i];
    double y = is_float ? ((float *)expected->data)[i] : ((double *)expected->data)[i];
    if (isnan(x) && isnan(y)) continue;
    if (x == y) {
      if (isfinite(y)) largest = fmax(largest, fabs(y));
      continue;
    }
    if (!isfinite(x) || !isfinite(y)) return INFINITY;
    largest = fmax(largest, fabs(y)), off = fmax(off, fabs(x - y));
  }
  return off == 0 ? 0 : off / fmax(largest, 1e-6);
}

int main(int count, char **words) {
  static OrtKernelInfo call;
  OrtApiBase base = {.GetApi = get_api};
  FILE *file = count > 1 ? fopen(words[1], "rb") : NULL;
  if (!file || RegisterCustomOps(NULL, &base)) return 3;
  while (next(file, &call)) {
    const OrtCustomOp *op = NULL;
    for (size_t i = 0; i < operator_count; i++)
      if (!strcmp(operators[i]->GetName(operators[i]), call.name)) op = operators[i];
    if (!op) return 3;
    call.is_view = op->GetAliasMap != NULL;
    void *kernel = NULL;
    OrtStatus *failed = op->CreateKernelV2(op, &table, &call, &kernel);
    if (!failed) failed = op->KernelComputeV2(kernel, (OrtKernelContext *)&call);
    double worst = 0;
    for (int64_t i = 0; i < call.results && !failed; i++)
      if (call.expected[i].shape.type) worst = fmax(worst, difference(&call.result[i], &call.expected[i]));
    printf("%s %g %s\n", call.name, worst, failed ? failed->text : "");
    if (kernel) op->KernelDestroy(kernel);
    for (int64_t i = 0; i < call.results; i++)
      if (call.result[i].data && !(i == 0 && call.is_view)) free(call.result[i].data);
    for (int64_t i = 0; i < call.operands; i++) free(call.operand[i].data);
    for (int64_t i = 0; i < call.results; i++) free(call.expected[i].data);
  }
  return 0;
}
