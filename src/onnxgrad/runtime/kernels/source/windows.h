/* The windows of a convolution: a big side x and a small side y, and what of x each tap of the kernel meets. */
#ifndef ONNXGRAD_WINDOWS_H
#define ONNXGRAD_WINDOWS_H

#include "kernel.h"
#include "lanes.h"

enum {
  FAR = 1 << 24,       /* no attribute is as large, and no window reaches as far */
  MOST_TAPS = 1 << 20, /* of one window */
};

static inline int64_t up(int64_t a, int64_t unit) { return (a + unit - 1) / unit; }

typedef struct {
  int64_t images, groups, m, c; /* m and c are those of one group */
  int64_t size[3], out[3], kernel[3], strides[3], dilations[3], pads[3]; /* of each axis; padding before */
} Correlation;

/* Whether a kernel knows what to do with one axis: so many taps, so far apart. */
static inline int within_reach(int64_t taps, int64_t stride, int64_t dilation, int64_t padding) {
  return taps > 0 && taps <= MOST_TAPS && stride > 0 && stride < FAR && dilation > 0 && dilation < FAR &&
         (taps - 1) * dilation < FAR && padding > -FAR && padding < FAR;
}

/* The first i ≥ 0 for which i * step + start is at least 0, and that from which on it is `size` or more; up to count. */
static inline void meeting(int64_t start, int64_t step, int64_t size, int64_t count, int64_t *first, int64_t *last) {
  *first = least(start < 0 ? up(-start, step) : 0, count);
  *last = start < size ? most(least(up(size - start, step), count), *first) : *first;
}

INLINE void clear(float *to, int64_t count) {
  int64_t k = 0;
  for (; k + LANES <= count; k += LANES) *(lanes *)(to + k) = lanes_of(0);
  for (; k < count; k++) to[k] = 0;
}

INLINE void copy(float *to, const float *from, int64_t count) {
  typedef float four __attribute__((vector_size(16), aligned(4), may_alias));
  int64_t k = 0;
  for (; k + LANES <= count; k += LANES) *(lanes *)(to + k) = *(const lanes *)(from + k);
  for (; k + 4 <= count; k += 4) *(four *)(to + k) = *(const four *)(from + k);
  for (; k < count; k++) to[k] = from[k];
}

#endif
