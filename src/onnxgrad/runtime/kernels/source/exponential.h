/* The exponential of a vector, and vectors of which not all numbers are there. */
#ifndef ONNXGRAD_EXPONENTIAL_H
#define ONNXGRAD_EXPONENTIAL_H
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "lanes.h"

/* e^x within 2 units in the last place: 2^n * e^r, r by the polynomial of Cephes' expf. Below e^-87.3 it is 0 (a
 * denormal number takes as long as a hundred others), above e^88.3 infinity; NaN stays. */
INLINE lanes lanes_exp(lanes x) {
  const lanes shift = lanes_of(0x1.8p23f + 127); /* added to a number, leaves it rounded, plus 127, in the last bits */
  const lanes rounded = x * lanes_of(0x1.715476p0f) + shift, n = rounded - shift;
  const lanes r = (x - n * lanes_of(0x1.62e400p-1f)) - n * lanes_of(0x1.7f7d1cp-20f);
  lanes p = lanes_of(1.9875691500e-4f);
  p = p * r + lanes_of(1.3981999507e-3f);
  p = p * r + lanes_of(8.3334519073e-3f);
  p = p * r + lanes_of(4.1665795894e-2f);
  p = p * r + lanes_of(1.6666665459e-1f);
  p = p * r + lanes_of(5.0000001201e-1f);
  p = p * (r * r) + r + lanes_of(1);
  p *= (lanes)((lanes_mask)rounded << 23);
  p = lanes_where(x < lanes_of(-87.3f), lanes_of(0), p);
  return lanes_where(x > lanes_of(88.3f), lanes_of(INFINITY), p);
}

/* The first `count` numbers at `from`, all of a vector at most, and `rest` in the place of others. */
INLINE lanes lanes_read(const float *from, int64_t count, float rest) {
  if (count >= LANES) return *(const lanes *)from;
  lanes v = lanes_of(rest);
  memcpy(&v, from, (size_t)count * sizeof(float));
  return v;
}

INLINE void lanes_write(float *to, int64_t count, lanes v) {
  if (count >= LANES)
    *(lanes *)to = v;
  else
    memcpy(to, &v, (size_t)count * sizeof(float));
}

INLINE lanes lanes_most(lanes a, lanes b) { return lanes_where(a > b, a, b); }

#define LARGER(mask, a, b) (__typeof__(a))((((a) > (b)) & (mask)(a)) | (~((a) > (b)) & (mask)(b)))
typedef int lanes_mask_4 __attribute__((vector_size(16)));
typedef int lanes_mask_8 __attribute__((vector_size(32)));

INLINE float lanes_largest_4(lanes_4 v) {
  const lanes_4 half = SHUFFLE(lanes_4, v, v, 2, 3, 0, 1), pair = LARGER(lanes_mask_4, v, half);
  const float a = pair[0], b = pair[1];
  return a > b ? a : b;
}

INLINE float lanes_largest(lanes v) {
#if LANES == 16
  const lanes_8 low = SHUFFLE(lanes_8, v, v, 0, 1, 2, 3, 4, 5, 6, 7);
  const lanes_8 high = SHUFFLE(lanes_8, v, v, 8, 9, 10, 11, 12, 13, 14, 15), eight = LARGER(lanes_mask_8, low, high);
#elif LANES == 8
  const lanes_8 eight = v;
#endif
#if LANES >= 8
  const lanes_4 first = SHUFFLE(lanes_4, eight, eight, 0, 1, 2, 3);
  const lanes_4 second = SHUFFLE(lanes_4, eight, eight, 4, 5, 6, 7), four = LARGER(lanes_mask_4, first, second);
#else
  const lanes_4 four = v;
#endif
  return lanes_largest_4(four);
}

#endif
