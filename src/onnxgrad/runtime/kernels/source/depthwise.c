/* Depthwise convolutions over one axis or two, and their transposes: each channel is a group of its own.
 *
 *   y[m, p] = sum over t of w[m, t] * x[m, p * stride + t * dilation - padding]
 *
 * Vectors of channels are multiplied, of pixels with zeros around them; of a transpose also with zeros between them, and
 * with the taps in the opposite order. */
#include "winograd.h"

/* Numbers of a box, so that they stay near the processor; those that it reads, at most; places that are summed together. */
enum { ROOM = 1 << 15, MOST_READ = 1 << 26, SOME = 8, SMALL = 4 };

typedef struct {
  Convolution v;
  int64_t places[4], box[4]; /* images, vectors of channels, rows and columns of y; those that are made together */
  int64_t reach[2], along[2], apart[2], before[2]; /* pixels that a box reads, from place to place, from x to x, of padding */
} Job;

INLINE void slide(const int some, const Job *j, const float *x, const float *w, int64_t next, lanes shift, float *to) {
  const Correlation *at = &j->v.at;
  lanes sum[SOME];
#pragma GCC unroll 8
  for (int i = 0; i < some; i++) sum[i] = shift;
  for (int64_t p = 0; p < at->kernel[1]; p++, x += at->dilations[1] * j->reach[1] * LANES) {
    const float *from = x;
    for (int64_t q = 0; q < at->kernel[2]; q++, from += at->dilations[2] * LANES, w += next) {
      const lanes here = *(const lanes *)w;
#pragma GCC unroll 8
      for (int i = 0; i < some; i++) sum[i] += here * *(const lanes *)(from + i * j->along[1] * LANES);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < some; i++) *(lanes *)(to + i * LANES) = sum[i];
}

static void task(void *data, int64_t index, float *space) {
  const Job *j = data;
  const Convolution *v = &j->v;
  int64_t corner[4], size[4];
  find_box(j->places, j->box, index, corner, size);
  const int64_t channel = corner[1] * LANES, some = least(LANES, v->at.groups - channel), taps = v->at.kernel[1] * v->at.kernel[2];
  const int64_t first = corner[0] * v->at.groups + channel, plane = v->in[1] * v->in[2], rows = size[2], width = size[3];
  float *x = space + taps * LANES, *pixels = x + j->reach[0] * j->reach[1] * LANES;
  turn_rows(space, LANES, LANES, taps, taps, v->w + channel * taps, taps, some, taps);
  lay_pixels(x, j->reach[0], j->reach[1], LANES, v->x + first * plane, some, plane, v->in[1], v->in[2],
             corner[2] * j->along[0] - j->before[0], corner[3] * j->along[1] - j->before[1], j->apart[0], j->apart[1]);
  const lanes shift = v->bias ? lanes_read(v->bias + channel, some, 0) : lanes_of(0);
  const float *w = v->turned ? space + (taps - 1) * LANES : space;
  const int64_t next = v->turned ? -LANES : LANES, together = width >= SOME ? SOME : width >= SMALL ? SMALL : 1;
  for (int64_t p = 0; p < rows; p++)
    for (int64_t q = 0; q < width; q += together) {
      const int64_t column = least(q, width - together); /* the last ones, some of them once more */
      const float *from = x + (p * j->along[0] * j->reach[1] + column * j->along[1]) * LANES;
      float *to = pixels + (p * width + column) * LANES;
      if (together == SOME) slide(SOME, j, from, w, next, shift, to);
      else if (together == SMALL) slide(SMALL, j, from, w, next, shift, to);
      else slide(1, j, from, w, next, shift, to);
    }
  const int64_t out = v->out[1] * v->out[2], runs = width == v->out[2] ? 1 : rows, length = rows * width / runs;
  float *y = v->y + first * out + corner[2] * v->out[2] + corner[3];
  for (int64_t r = 0; r < runs; r++)
    turn_rows(y + r * v->out[2], out, length, some, some, pixels + r * width * LANES, LANES, length, some);
}

static void compute(Call *call, const void *settings) {
  Job j;
  if (!open_convolution(call, settings, &j.v)) return;
  const Convolution *v = &j.v;
  const Correlation *at = &v->at;
  const int64_t single = v->c == 1 && v->m == 1 && v->in[0] == 1 && v->out[0] == 1 && at->kernel[0] == 1 && !at->pads[0];
  memcpy(j.places, (int64_t[]){at->images, quotient(at->groups, LANES), v->out[1], v->out[2]}, sizeof j.places);
  cut_box(j.places, ROOM / LANES / (v->turned ? 2 : 1 + at->strides[1] * at->strides[2]), j.box);
  j.box[0] = j.box[1] = 1;
  double reads = 1;
  for (int i = 0; i < 2; i++) {
    const int64_t last = (at->kernel[i + 1] - 1) * at->dilations[i + 1], stride = at->strides[i + 1];
    j.along[i] = v->turned ? 1 : stride, j.apart[i] = v->turned ? stride : 1;
    j.before[i] = v->turned ? last - at->pads[i + 1] : at->pads[i + 1];
    j.reach[i] = (j.box[i + 2] - 1) * j.along[i] + last + 1, reads *= (double)j.reach[i];
  }
  if (refused(call, !single || reads >= MOST_READ, "Depthwise: channels share groups, or taps are too far apart")) return;
  const int64_t boxes = j.places[0] * j.places[1] * quotient(v->out[1], j.box[2]) * quotient(v->out[2], j.box[3]);
  const int64_t numbers = at->kernel[1] * at->kernel[2] + j.reach[0] * j.reach[1] + j.box[2] * j.box[3];
  parallel_spaces(call, boxes, numbers * LANES, task, &j);
}

const Kernel depthwise_kernels[] = {
    {"Depthwise", "ffF", "f", sizeof(Convolution), read_convolution, compute},
    {0}};
