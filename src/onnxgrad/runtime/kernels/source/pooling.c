/* The cotangent of MaxPool over two axes: g goes to the first of the largest numbers of each window; a NaN is largest,
 * and of several the last. With a ReLU before or after, nothing goes to a largest number that is not positive. */
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

/* Two vectors beside each other, of which `count` numbers are there. */
INLINE void read_two(const float *from, int64_t count, lanes to[2]) {
  to[0] = lanes_read(from, count, 0);
  to[1] = count > LANES ? lanes_read(from + LANES, count - LANES, 0) : to[0];
}

/* Two vectors, alternating, in the same way. */
INLINE void write_two(float *to, int64_t count, lanes a, lanes b) {
  lanes_write(to, count, SHUFFLE(a, b, LOW));
  if (count > LANES) lanes_write(to + LANES, count - LANES, SHUFFLE(a, b, HIGH));
}

/* The numbers of windows left … right of a vector of them, each `step` from the one before; any number for others. */
INLINE lanes spread_at(const float *from, const int64_t step, int64_t left, int64_t right) {
  lanes two[2];
  if (!left && step <= 2) {
    read_two(from, step * (right - 1) + 1, two);
    return step == 1 ? two[0] : SHUFFLE(two[0], two[1], EVEN);
  }
#define NUMBER(n) from[most(left, least(n, right - 1)) * step]
  return (lanes){EVERY(NUMBER)};
}

/* The windows of row p from q on, a vector of them at most, tap by tap. */
INLINE void compare(const Job *j, int64_t step, const float *x, const float *g, int64_t p, int64_t q, float *out) {
  const Settings *s = j->s;
  const int64_t top = p * s->strides[0] - s->pads[0], first = top < 0 ? quotient(-top, s->dilations[0]) : 0;
  const int64_t corner = (top + first * s->dilations[0]) * j->w, before = q * step - s->pads[1];
  const int64_t count = least(LANES, j->ow - q);
  const lanes_mask place = {EVERY(PLACE)};
  lanes best = {0}, sent = lanes_read(g + q, count, 0);
  lanes_mask where = ~(lanes_mask){0}; /* from the first tap of the first row that is inside */
  for (int64_t i = first; i < s->kernel[0] && top + i * s->dilations[0] < j->h; i++)
    for (int64_t k = 0; k < s->kernel[1]; k++) {
      const int64_t column = before + k * s->dilations[1], at = (i - first) * s->dilations[0] * j->w;
      const int64_t left = column < 0 ? quotient(-column, step) : 0;
      const int64_t right = column + (count - 1) * step < j->w ? count : quotient(j->w - column, step);
      if (left >= right) continue;
      const lanes here = spread_at(x + corner + at + column, step, left, right);
      const lanes_mask inside = (place >= (whole)left) & (place < (whole)right);
      const lanes_mask takes = ((here > best) | (here != here) | (where < 0)) & inside;
      best = lanes_where(takes, here, best);
      where = (takes & (whole)(at + k * s->dilations[1])) | (~takes & where);
    }
  if (s->relu) sent *= (lanes)((lanes_mask)lanes_of(1) & (best > 0));
  for (int64_t n = 0; n < count; n++)
    if (where[n] >= 0) out[corner + before + n * step + where[n]] += sent[n];
}

static void windows(const Job *j, const float *x, const float *g, int64_t p, float *out) {
  for (int64_t q = 0; q < j->ow; q += LANES)
    if (j->s->strides[1] == 2) compare(j, 2, x, g, p, q, out);
    else compare(j, j->s->strides[1], x, g, p, q, out);
}

