/* The windows of a convolution: a big side x and a small side y, and what of x each tap of the kernel meets.
 *
 * With strides, x is seen as its phases, in each of which taps move by ones: number q of phase b of a row of x is
 * number q * stride + b of that row with its padding.
 */
#ifndef ONNXGRAD_WINDOWS_H
#define ONNXGRAD_WINDOWS_H

#include "kernel.h"
#include "lanes.h"

enum { FAR = 1 << 24 }; /* no attribute is as large */

static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t up(int64_t a, int64_t unit) { return (a + unit - 1) / unit; }

typedef struct {
  int64_t images, groups, m, c; /* m and c are those of one group */
  int64_t h, w, oh, ow, kh, kw;
  int64_t sh, sw, dh, dw, ph, pw; /* strides, dilations, padding before */
} Correlation;

/* Where a row of a phase begins to hold numbers, and where it ends. */
static inline int64_t left_of(const Correlation *at, int64_t pitch, int64_t phase) {
  return phase < at->pw ? least(pitch, up(at->pw - phase, at->sw)) : 0;
}
static inline int64_t right_of(const Correlation *at, int64_t pitch, int64_t phase) {
  return phase < at->pw + at->w ? most(least(pitch, up(at->pw + at->w - phase, at->sw)), left_of(at, pitch, phase)) : 0;
}

/* The phase of each of `taps` taps, and how far on in it the tap is; how many phases there are. */
static inline int64_t phases_of(int64_t taps, int64_t stride, int64_t dilation, int64_t *found, int64_t *which,
                                int64_t *on, int64_t *furthest) {
  int64_t count = 0;
  *furthest = 0;
  for (int64_t i = 0; i < taps; i++) {
    int64_t k = 0;
    while (k < count && found[k] != i * dilation % stride) k++;
    if (k == count) found[count++] = i * dilation % stride;
    which[i] = k;
    on[i] = i * dilation / stride;
    *furthest = most(*furthest, on[i]);
  }
  return count;
}

/* How far rows are apart. The zeros at the left of a row are also those at the right of the one before. */
static inline int64_t pitch_of(const Correlation *at, const int64_t *phases, int64_t count, int64_t widest) {
  int64_t shared = widest, needed = at->ow;
  for (int64_t b = 0; b < count; b++) {
    shared = least(shared, left_of(at, widest, phases[b]));
    needed = most(needed, right_of(at, widest, phases[b]));
  }
  return most(widest - shared, needed);
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
