/* Optimizers in one pass over memory: what standard operators take ten or twelve passes for.
 *
 * Every product and sum is rounded by itself, in the order of the operators, so the results are the same to the last
 * bit: contraction to fused multiply-adds is off in this file. Memory is what takes the time.
 */

#include <math.h>

#include "kernel.h"
#include "picked.h"
#include "streaming.h"

#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#pragma GCC optimize("fp-contract=off", "no-math-errno", "no-trapping-math")
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

/* Elements that are worth a thread; elements of a block; bytes from which on results go past the caches. */
enum { GRAIN = 8192, BLOCK = 64, STREAMED = 1 << 20 };

/* How many updates took the place of what they were computed from, in this process. */
__attribute__((visibility("default"))) int64_t onnxgrad_overwrites;

static void copy(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }

#define REAL float
#define ROOT sqrtf
#define NAME(name) name##_f
#include "optimizers.h"
#undef REAL
#undef ROOT
#undef NAME

#define REAL double
#define ROOT sqrt
#define NAME(name) name##_d
#include "optimizers.h"

/* Lower case: X, G and states, and at the end the constants; upper case: scalars, which may be left out for 1, and L, the
 * rows that were picked; *: what comes before. */
const Kernel optimizer_kernels[] = {
    {.name = "Sgd", .inputs = "ffFFFfL*", .outputs = "f", .compute = sgd_f},
    {.name = "SgdDouble", .inputs = "ddDDDdL*", .outputs = "d", .compute = sgd_d},
    {.name = "Momentum", .inputs = "fffFFFFfL*", .outputs = "ff", .compute = momentum_f},
    {.name = "MomentumDouble", .inputs = "dddDDDDdL*", .outputs = "dd", .compute = momentum_d},
    {.name = "Adam", .inputs = "ffffFFFFfL*", .outputs = "fff", .compute = adam_f},
    {.name = "AdamDouble", .inputs = "ddddDDDDdL*", .outputs = "ddd", .compute = adam_d},
    {.name = "NAdam", .inputs = "ffffFFFFFfL*", .outputs = "fff", .compute = nadam_f},
    {.name = "NAdamDouble", .inputs = "ddddDDDDDdL*", .outputs = "ddd", .compute = nadam_d},
    {.name = "Adagrad", .inputs = "fffFFFfL*", .outputs = "ff", .compute = adagrad_f},
    {.name = "AdagradDouble", .inputs = "dddDDDdL*", .outputs = "dd", .compute = adagrad_d},
    {.name = "RMSProp", .inputs = "fffFFFfL*", .outputs = "ff", .compute = rmsprop_f},
    {.name = "RMSPropDouble", .inputs = "dddDDDdL*", .outputs = "dd", .compute = rmsprop_d},
    {.name = "RMSPropMoving", .inputs = "ffffFFFfL*", .outputs = "fff", .compute = rmsprop_moving_f},
    {.name = "RMSPropMovingDouble", .inputs = "ddddDDDdL*", .outputs = "ddd", .compute = rmsprop_moving_d},
    {.name = "RMSPropCentered", .inputs = "ffffFFFfL*", .outputs = "fff", .compute = rmsprop_centered_f},
    {.name = "RMSPropCenteredDouble", .inputs = "ddddDDDdL*", .outputs = "ddd", .compute = rmsprop_centered_d},
    {.name = "RMSPropCenteredMoving", .inputs = "fffffFFFfL*", .outputs = "ffff", .compute = rmsprop_both_f},
    {.name = "RMSPropCenteredMovingDouble", .inputs = "dddddDDDdL*", .outputs = "dddd", .compute = rmsprop_both_d},
    {.name = "Lion", .inputs = "fffFFFfL*", .outputs = "ff", .compute = lion_f},
    {.name = "LionDouble", .inputs = "dddDDDdL*", .outputs = "dd", .compute = lion_d},
    {0},
};
