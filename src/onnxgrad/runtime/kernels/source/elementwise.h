/* What an elementwise program can do: on floats and int32, or, in files that define DOUBLE, on doubles and int64.
 *
 * Numbers that the standard rounds once are rounded once (+ - * / sqrt). Each number is the same wherever it lies in
 * memory: the last, shorter vector goes through the same instructions. */
#pragma once
#include "lanes.h"
#ifdef DOUBLE
#include "functions_double.h"
#else
#include "exponential.h"
#endif

INLINE lanes log_lanes(lanes x) {
  const lanes infinite = lanes_of(INFINITY);
  lanes y = log_of_finite(x);
  y = lanes_where(x == 0, -infinite, y);
  y = lanes_where(x == infinite, x, y);
  return lanes_where((x < 0) | (x != x), lanes_of(NAN), y);
}

/* log(1 + u), u from 0 to 1: the logarithm of what 1 + u is rounded to, and what was rounded off */
INLINE lanes log1p_lanes(lanes u) {
  const lanes w = u + 1.0f;
  return log_of_finite(w) + (u - (w - 1.0f)) / w;
}

INLINE lanes sigmoid_lanes(lanes x) {
  const lanes z = exp_lanes(-magnitude(x));
  return lanes_where(x < 0, z, lanes_of(1)) / (z + 1.0f);
}

INLINE lanes softplus_lanes(lanes x) { return at_least(x, 0.0f) + log1p_lanes(exp_lanes(-magnitude(x))); }

/* A register holds the bits of a number for each element: a float, an integer, or all bits or none for true or false.
 * X(name, how many operands it has, kind of loop, result for operands x, y, z)
 *
 * REAL, WHOLE, NATURAL: numbers one by one, of floats, integers and those without a sign, which the compiler makes
 * vectors of: what is exact is the same there. REAL_MASK and so on give true or false. VECTOR: on vectors. TURN: as
 * `turned` is. */
enum { BITS = 8 * sizeof(natural) };
static const real ROOT = 0.70710678118654752440, PEAK = -0.91893853320467274178; /* of 1/2; log of 1 / sqrt(2 pi) */
#define CALL(X, name, function) X(name, 1, REAL, OF_REAL(function)(x))
#define OPERATIONS(X)                                                                                       \
  X(ADD, 2, REAL, x + y)                                                                                    \
  X(SUB, 2, REAL, x - y)                                                                                    \
  X(MUL, 2, REAL, x * y)                                                                                    \
  X(DIV, 2, REAL, x / y)                                                                                    \
  X(MIN, 2, REAL, x < y || x != x ? x : y)                                                                  \
  X(MAX, 2, REAL, x > y || x != x ? x : y)                                                                  \
  X(NEG, 1, REAL, -x)                                                                                       \
  X(ABS, 1, REAL, OF_REAL(fabs)(x))                                                                         \
  X(SQRT, 1, REAL, OF_REAL(sqrt)(x))                                                                        \
  X(RELU, 1, REAL, x < 0 ? 0 : x)                                                                           \
  X(SIGN, 1, REAL, x > 0 ? 1.0f : x < 0 ? -1.0f : x + 0.0f)                                                 \
  X(FLOOR, 1, REAL, OF_REAL(floor)(x))                                                                      \
  X(CEIL, 1, REAL, OF_REAL(ceil)(x))                                                                        \
  X(ROUND, 1, REAL, OF_REAL(rint)(x))                                                                       \
  X(EXP, 1, VECTOR, exp_lanes(x))                                                                           \
  X(LOG, 1, VECTOR, log_lanes(x))                                                                           \
  X(POW, 2, REAL, OF_REAL(pow)(x, y))                                                                       \
  X(SIN, 1, TURN, turned(x, 0))                                                                             \
  X(COS, 1, TURN, turned(x, 1))                                                                             \
  CALL(X, TAN, tan) CALL(X, ASIN, asin) CALL(X, ACOS, acos) CALL(X, ATAN, atan)                             \
  CALL(X, SINH, sinh) CALL(X, COSH, cosh) CALL(X, ASINH, asinh) CALL(X, ACOSH, acosh) CALL(X, ATANH, atanh) \
  X(ERF, 1, VECTOR, erf_lanes(x))                                                                           \
  X(NORMAL, 1, VECTOR, erf_lanes(x * ROOT) * 0.5f + 0.5f)                                                   \
  X(BELL, 1, VECTOR, exp_lanes(PEAK - x * ROOT * (x * ROOT)))                                               \
  X(TANH, 1, VECTOR, tanh_lanes(x))                                                                         \
  X(SIGMOID, 1, VECTOR, sigmoid_lanes(x))                                                                   \
  X(SOFTPLUS, 1, VECTOR, softplus_lanes(x))                                                                 \
  X(LESS, 2, REAL_MASK, x < y)                                                                              \
  X(LESS_EQUAL, 2, REAL_MASK, x <= y)                                                                       \
  X(EQUAL, 2, REAL_MASK, x == y)                                                                            \
  X(TRUTH, 1, REAL_MASK, x != 0)                                                                            \
  X(IS_NAN, 1, REAL_MASK, x != x)                                                                           \
  X(SELECT, 3, NATURAL, (x & y) | (~x & z))                                                                 \
  X(AND, 2, NATURAL, x & y) X(OR, 2, NATURAL, x | y) X(XOR, 2, NATURAL, x ^ y) X(NOT, 1, NATURAL, ~x)       \
  X(WHOLE_ADD, 2, NATURAL, x + y) X(WHOLE_SUB, 2, NATURAL, x - y) X(WHOLE_MUL, 2, NATURAL, x * y)           \
  X(SHIFT_LEFT, 2, NATURAL, y < BITS ? x << (y & (BITS - 1)) : 0)                                           \
  X(SHIFT_RIGHT, 2, NATURAL, y < BITS ? x >> (y & (BITS - 1)) : 0)                                          \
  X(WHOLE_LESS, 2, WHOLE_MASK, x < y) X(WHOLE_LESS_EQUAL, 2, WHOLE_MASK, x <= y)                            \
  X(NATURAL_LESS, 2, NATURAL_MASK, x < y) X(NATURAL_LESS_EQUAL, 2, NATURAL_MASK, x <= y)                    \
  X(WHOLE_EQUAL, 2, NATURAL_MASK, x == y)                                                                   \
  X(WHOLE_TRUTH, 1, NATURAL_MASK, x != 0)                                                                   \
  X(FLOAT_OF_WHOLE, 1, FROM_WHOLE, x)

/* An operation on `count` elements, which may go to where an operand is. Of operands whose bits are set in `single`, all
 * elements are the first one. */
typedef void Loop(int single, void *to, const void *from_x, const void *from_y, const void *from_z, int64_t count);
typedef struct {
  Loop *loop;
  int operands;
} Operation;
extern const Operation elementwise_operations[];
