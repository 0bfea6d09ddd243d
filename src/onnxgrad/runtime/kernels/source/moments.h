/* Sums of numbers that lie side by side: in float over 4096 of them, in double over these. */
#ifndef ONNXGRAD_MOMENTS_H
#define ONNXGRAD_MOMENTS_H
#include <math.h>

#include "kernel.h"
#include "lanes.h"

enum { TOGETHER = 4096 };

/* The sum of x, or, where asked, that of (x - around)^2. */
INLINE double power_sum(const int squared, const float *x, int64_t count, float around) {
  const lanes arounds = lanes_of(around);
  double sum = 0;
  int64_t k = 0;
  for (int64_t start = 0; start < count; start += TOGETHER) {
    const int64_t end = least(start + TOGETHER, count);
    lanes total[4] = {{0}};
    for (; k + 4 * LANES <= end; k += 4 * LANES)
      for (int i = 0; i < 4; i++) {
        const lanes d = *(const lanes *)(x + k + i * LANES) - arounds;
        if (squared)
          total[i] += d * d;
        else
          total[i] += d;
      }
    float rest = 0;
    for (; k < end; k++) rest += squared ? (x[k] - around) * (x[k] - around) : x[k] - around;
    sum += lanes_sum((total[0] + total[1]) + (total[2] + total[3])) + rest;
  }
  return sum;
}

static inline float mean_of(const float *x, int64_t count) {
  return (float)(power_sum(0, x, count, 0) / (double)count);
}
static inline float variance_of(const float *x, int64_t count, float mean) {
  return (float)(power_sum(1, x, count, mean) / (double)count);
}

#endif
