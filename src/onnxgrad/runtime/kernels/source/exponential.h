/* The exponential of a vector, and vectors of which not all numbers are there. */
#ifndef ONNXGRAD_EXPONENTIAL_H
#define ONNXGRAD_EXPONENTIAL_H
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#include "lanes.h"

typedef unsigned lanes_bits __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

/* the smaller, and the larger one; NaN where x is */
#if defined(__AVX512F__)
INLINE lanes at_most(lanes x, float y) { return (lanes)_mm512_min_ps(_mm512_set1_ps(y), (__m512)x); }
INLINE lanes at_least(lanes x, float y) { return (lanes)_mm512_max_ps(_mm512_set1_ps(y), (__m512)x); }
#elif defined(__AVX__)
INLINE lanes at_most(lanes x, float y) { return (lanes)_mm256_min_ps(_mm256_set1_ps(y), (__m256)x); }
INLINE lanes at_least(lanes x, float y) { return (lanes)_mm256_max_ps(_mm256_set1_ps(y), (__m256)x); }
#else
INLINE lanes at_most(lanes x, float y) { return lanes_where(x > y, lanes_of(y), x); }
INLINE lanes at_least(lanes x, float y) { return lanes_where(x < y, lanes_of(y), x); }
#endif

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
