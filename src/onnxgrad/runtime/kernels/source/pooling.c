/* The cotangent of MaxPool over two axes: g goes to the first of the largest numbers of each window; a NaN is largest,
 * and of several the last. With a ReLU before or after, nothing goes to a largest number that is not positive.
 */
#include <math.h>
#include <string.h>

#include "kernel.h"
#include "lanes.h"

enum { FAR = 1 << 24 }; /* no attribute is as large */

typedef struct {
  int64_t kernel[2], strides[2], dilations[2], pads[2], relu;
} Settings;

typedef struct {
  const Settings *s;
  const float *g, *x;
  float *out;
  int64_t h, w, oh, ow;
} Job;

/* The row or column of the first tap of window p that is inside, and that after the last. */
static void inside(const Settings *s, int axis, int64_t p, int64_t size, int64_t *first, int64_t *last) {
  const int64_t start = p * s->strides[axis] - s->pads[axis], step = s->dilations[axis];
  *first = start >= 0 ? start : start + (-start + step - 1) / step * step;
  *last = least(start + (s->kernel[axis] - 1) * step + 1, size);
}

/* What goes to a largest number. */
static float passed(const Settings *s, float g, float x) { return s->relu ? g * (x > 0 ? 1.0f : 0.0f) : g; }

static void window(const Job *j, const float *x, float g, int64_t p, int64_t q, float *out) {
  int64_t top, bottom, left, right, best = -1;
  inside(j->s, 0, p, j->h, &top, &bottom);
  inside(j->s, 1, q, j->w, &left, &right);
  for (int64_t row = top; row < bottom; row += j->s->dilations[0])
    for (int64_t column = left; column < right; column += j->s->dilations[1]) {
      const int64_t at = row * j->w + column;
      if (best < 0 || x[at] > x[best] || isnan(x[at])) best = at;
    }
  if (best >= 0) out[best] += passed(j->s, g, x[best]);
}

#define WHERE(N, mask, a, b) (floats_##N)((mask & (bits_##N)a) | (~mask & (bits_##N)b))

