/* The windows of a convolution: a big side x and a small side y, and what of x each tap of the kernel meets.
 *
 * With strides, x is seen as its phases, in each of which taps move by ones: number q of phase b of a row of x is
 * number q * stride + b of that row with its padding.
 */
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
  int64_t h, w, oh, ow, kh, kw;
  int64_t sh, sw, dh, dw, ph, pw; /* strides, dilations, padding before */
} Correlation;

/* What two of the kernels are told of them alike. */
typedef struct {
  int64_t group, strides[2], dilations[2], pads[2];
} Windows;

static inline void read_windows(Attributes *from, Windows *windows) {
  windows->group = attribute_int(from, "group");
  attribute_ints(from, "strides", windows->strides, 2);
  attribute_ints(from, "dilations", windows->dilations, 2);
  attribute_ints(from, "pads", windows->pads, 2);
}

/* Where a row of a phase begins to hold numbers, and where it ends. */
static inline int64_t left_of(const Correlation *at, int64_t pitch, int64_t phase) {
  return phase < at->pw ? least(pitch, up(at->pw - phase, at->sw)) : 0;
}
static inline int64_t right_of(const Correlation *at, int64_t pitch, int64_t phase) {
  return phase < at->pw + at->w ? most(least(pitch, up(at->pw + at->w - phase, at->sw)), left_of(at, pitch, phase)) : 0;
}

/* Whether a kernel knows what to do with one axis: so many taps, so far apart. */
static inline int within_reach(int64_t taps, int64_t stride, int64_t dilation, int64_t padding) {
  return taps > 0 && taps <= MOST_TAPS && stride > 0 && stride < FAR && dilation > 0 && dilation < FAR &&
         (taps - 1) * dilation < FAR && padding > -FAR && padding < FAR;
}

/* What some axis is laid out in: phase k is that of the taps k, k + count, k + 2 * count, … */
typedef struct {
  int64_t count, period; /* how many phases are in use, and how many there are */
  int64_t step, inverse; /* phase k is number k * dilation % stride: a multiple of `step` */
  int64_t furthest;      /* how far on in its phase the last tap is */
} Phases;

/* The phases of `taps` taps, their numbers in `found`, and how far on in its phase each tap is. */
static inline Phases phases_of(int64_t taps, int64_t stride, int64_t dilation, int64_t *found, int64_t *on) {
  int64_t step = stride, rest = dilation % stride;
  while (rest) { /* Euclid */
    const int64_t next = step % rest;
    step = rest, rest = next;
  }
  Phases all = {.period = stride / step, .step = step, .furthest = (taps - 1) * dilation / stride};
  all.count = least(taps, all.period);
  for (int64_t k = 0; k < all.count; k++) found[k] = k * dilation % stride;
  for (int64_t i = 0; i < taps; i++) on[i] = i * dilation / stride;
  /* dilation / step to the power -1 modulo the period, by Euclid once more */
  int64_t a = dilation / step % all.period, b = all.period, u = 1, v = 0;
  while (b) {
    const int64_t quotient = a / b, c = a % b, w = u - quotient * v;
    a = b, b = c, u = v, v = w;
  }
  all.inverse = (u % all.period + all.period) % all.period;
  return all;
}

/* Which phase has this number; `count` if none in use has. */
static inline int64_t phase_at(const Phases *all, int64_t number) {
  return number % all->step ? all->count : least(number / all->step * all->inverse % all->period, all->count);
}

/* The first i ≥ 0 for which i * step + start is at least 0, and that from which on it is `size` or more; up to count. */
static inline void meeting(int64_t start, int64_t step, int64_t size, int64_t count, int64_t *first, int64_t *last) {
  *first = least(start < 0 ? up(-start, step) : 0, count);
  *last = start < size ? most(least(up(size - start, step), count), *first) : *first;
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
