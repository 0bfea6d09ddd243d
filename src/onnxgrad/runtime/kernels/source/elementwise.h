/* What an elementwise program can do, and the functions that take more than an instruction, on vectors.
 *
 * Numbers that the standard rounds once are rounded once (+ - * / sqrt); exp, log, erf, tanh and sigmoid are within two
 * units in the last place, and right at infinities, NaN and denormals. Each number is the same wherever it lies in
 * memory: the last, shorter vector goes through the same instructions. Polynomials: minimax fits of the relative error,
 * made for these intervals.
 */
#ifndef ONNXGRAD_ELEMENTWISE_H
#define ONNXGRAD_ELEMENTWISE_H

#include <stdint.h>
#include <string.h>

#include "exponential.h"
#include "lanes.h"

INLINE lanes magnitude(lanes x) { return (lanes)((lanes_mask)x & 0x7fffffff); }
/* x with the sign of s */
INLINE lanes signed_as(lanes x, lanes s) { return (lanes)(((lanes_mask)x & 0x7fffffff) | ((lanes_mask)s & ~0x7fffffff)); }
/* of numbers from 0 on that are neither infinite nor NaN; -103.3 or so for 0 */
INLINE lanes log_of_finite(lanes x) {
  const lanes_mask small = x < 1.17549435e-38f;
  x = lanes_where(small, x * 8388608.0f, x);
  const lanes_mask bits = (lanes_mask)((lanes_bits)x - 0x3f3504f3u); /* from 0.7071 on, so that the rest is up to 1.4142 */
  const lanes_mask n = (bits >> 23) - (small & 23);
  const lanes f = (lanes)((bits & 0x007fffff) + 0x3f3504f3) - 1.0f, e = __builtin_convertvector(n, lanes);
  lanes p = f * -0.0763449775f + 0.127615775f;
  p = p * f + -0.131601822f;
  p = p * f + 0.142017579f;
  p = p * f + -0.166233574f;
  p = p * f + 0.200012269f;
  p = p * f + -0.25000821f;
  p = p * f + 0.333333317f;
  const lanes square = f * f;
  return (((p * f) * square + e * -2.12194440e-4f) - square * 0.5f + f) + e * 0.693359375f;
}

INLINE lanes log_lanes(lanes x) {
  const lanes infinite = lanes_of(__builtin_inff());
  lanes y = log_of_finite(x);
  y = lanes_where(x == 0, -infinite, y);
  y = lanes_where(x == infinite, x, y);
  return lanes_where((x < 0) | (x != x), lanes_of(__builtin_nanf("")), y);
}

/* log(1 + u), u from 0 to 1: the logarithm of what 1 + u is rounded to, and what was rounded off */
INLINE lanes log1p_lanes(lanes u) {
  const lanes w = u + 1.0f;
  return log_of_finite(w) + (u - (w - 1.0f)) / w;
}

INLINE lanes erf_lanes(lanes x) {
  const lanes s = x * x, t = at_most(magnitude(x), 4.0f);
  lanes p = s * 8.18510673e-05f + -0.000809770738f;
  p = p * s + 0.00519695254f;
  p = p * s + -0.0268577053f;
  p = p * s + 0.11283664f;
  p = p * s + -0.376126316f;
  p = p * s + 0.128379166f;
  lanes q = t * 0.000214594945f + -0.00321997491f; /* log(erfc(t)) = q * t - t */
  q = q * t + 0.0229060294f;
  q = q * t + -0.105286852f;
  q = q * t + -0.63569937f;
  q = q * t + -0.128519952f;
  return signed_as(lanes_where(t < 0.92f, p * t + t, 1.0f - exp_lanes(q * t - t)), x);
}

INLINE lanes tanh_lanes(lanes x) {
  const lanes s = x * x, t = magnitude(x);
  lanes p = s * -0.00551516417f + 0.0204694202f;
  p = p * s + -0.0536880232f;
  p = p * s + 0.133308303f;
  p = p * s + -0.333332598f;
  return signed_as(lanes_where(t < 0.625f, (p * s) * t + t, 1.0f - 2.0f / (exp_lanes(t + t) + 1.0f)), x);
}

INLINE lanes sigmoid_lanes(lanes x) {
  const lanes z = exp_lanes(-magnitude(x));
  return lanes_where(x < 0, z, lanes_of(1)) / (z + 1.0f);
}

INLINE lanes softplus_lanes(lanes x) { return at_least(x, 0.0f) + log1p_lanes(exp_lanes(-magnitude(x))); }

