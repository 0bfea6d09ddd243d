/* The sum that a step of a Scan adds to. */
#ifndef ONNXGRAD_SUMS_H
#define ONNXGRAD_SUMS_H

#include "kernel.h"

/* The sum that is an operand of `call`, if the one behind it says that it is one. */
float *sum_of(Call *, size_t at);
void pass_sum_on(Call *, size_t index, const float *sum);
/* The sum of `deep` tensors of `count` numbers that follow each other, to `out` or added to it; zeros of none. */
void add_parts(Call *, float *out, int adds, const float *parts, int64_t count, int64_t deep);

#endif