/* Two rows of x in tiles of two by two, from tile q on as far as whole vectors of N go: where that ends. */
#define TILES(N)                                                                                                       \
  typedef float floats_##N __attribute__((vector_size(N * 4), aligned(4), may_alias));                                 \
  typedef int bits_##N __attribute__((vector_size(N * 4), aligned(4), may_alias));                                     \
  INLINE int64_t tiles_##N(int relu, const float *x, int64_t w, const float *g, int64_t q, int64_t end, float *out) {  \
    for (; q + N <= end; q += N) {                                                                                     \
      const floats_##N *upper = (const floats_##N *)(x + 2 * q), *lower = (const floats_##N *)(x + w + 2 * q);         \
      const floats_##N a = SHUFFLE(floats_##N, upper[0], upper[1], EVEN_##N);                                          \
      const floats_##N b = SHUFFLE(floats_##N, upper[0], upper[1], ODD_##N);                                           \
      const floats_##N c = SHUFFLE(floats_##N, lower[0], lower[1], EVEN_##N);                                          \
      const floats_##N d = SHUFFLE(floats_##N, lower[0], lower[1], ODD_##N);                                           \
      const bits_##N is_b = (b > a) | (b != b);                                                                        \
      floats_##N best = WHERE(N, is_b, b, a);                                                                          \
      const bits_##N is_c = (c > best) | (c != c);                                                                     \
      best = WHERE(N, is_c, c, best);                                                                                  \
      const bits_##N is_d = (d > best) | (d != d);                                                                     \
      best = WHERE(N, is_d, d, best);                                                                                  \
      const bits_##N ones = (bits_##N)((floats_##N){0} + 1), counts = (best > 0) | (relu - 1);                         \
      const bits_##N here = (bits_##N)(*(const floats_##N *)(g + q) * (floats_##N)(ones & counts));                    \
      const floats_##N to_a = (floats_##N)(here & ~(is_b | is_c | is_d));                                              \
      const floats_##N to_b = (floats_##N)(here & is_b & ~(is_c | is_d));                                              \
      const floats_##N to_c = (floats_##N)(here & is_c & ~is_d), to_d = (floats_##N)(here & is_d);                     \
      floats_##N *above = (floats_##N *)(out + 2 * q), *below = (floats_##N *)(out + w + 2 * q);                       \
      above[0] = SHUFFLE(floats_##N, to_a, to_b, LOW_##N);                                                             \
      above[1] = SHUFFLE(floats_##N, to_a, to_b, HIGH_##N);                                                            \
      below[0] = SHUFFLE(floats_##N, to_c, to_d, LOW_##N);                                                             \
      below[1] = SHUFFLE(floats_##N, to_c, to_d, HIGH_##N);                                                            \
    }                                                                                                                  \
    return q;                                                                                                          \
  }

TILES(4)
#if LANES >= 8
TILES(8)
#endif
#if LANES == 16
TILES(16)
#endif

static int64_t two_by_two(int relu, const float *x, int64_t w, const float *g, int64_t end, float *out) {
  int64_t q = 0;
#if LANES == 16
  q = tiles_16(relu, x, w, g, q, end, out);
#endif
#if LANES >= 8
  q = tiles_8(relu, x, w, g, q, end, out);
#endif
  return tiles_4(relu, x, w, g, q, end, out);
}

static void plane(void *data, int64_t from, int64_t to) {
  const Job *j = data;
  const Settings *s = j->s;
  int quick = 1;
  for (int i = 0; i < 2; i++)
    quick = quick && s->kernel[i] == 2 && s->strides[i] == 2 && s->dilations[i] == 1 && s->pads[i] == 0;
  quick = quick && 2 * j->oh <= j->h && 2 * j->ow <= j->w;
  for (int64_t n = from; n < to; n++) {
    const float *x = j->x + n * j->h * j->w, *g = j->g + n * j->oh * j->ow;
    float *out = j->out + n * j->h * j->w;
    if (!quick || 2 * j->oh != j->h || 2 * j->ow != j->w || j->ow % 4) memset(out, 0, j->h * j->w * sizeof *out);
    for (int64_t p = 0; p < j->oh; p++, g += j->ow) {
      int64_t q = quick ? two_by_two(s->relu != 0, x + 2 * p * j->w, j->w, g, j->ow, out + 2 * p * j->w) : 0;
      for (; q < j->ow; q++) window(j, x, g[q], p, q, out);
    }
  }
}

static void read(Attributes *from, void *settings) {
  Settings *s = settings;
  attribute_ints(from, "kernel", s->kernel, 2);
  attribute_ints(from, "strides", s->strides, 2);
  attribute_ints(from, "dilations", s->dilations, 2);
  attribute_ints(from, "pads", s->pads, 2);
  s->relu = attribute_int(from, "relu");
}

/* (g, x) */
static void compute(Call *call, const void *settings) {
  const Settings *s = settings;
  const Shape small = shape_of(call, 0), big = shape_of(call, 1);
  int sound = big.rank == 4 && small.rank == 4 && big.dims[0] == small.dims[0] && big.dims[1] == small.dims[1];
  for (int i = 0; i < 2; i++)
    sound = sound && s->kernel[i] > 0 && s->kernel[i] < FAR && s->strides[i] > 0 && s->strides[i] < FAR &&
            s->dilations[i] > 0 && s->dilations[i] < FAR && s->pads[i] >= 0 && s->pads[i] < FAR;
  if (!call->failed && !sound) fail(call, "MaxPoolGrad: operands or attributes do not belong together");
  Job j = {.s = s, .g = input(call, 0), .x = input(call, 1), .out = output(call, 0, &big)};
  if (call->failed || !big.count) return;
  if (!small.count) {
    memset(j.out, 0, (size_t)big.count * sizeof *j.out);
    return;
  }
  j.h = big.dims[2];
  j.w = big.dims[3];
  j.oh = small.dims[2];
  j.ow = small.dims[3];
  parallel_ranges(call, big.dims[0] * big.dims[1], 4096 / least(j.h * j.w, 4096), plane, &j);
}

const Kernel pooling_kernels[] = {
    {"MaxPoolGrad", "ff", "f", sizeof(Settings), read, compute},
    {0},
};