/* A vector, and as many of its numbers as there are; what is beyond is 1. */
INLINE lanes part_of(const float *from, int64_t count) {
  lanes x = lanes_of(1);
  memcpy(&x, from, (size_t)count * sizeof *from);
  return x;
}

/* --- operations ------------------------------------------------------------------------------------------------------
 *
 * A register holds 32 bits for each element: a float, an integer, or all bits or none for true or false.
 * X(name, how many operands it has, kind of loop, result for operands x, y, z)
 *
 * REAL, WHOLE, NATURAL: numbers one by one, of floats, int32 and uint32, which the compiler makes vectors of: what is
 * exact is the same there. REAL_MASK and so on give true or false. VECTOR: on vectors.
 */
#define OPERATIONS(X)                                                   \
  X(ADD, 2, REAL, x + y)                                                \
  X(SUB, 2, REAL, x - y)                                                \
  X(MUL, 2, REAL, x * y)                                                \
  X(DIV, 2, REAL, x / y)                                                \
  X(MIN, 2, REAL, x < y || x != x ? x : y)                              \
  X(MAX, 2, REAL, x > y || x != x ? x : y)                              \
  X(NEG, 1, REAL, -x)                                                   \
  X(ABS, 1, REAL, __builtin_fabsf(x))                                   \
  X(SQRT, 1, REAL, __builtin_sqrtf(x))                                  \
  X(RELU, 1, REAL, x < 0 ? 0 : x)                                       \
  X(SIGN, 1, REAL, x > 0 ? 1.0f : x < 0 ? -1.0f : x + 0.0f)                 \
  X(FLOOR, 1, REAL, __builtin_floorf(x))                                \
  X(CEIL, 1, REAL, __builtin_ceilf(x))                                  \
  X(ROUND, 1, REAL, __builtin_rintf(x))                                 \
  X(EXP, 1, VECTOR, exp_lanes(x))                                       \
  X(LOG, 1, VECTOR, log_lanes(x))                                       \
  X(ERF, 1, VECTOR, erf_lanes(x))                                       \
  X(TANH, 1, VECTOR, tanh_lanes(x))                                     \
  X(SIGMOID, 1, VECTOR, sigmoid_lanes(x))                               \
  X(SOFTPLUS, 1, VECTOR, softplus_lanes(x))                             \
  X(LESS, 2, REAL_MASK, x < y)                                          \
  X(LESS_EQUAL, 2, REAL_MASK, x <= y)                                   \
  X(EQUAL, 2, REAL_MASK, x == y)                                        \
  X(TRUTH, 1, REAL_MASK, x != 0)                                        \
  X(IS_NAN, 1, REAL_MASK, x != x)                                       \
  X(SELECT, 3, NATURAL, (x & y) | (~x & z))                             \
  X(AND, 2, NATURAL, x &y)                                              \
  X(OR, 2, NATURAL, x | y)                                              \
  X(XOR, 2, NATURAL, x ^ y)                                             \
  X(NOT, 1, NATURAL, ~x)                                                \
  X(WHOLE_ADD, 2, NATURAL, x + y)                                       \
  X(WHOLE_SUB, 2, NATURAL, x - y)                                       \
  X(WHOLE_MUL, 2, NATURAL, x *y)                                        \
  X(SHIFT_LEFT, 2, NATURAL, y < 32 ? x << (y & 31) : 0)                 \
  X(SHIFT_RIGHT, 2, NATURAL, y < 32 ? x >> (y & 31) : 0)                \
  X(WHOLE_LESS, 2, WHOLE_MASK, x < y)                                   \
  X(WHOLE_LESS_EQUAL, 2, WHOLE_MASK, x <= y)                            \
  X(NATURAL_LESS, 2, NATURAL_MASK, x < y)                               \
  X(NATURAL_LESS_EQUAL, 2, NATURAL_MASK, x <= y)                        \
  X(WHOLE_EQUAL, 2, NATURAL_MASK, x == y)                               \
  X(WHOLE_TRUTH, 1, NATURAL_MASK, x != 0)                               \
  X(FLOAT_OF_WHOLE, 1, FROM_WHOLE, x)

/* An operation on `count` elements, which may go to where an operand is. Of operands whose bits are set in `single`, all
 * elements are the first one. */
typedef void Loop(int single, void *to, const void *from_x, const void *from_y, const void *from_z, int64_t count);
typedef struct {
  Loop *loop;
  int operands;
} Operation;
extern const Operation elementwise_operations[];

#endif
