/* Functions of vectors of floats that take more than an instruction.
 *
 * exp, log, erf, tanh and sigmoid are within two units in the last place, and right at infinities, NaN and denormals.
 * Polynomials: minimax fits of the relative error, made for these intervals. */
#pragma once
#include <math.h>
#include "lanes.h"

#define OF_REAL(function) function##f

/* e^r for r = x - n log 2, |r| < 0.35, where n is a whole number */
INLINE lanes exp_of_rest(lanes x, lanes n) {
  const lanes r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  const lanes p = ((((r * 0.0013814602f + 0.0083687152f) * r + 0.0416683879f) * r + 0.166665206f) * r + 0.499999934f);
  return (p * r) * r + r + 1.0f;
}

INLINE lanes exp_lanes(lanes x) {
  x = at_least(at_most(x, 89.0f), -104.0f);
#if defined(__AVX512F__)
  const __m512 n = _mm512_roundscale_ps((__m512)(x * 1.44269502f), 8);
  return (lanes)_mm512_scalef_ps((__m512)exp_of_rest(x, (lanes)n), n);
#else
  const float magic = 12582912.0f; /* 1.5 * 2^23: a sum with it is rounded to an integer, in its last bits */
  const lanes shifted = x * 1.44269502f + magic, y = exp_of_rest(x, shifted - magic);
  const lanes_mask n = (lanes_mask)((lanes_bits)shifted - (lanes_bits)lanes_of(magic)), half = n >> 1;
  return y * (lanes)((lanes_bits)(half + 127) << 23) * (lanes)((lanes_bits)(n - half + 127) << 23);
#endif
}

/* The same, but 0 below e^-87.3: a denormal number takes as long as a hundred others. */
INLINE lanes lanes_exp(lanes x) { return lanes_where(x < -87.3f, lanes_of(0), exp_lanes(at_least(x, -87.3f))); }

/* of numbers from 0 on that are neither infinite nor NaN; -103.3 or so for 0 */
INLINE lanes log_of_finite(lanes x) {
  const lanes_mask small = x < 1.17549435e-38f;
  x = lanes_where(small, x * 8388608.0f, x);
  const lanes_mask bits = (lanes_mask)((lanes_bits)x - 0x3f3504f3u); /* from 0.7071 on, so that the rest is up to 1.4142 */
  const lanes_mask n = (bits >> 23) - (small & 23);
  const lanes f = (lanes)((bits & 0x007fffff) + 0x3f3504f3) - 1.0f, e = __builtin_convertvector(n, lanes);
  const lanes square = f * f, p = POLYNOMIAL(f, -0.0763449775f, 0.127615775f, -0.131601822f, 0.142017579f,
                                             -0.166233574f, 0.200012269f, -0.25000821f, 0.333333317f);
  return (((p * f) * square + e * -2.12194440e-4f) - square * 0.5f + f) + e * 0.693359375f;
}

INLINE lanes erf_lanes(lanes x) {
  const lanes s = x * x, t = at_most(magnitude(x), 4.0f);
  const lanes p = POLYNOMIAL(s, 8.18510673e-05f, -0.000809770738f, 0.00519695254f, -0.0268577053f, 0.11283664f,
                             -0.376126316f, 0.128379166f);
  const lanes q = POLYNOMIAL(t, 0.000214594945f, -0.00321997491f, 0.0229060294f, -0.105286852f, -0.63569937f,
                             -0.128519952f); /* log(erfc(t)) = q * t - t */
  return signed_as(lanes_where(t < 0.92f, p * t + t, 1.0f - exp_lanes(q * t - t)), x);
}

INLINE lanes tanh_lanes(lanes x) {
  const lanes s = x * x, t = magnitude(x);
  const lanes p = POLYNOMIAL(s, -0.00551516417f, 0.0204694202f, -0.0536880232f, 0.133308303f, -0.333332598f);
  return signed_as(lanes_where(t < 0.625f, (p * s) * t + t, 1.0f - 2.0f / (exp_lanes(t + t) + 1.0f)), x);
}

/* The sine of x for quarter 0, the cosine for 1. */
#define TURN REAL
INLINE real turned(real x, const int quarter) { return quarter ? cosf(x) : sinf(x); }
