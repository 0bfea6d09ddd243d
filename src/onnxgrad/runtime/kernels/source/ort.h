/* The part of ONNX Runtime's C interface that kernels need, declared here because the wheel brings no headers.
 *
 * The interface is a table of functions. A version of it only ever appends to the table of the one before, so a
 * function has the same place in every release that has it. Version 18 is that of onnxruntime 1.18; whatever is
 * newer has it too. An operator is a struct of callbacks that says itself which version it was written for: it is
 * declared here as of version 18.
 */
#ifndef ONNXGRAD_ORT_H
#define ONNXGRAD_ORT_H

#include <stddef.h>
#include <stdint.h>

enum { ORT_TABLE_VERSION = 18, ORT_OPERATOR_VERSION = 18 };

typedef struct OrtStatus OrtStatus;
typedef struct OrtValue OrtValue;
typedef struct OrtAllocator OrtAllocator;
typedef struct OrtKernelInfo OrtKernelInfo;
typedef struct OrtKernelContext OrtKernelContext;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtCustomOpDomain OrtCustomOpDomain;
typedef struct OrtTensorTypeAndShapeInfo OrtTensorTypeAndShapeInfo;
typedef struct OrtShapeInferContext OrtShapeInferContext;

typedef void (*OrtFunction)(void);
typedef struct OrtApi {
  OrtFunction slots[279];
} OrtApi;

typedef struct OrtApiBase {
  const OrtApi *(*GetApi)(uint32_t version);
  const char *(*GetVersionString)(void);
} OrtApiBase;

enum { ORT_FAIL = 1, ORT_INVALID_ARGUMENT = 2 };
enum { ELEMENT_ANY = 0, ELEMENT_FLOAT = 1, ELEMENT_INT32 = 6, ELEMENT_INT64 = 7, ELEMENT_BOOL = 9, ELEMENT_DOUBLE = 11 };
enum { ELEMENT_UINT32 = 12 };
enum { OPERAND_REQUIRED = 0, OPERAND_OPTIONAL = 1, OPERAND_VARIADIC = 2 };
enum { MEMORY_DEFAULT = 0 };

typedef struct OrtCustomOp OrtCustomOp;
struct OrtCustomOp {
  uint32_t version;
  void *(*CreateKernel)(const OrtCustomOp *, const OrtApi *, const OrtKernelInfo *);
  const char *(*GetName)(const OrtCustomOp *);
  const char *(*GetExecutionProviderType)(const OrtCustomOp *);
  int (*GetInputType)(const OrtCustomOp *, size_t index);
  size_t (*GetInputTypeCount)(const OrtCustomOp *);
  int (*GetOutputType)(const OrtCustomOp *, size_t index);
  size_t (*GetOutputTypeCount)(const OrtCustomOp *);
  void (*KernelCompute)(void *kernel, OrtKernelContext *);
  void (*KernelDestroy)(void *kernel);
  int (*GetInputCharacteristic)(const OrtCustomOp *, size_t index);
  int (*GetOutputCharacteristic)(const OrtCustomOp *, size_t index);
  int (*GetInputMemoryType)(const OrtCustomOp *, size_t index);
  int (*GetVariadicInputMinArity)(const OrtCustomOp *);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp *);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp *);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp *);
  OrtStatus *(*CreateKernelV2)(const OrtCustomOp *, const OrtApi *, const OrtKernelInfo *, void **kernel);
  OrtStatus *(*KernelComputeV2)(void *kernel, OrtKernelContext *);
  OrtStatus *(*InferOutputShapeFn)(const OrtCustomOp *, OrtShapeInferContext *);
  int (*GetStartVersion)(const OrtCustomOp *);
  int (*GetEndVersion)(const OrtCustomOp *);
  size_t (*GetMayInplace)(int **operands, int **results);
  void (*ReleaseMayInplace)(int *operands, int *results);
  size_t (*GetAliasMap)(int **operands, int **results);
  void (*ReleaseAliasMap)(int *operands, int *results);
};

/* ort_Name(table, …) calls the function at a place of the table. */
#define PLACE(index, result, name, parameters, types, arguments)              \
  static inline result ort_##name parameters {                                \
    return ((result(*) types)table->slots[index])arguments;                   \
  }
#define TABLE const OrtApi *table

PLACE(0, OrtStatus *, CreateStatus, (TABLE, int code, const char *message), (int, const char *), (code, message))
PLACE(26, OrtStatus *, CreateCustomOpDomain, (TABLE, const char *domain, OrtCustomOpDomain **out),
      (const char *, OrtCustomOpDomain **), (domain, out))
