/* Sums of numbers: in float over some 4096 of them, in double over these. */
#ifndef ONNXGRAD_MOMENTS_H
#define ONNXGRAD_MOMENTS_H
#include <math.h>

#include "kernel.h"
#include "lanes.h"

enum { TOGETHER = 4096 };

/* The sum of x, or, where asked, that of (x - around)^2, over `runs` of `count` numbers that begin `stride` apart. */
INLINE double power_sums(const int squared, const real *x, int64_t runs, int64_t stride, int64_t count, real around) {
  const lanes arounds = lanes_of(around);
  lanes total[4] = {{0}};
  double sum = 0;
  for (int64_t run = 0, numbers = 0; run < runs; run++, x += stride)
    for (int64_t k = 0, start = 0; start < count; start += TOGETHER) {
      const int64_t end = least(start + TOGETHER, count);
      for (; k + 4 * LANES <= end; k += 4 * LANES)
        for (int i = 0; i < 4; i++) {
          lanes d = *(const lanes *)(x + k + i * LANES) - arounds;
          if (squared) d *= d;
          total[i] += d;
        }
      for (; k + LANES <= end; k += LANES) {
        lanes d = *(const lanes *)(x + k) - arounds;
        if (squared) d *= d;
        total[0] += d;
      }
      real rest = 0;
      for (; k < end; k++) rest += squared ? (x[k] - around) * (x[k] - around) : x[k] - around;
      sum += rest;
      if ((numbers += end - start) < TOGETHER) continue;
      sum += lanes_sum((total[0] + total[1]) + (total[2] + total[3]));
      for (int i = 0; i < 4; i++) total[i] = lanes_of(0);
      numbers = 0;
    }
  return sum + lanes_sum((total[0] + total[1]) + (total[2] + total[3]));
}

INLINE double power_sum(const int squared, const real *x, int64_t count, real around) {
  return power_sums(squared, x, 1, 0, count, around);
}

#endif
