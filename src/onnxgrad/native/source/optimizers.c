/* Optimizers in one pass over memory: what standard operators take ten or twelve passes for.
 *
 * Every product and sum is rounded by itself, in the order of the operators, so the results are the same to the last
 * bit: contraction to fused multiply-adds is off in this file. Memory is what takes the time.
 */

#include <math.h>

#include "kernel.h"

#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif

/* Elements that are worth a thread of their own. */
enum { GRAIN = 8192 };

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

/* The lower-case letters are X, G and states; scalars may be left out (1), and so may states of RMSProp. */
const Kernel optimizer_kernels[] = {
    {.name = "Sgd", .inputs = "ffFFFf", .outputs = "f", .compute = sgd_f},
    {.name = "SgdDouble", .inputs = "ddDDDd", .outputs = "d", .compute = sgd_d},
    {.name = "Momentum", .inputs = "fffFFFFf", .outputs = "ff", .compute = momentum_f},
    {.name = "MomentumDouble", .inputs = "dddDDDDd", .outputs = "dd", .compute = momentum_d},
    {.name = "Adam", .inputs = "ffffFFFFf", .outputs = "fff", .compute = adam_f},
    {.name = "AdamDouble", .inputs = "ddddDDDDd", .outputs = "ddd", .compute = adam_d},
    {.name = "NAdam", .inputs = "ffffFFFFFf", .outputs = "fff", .compute = nadam_f},
    {.name = "NAdamDouble", .inputs = "ddddDDDDDd", .outputs = "ddd", .compute = nadam_d},
    {.name = "Adagrad", .inputs = "fffFFFf", .outputs = "ff", .compute = adagrad_f},
    {.name = "AdagradDouble", .inputs = "dddDDDd", .outputs = "dd", .compute = adagrad_d},
    {.name = "RMSProp", .inputs = "fffFFFFFf", .outputs = "ffFF", .compute = rmsprop_f},
    {.name = "RMSPropDouble", .inputs = "dddDDDDDd", .outputs = "ddDD", .compute = rmsprop_d},
    {.name = "Lion", .inputs = "fffFFFf", .outputs = "ff", .compute = lion_f},
    {.name = "LionDouble", .inputs = "dddDDDd", .outputs = "dd", .compute = lion_d},
    {0},
};