PLACE(27, OrtStatus *, CustomOpDomain_Add, (TABLE, OrtCustomOpDomain *domain, const OrtCustomOp *op),
      (OrtCustomOpDomain *, const OrtCustomOp *), (domain, op))
PLACE(28, OrtStatus *, AddCustomOpDomain, (TABLE, OrtSessionOptions *options, OrtCustomOpDomain *domain),
      (OrtSessionOptions *, OrtCustomOpDomain *), (options, domain))
PLACE(51, OrtStatus *, GetTensorMutableData, (TABLE, OrtValue *value, void **out), (OrtValue *, void **), (value, out))
PLACE(61, OrtStatus *, GetDimensionsCount, (TABLE, const OrtTensorTypeAndShapeInfo *info, size_t *out),
      (const OrtTensorTypeAndShapeInfo *, size_t *), (info, out))
PLACE(62, OrtStatus *, GetDimensions, (TABLE, const OrtTensorTypeAndShapeInfo *info, int64_t *dims, size_t rank),
      (const OrtTensorTypeAndShapeInfo *, int64_t *, size_t), (info, dims, rank))
PLACE(65, OrtStatus *, GetTensorTypeAndShape, (TABLE, const OrtValue *value, OrtTensorTypeAndShapeInfo **out),
      (const OrtValue *, OrtTensorTypeAndShapeInfo **), (value, out))
PLACE(75, OrtStatus *, AllocatorAlloc, (TABLE, OrtAllocator *allocator, size_t size, void **out),
      (OrtAllocator *, size_t, void **), (allocator, size, out))
PLACE(76, OrtStatus *, AllocatorFree, (TABLE, OrtAllocator *allocator, void *block), (OrtAllocator *, void *),
      (allocator, block))
PLACE(85, OrtStatus *, KernelInfoGetAttribute_float, (TABLE, const OrtKernelInfo *info, const char *name, float *out),
      (const OrtKernelInfo *, const char *, float *), (info, name, out))
PLACE(86, OrtStatus *, KernelInfoGetAttribute_int64, (TABLE, const OrtKernelInfo *info, const char *name, int64_t *out),
      (const OrtKernelInfo *, const char *, int64_t *), (info, name, out))
PLACE(89, OrtStatus *, KernelContext_GetOutputCount, (TABLE, const OrtKernelContext *context, size_t *out),
      (const OrtKernelContext *, size_t *), (context, out))
PLACE(90, OrtStatus *, KernelContext_GetInput,
      (TABLE, const OrtKernelContext *context, size_t index, const OrtValue **out),
      (const OrtKernelContext *, size_t, const OrtValue **), (context, index, out))
PLACE(91, OrtStatus *, KernelContext_GetOutput,
      (TABLE, OrtKernelContext *context, size_t index, const int64_t *dims, size_t rank, OrtValue **out),
      (OrtKernelContext *, size_t, const int64_t *, size_t, OrtValue **), (context, index, dims, rank, out))
PLACE(93, void, ReleaseStatus, (TABLE, OrtStatus *status), (OrtStatus *), (status))
PLACE(99, void, ReleaseTensorTypeAndShapeInfo, (TABLE, OrtTensorTypeAndShapeInfo *info),
      (OrtTensorTypeAndShapeInfo *), (info))
PLACE(101, void, ReleaseCustomOpDomain, (TABLE, OrtCustomOpDomain *domain), (OrtCustomOpDomain *), (domain))
PLACE(132, void, ReleaseAllocator, (TABLE, OrtAllocator *allocator), (OrtAllocator *), (allocator))
PLACE(163, OrtStatus *, KernelInfoGetAttributeArray_int64,
      (TABLE, const OrtKernelInfo *info, const char *name, int64_t *out, size_t *size),
      (const OrtKernelInfo *, const char *, int64_t *, size_t *), (info, name, out, size))
PLACE(274, OrtStatus *, KernelContext_ParallelFor,
      (TABLE, const OrtKernelContext *context, void (*body)(void *, size_t), size_t total, size_t batches, void *data),
      (const OrtKernelContext *, void (*)(void *, size_t), size_t, size_t, void *), (context, body, total, batches, data))
PLACE(278, OrtStatus *, KernelInfoGetAllocator, (TABLE, const OrtKernelInfo *info, int memory, OrtAllocator **out),
      (const OrtKernelInfo *, int, OrtAllocator **), (info, memory, out))

#undef PLACE
#undef TABLE
#endif