/* Two rows of x in tiles of two by two, as many as numbers of g, a vector at most. */
INLINE void tiles(int relu, const float *x, int64_t w, const float *g, int64_t count, float *out) {
  lanes upper[2], lower[2];
  read_two(x, 2 * count, upper);
  read_two(x + w, 2 * count, lower);
  const lanes a = SHUFFLE(upper[0], upper[1], EVEN), b = SHUFFLE(upper[0], upper[1], ODD);
  const lanes c = SHUFFLE(lower[0], lower[1], EVEN), d = SHUFFLE(lower[0], lower[1], ODD);
  const lanes_mask is_b = (b > a) | (b != b);
  lanes best = lanes_where(is_b, b, a);
  const lanes_mask is_c = (c > best) | (c != c);
  best = lanes_where(is_c, c, best);
  const lanes_mask is_d = (d > best) | (d != d);
  best = lanes_where(is_d, d, best);
  const lanes_mask counts = (best > 0) | (relu - 1);
  const lanes_mask here = (lanes_mask)(lanes_read(g, count, 0) * (lanes)((lanes_mask)lanes_of(1) & counts));
  const lanes to_a = (lanes)(here & ~(is_b | is_c | is_d)), to_b = (lanes)(here & is_b & ~(is_c | is_d));
  const lanes to_c = (lanes)(here & is_c & ~is_d), to_d = (lanes)(here & is_d);
  write_two(out, 2 * count, to_a, to_b);
  write_two(out + w, 2 * count, to_c, to_d);
}

INLINE void two_by_two(int relu, const float *x, int64_t w, const float *g, int64_t count, float *out) {
  int64_t q = 0;
  for (; q + LANES <= count; q += LANES) tiles(relu, x + 2 * q, w, g + q, LANES, out + 2 * q);
  if (q < count) tiles(relu, x + 2 * q, w, g + q, count - q, out + 2 * q);
}

static void plane(void *data, int64_t from, int64_t to) {
  const Job *j = data;
  const Settings *s = j->s;
  int quick = 2 * j->oh <= j->h && 2 * j->ow <= j->w;
  for (int i = 0; i < 2; i++)
    quick = quick && s->kernel[i] == 2 && s->strides[i] == 2 && s->dilations[i] == 1 && s->pads[i] == 0;
  for (int64_t n = from; n < to; n++) {
    const float *x = j->x + n * j->h * j->w, *g = j->g + n * j->oh * j->ow;
    float *out = j->out + n * j->h * j->w;
    if (!quick || 2 * j->oh != j->h || 2 * j->ow != j->w) memset(out, 0, j->h * j->w * sizeof *out);
    for (int64_t p = 0; p < j->oh; p++, g += j->ow)
      if (!quick) windows(j, x, g, p, out);
      else two_by_two(s->relu != 0, x + 2 * p * j->w, j->w, g, j->ow, out + 2 * p * j->w);
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

static void compute(Call *call, const void *settings) {
  const Settings *s = settings;
  Shape small = shape_of(call, 0), big = shape_of(call, 1);
  int sound = big.rank == 4 && small.rank == 4 && big.dims[0] == small.dims[0] && big.dims[1] == small.dims[1];
  for (int i = 0; i < 2; i++)
    sound = sound && s->kernel[i] > 0 && s->kernel[i] < FAR && s->strides[i] > 0 && s->strides[i] < FAR &&
            s->dilations[i] > 0 && s->dilations[i] < FAR && s->pads[i] >= 0 && s->pads[i] < FAR;
  sound = sound && (!big.count || big.dims[2] < ((int64_t)1 << 30) / big.dims[3]);
  if (refused(call, !sound, "MaxPoolGrad: operands or attributes do not belong together")) return;
  Job j = {.s = s, .g = input(call, 0), .x = input(call, 1), .out = output(call, 0, &big)};
  if (call->failed || !big.count) return;
  j.h = big.dims[2], j.w = big.dims[3];
  j.oh = small.count ? small.dims[2] : 0, j.ow = small.dims[3]; /* no row of windows of nothing */
  parallel_ranges(call, big.dims[0] * big.dims[1], 4096 / least(j.h * j.w, 4096), plane, &j);
}

const Kernel pooling_kernels[] = {
    {"MaxPoolGrad", "ff", "f", sizeof(Settings), read, compute},
    {0}};
