/* Functions of vectors of doubles that take more than an instruction, within two units in the last place.
 *
 * exp, log, tanh, erf up to 1: the rational approximations of Cephes (Moshier 1989). sin, cos: the polynomials and the
 * splitting of pi of fdlibm (Sun 1993). erf from 1 on: Cody (1969), see `double_erf.py`. */
#pragma once
#include <math.h>
#include "lanes.h"

#define OF_REAL(function) function
static const double MAGIC = 6755399441055744.0; /* 1.5 * 2^52: a sum with it is rounded to an integer, in its last bits */

INLINE lanes exp_lanes(lanes x) {
  x = at_least(at_most(x, 710.0), -746.0);
  const lanes shifted = x * 1.4426950408889634 + MAGIC, rounded = shifted - MAGIC;
  const lanes r = (x - rounded * 0.693145751953125) - rounded * 1.42860682030941723212e-6, s = r * r;
  const lanes p = r * POLYNOMIAL(s, 1.26177193074810590878e-4, 3.02994407707441961300e-2, 1.0);
  const lanes q = POLYNOMIAL(s, 3.00198505138664455042e-6, 2.52448340349684104192e-3, 2.27265548208155028766e-1, 2.0);
  const lanes_mask n = (lanes_mask)((lanes_bits)shifted - (lanes_bits)lanes_of(MAGIC)), half = n >> 1;
  return (1.0 + 2.0 * (p / (q - p))) * (lanes)((lanes_bits)(half + 1023) << 52) *
         (lanes)((lanes_bits)(n - half + 1023) << 52);
}

/* of numbers from 0 on that are neither infinite nor NaN; finite for 0 */
INLINE lanes log_of_finite(lanes x) {
  const natural least = 0x3fe6a09e667f3bcd; /* 0.7071: the rest is up to 1.4142 */
  const lanes_mask small = x < 2.2250738585072014e-308;
  x = lanes_where(small, x * 0x1p52, x);
  const lanes_mask bits = (lanes_mask)((lanes_bits)x - least), n = (bits >> 52) - (small & 52);
  const lanes f = (lanes)(((lanes_bits)bits & 0x000fffffffffffff) + least) - 1.0;
  const lanes e = (lanes)(n + (lanes_mask)lanes_of(MAGIC)) - MAGIC, s = f * f;
  const lanes p = POLYNOMIAL(f, 1.01875663804580931796e-4, 4.97494994976747001425e-1, 4.70579119878881725854e0,
                             1.44989225341610930846e1, 1.79368678507819816313e1, 7.70838733755885391666e0);
  const lanes q = POLYNOMIAL(f, 1.0, 1.12873587189167450590e1, 4.52279145837532221105e1, 8.29875266912776603211e1,
                             7.11544750618563894466e1, 2.31251620126765340583e1);
  return (f * (s * p / q) - e * 2.121944400546905827679e-4 - s * 0.5 + f) + e * 0.693359375;
}

INLINE lanes erf_lanes(lanes x) {
  const lanes t = at_most(magnitude(x), 6.0), s = t * t;
  const lanes p = POLYNOMIAL(s, -1.125, -28.151954695473584, -496.5016737822875, -2936.6089624766837,
                             -18454.29992793468, 166.48275756795283); /* that of Cephes - 1.125 q */
  const lanes q = POLYNOMIAL(s, 1.0, 3.35617141647503099647e1, 5.21357949780152679795e2, 4.59432382970980127987e3,
                             2.26290000613890934246e4, 4.92673942608635921086e4);
  const lanes u = POLYNOMIAL(t, 2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594,
                             6.61191906371416295e1, 2.98635138197400131e2, 8.81952221241769090e2,
                             1.71204761263407058e3, 2.05107837782607147e3, 1.23033935479799725e3);
  const lanes v = POLYNOMIAL(t, 1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2,
                             1.62138957456669019e3, 3.29079923573345963e3, 4.36261909014324716e3,
                             3.43936767414372164e3, 1.23033935480374942e3);
  return signed_as(lanes_where(t < 1.0, t * (p / q) + t * 1.125, 1.0 - exp_lanes(-s) * (u / v)), x);
}

INLINE lanes tanh_lanes(lanes x) {
  const lanes t = magnitude(x), s = t * t;
  const lanes p = POLYNOMIAL(s, -9.64399179425052238628e-1, -9.92877231001918586564e1, -1.61468768441708447952e3);
  const lanes q = POLYNOMIAL(s, 1.0, 1.12811678491632931402e2, 2.23548839060100448583e3, 4.84406305325125486048e3);
  return signed_as(lanes_where(t < 0.625, t * (s * p / q) + t, 1.0 - 2.0 / (exp_lanes(t + t) + 1.0)), x);
}

/* The sine of x for quarter 0, the cosine for 1; beyond 10^6, of each number by the C library. */
#define TURN VECTOR
INLINE lanes turned(lanes x, const int quarter) {
  const lanes t = magnitude(x), shifted = t * 0.63661977236758134308 + MAGIC, n = shifted - MAGIC;
  const lanes a = t - n * 1.57079632673412561417, b = a - n * 6.07710050630396597660e-11;
  const lanes c = ((a - b) - n * 6.07710050630396597660e-11) - n * 2.02226624879595063154e-21; /* the rest of b */
  const lanes r = b + c, s = r * r;
  const lanes sine = POLYNOMIAL(s, 1.58969099521155010221e-10, -2.50507602534068634195e-8, 2.75573137070700676789e-6,
                                -1.98412698298579493134e-4, 8.33333333332248946124e-3, -1.66666666666666324348e-1);
  const lanes cosine = POLYNOMIAL(s, -1.13596475577881948265e-11, 2.08757232129817482790e-9,
                                  -2.75573143513906633035e-7, 2.48015872894767294178e-5, -1.38888888888741095749e-3,
                                  4.16666666666666019037e-2);
  const lanes half = s * 0.5, rest = 1.0 - half;
  const lanes_bits at = (lanes_bits)shifted + quarter, sign = (at << 62) ^ (quarter ? (lanes_bits){0} : (lanes_bits)x);
  lanes y = lanes_where((at & 1) == 0, r + (r * s * sine + (c - (r - b))), rest + (1.0 - rest - half + s * s * cosine));
  y = (lanes)((lanes_bits)y ^ (sign & (natural)1 << 63));
  const lanes_mask far = t > 1e6;
  if (lanes_sum(lanes_where(far, lanes_of(1), lanes_of(0))) > 0)
    for (int k = 0; k < LANES; k++)
      if (far[k]) y[k] = quarter ? cos(x[k]) : sin(x[k]);
  return y;
}
