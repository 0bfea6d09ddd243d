/* Optimizers in one pass over memory: what standard operators take ten or twelve passes for.
 *
 * Every product and sum is rounded by itself, in the order of the operators, so the results are the same to the last
 * bit: contraction to fused multiply-adds is off in this file. Memory is what takes the time.
 */

#include <math.h>

#include "kernel.h"
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

/* Lower case: X, G and states, and at the end the constants; upper case: scalars, which may be left out for 1; *: what comes before. */
const Kernel optimizer_kernels[] = {
    {.name = "Sgd", .inputs = "ffFFFf*", .outputs = "f", .compute = sgd_f},
    {.name = "SgdDouble", .inputs = "ddDDDd*", .outputs = "d", .compute = sgd_d},
    {.name = "Momentum", .inputs = "fffFFFFf*", .outputs = "ff", .compute = momentum_f},
    {.name = "MomentumDouble", .inputs = "dddDDDDd*", .outputs = "dd", .compute = momentum_d},
    {.name = "Adam", .inputs = "ffffFFFFf*", .outputs = "fff", .compute = adam_f},
    {.name = "AdamDouble", .inputs = "ddddDDDDd*", .outputs = "ddd", .compute = adam_d},
    {.name = "NAdam", .inputs = "ffffFFFFFf*", .outputs = "fff", .compute = nadam_f},
    {.name = "NAdamDouble", .inputs = "ddddDDDDDd*", .outputs = "ddd", .compute = nadam_d},
    {.name = "Adagrad", .inputs = "fffFFFf*", .outputs = "ff", .compute = adagrad_f},
    {.name = "AdagradDouble", .inputs = "dddDDDd*", .outputs = "dd", .compute = adagrad_d},
    {.name = "RMSProp", .inputs = "fffFFFf*", .outputs = "ff", .compute = rmsprop_f},
    {.name = "RMSPropDouble", .inputs = "dddDDDd*", .outputs = "dd", .compute = rmsprop_d},
    {.name = "RMSPropMoving", .inputs = "ffffFFFf*", .outputs = "fff", .compute = rmsprop_moving_f},
    {.name = "RMSPropMovingDouble", .inputs = "ddddDDDd*", .outputs = "ddd", .compute = rmsprop_moving_d},
    {.name = "RMSPropCentered", .inputs = "ffffFFFf*", .outputs = "fff", .compute = rmsprop_centered_f},
    {.name = "RMSPropCenteredDouble", .inputs = "ddddDDDd*", .outputs = "ddd", .compute = rmsprop_centered_d},
    {.name = "RMSPropCenteredMoving", .inputs = "fffffFFFf*", .outputs = "ffff", .compute = rmsprop_both_f},
    {.name = "RMSPropCenteredMovingDouble", .inputs = "dddddDDDd*", .outputs = "dddd", .compute = rmsprop_both_d},
    {.name = "Lion", .inputs = "fffFFFf*", .outputs = "ff", .compute = lion_f},
    {.name = "LionDouble", .inputs = "dddDDDd*", .outputs = "dd", .compute = lion_d},
    {0},
};
