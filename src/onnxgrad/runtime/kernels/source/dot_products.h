/* Products of rows of y with rows of x from each tap on: by the common micro-kernel, or of few rows as long dot products. */
#ifndef ONNXGRAD_DOT_PRODUCTS_H
#define ONNXGRAD_DOT_PRODUCTS_H

#include "gemm.h"

enum {
  TAPS = 9,               /* of dot products at a time, and */
  DOT_ROWS = VECTORS / 2, /* rows of y */
  SUMS = 96,              /* taps of the micro-kernel at a time, and */
  NUMBERS = 256,          /* of a row that are multiplied by all of these before the next ones */
  FEW = LANES + 1,        /* rows, of which there would be too few vectors */
};

typedef struct {
  const float *y, *x;
  int64_t y_row, y_image, x_image, images, run;
} Span;

INLINE void dots(const int rows, const int taps, const Span *s, const float *y, const int64_t *offset, int64_t count,
                 float *out, int64_t out_row) {
  lanes sum[DOT_ROWS][TAPS];
#pragma GCC unroll 16
  for (int a = 0; a < rows; a++)
#pragma GCC unroll 16
    for (int b = 0; b < taps; b++) sum[a][b] = lanes_of(0);
  for (int64_t image = 0; image < s->images; image++)
    for (int64_t p = 0; p < s->run; p += LANES) {
      const float *x = s->x + image * s->x_image + p;
      lanes here[DOT_ROWS];
#pragma GCC unroll 16
      for (int a = 0; a < rows; a++) here[a] = *(const lanes *)(y + a * s->y_row + image * s->y_image + p);
#pragma GCC unroll 16
      for (int b = 0; b < taps; b++) {
        lanes tap = *(const lanes *)(x + offset[b]);
        HELD(tap);
#pragma GCC unroll 16
        for (int a = 0; a < rows; a++) sum[a][b] += here[a] * tap;
      }
    }
#pragma GCC unroll 16
  for (int b = 0; b < taps; b++)
#pragma GCC unroll 16
    for (int a = 0; a < rows; a++)
      if (b < count) out[b * out_row + a] += lanes_sum(sum[a][b]);
}

/* All products of the m rows of y with the taps of c channels of x, whose planes are `channel` numbers apart; `tap` is
 * where each tap begins in one. `panels` is memory for y. */
static void multiply(const Span *s, const int64_t *tap, int64_t taps, int64_t m, int64_t c, int64_t channel,
                     float *panels, float *out) {
  const int64_t columns = c * taps, wide = m >= FEW ? SUMS : m == 1 && columns % 7 == 0 ? 7 : TAPS;
  const int64_t width = least(COLUMNS, rounded(m));
  const int64_t together = s->y_image == s->run ? s->images : 1, run = s->run, depth = together * run;
  for (int64_t first = 0; first < s->images; first += m < FEW ? s->images : together) {
    if (m >= FEW) pack_panels(s->y + first * s->y_image, 1, s->y_row, depth, m, width, panels);
    for (int64_t b = 0; b < columns; b += wide) {
      const int64_t count = least(wide, columns - b);
      int64_t offset[SUMS];
      float *to = out + b * m;
      for (int64_t k = 0; k < count; k++) offset[k] = (b + k) / taps * channel + tap[(b + k) % taps];
      for (int64_t k = count; k < TAPS; k++) offset[k] = offset[0];
      int64_t a = 0;
      for (; a + DOT_ROWS <= m && m > 1 && m < FEW; a += DOT_ROWS)
        dots(DOT_ROWS, TAPS, s, s->y + a * s->y_row, offset, count, to + a, m);
      for (; a < m && m < FEW; a++)
        if (wide == 7)
          dots(1, 7, s, s->y + a * s->y_row, offset, count, to + a, m);
        else
          dots(1, TAPS, s, s->y + a * s->y_row, offset, count, to + a, m);
      const int64_t images = most(1, NUMBERS / run);
      for (int64_t image = 0; image < together && m >= FEW; image += images)
        for (int64_t p = 0; p < run; p += NUMBERS)
          gemm(&(Product){.a = s->x + (first + image) * s->x_image + p, .b = panels + (image * run + p) * width,
                          .add = to, .c = to, .rows = count, .columns = m,
                          .count = {1, least(images, together - image), least(NUMBERS, run - p)},
                          .a_step = {0, s->x_image, 1}, .b_step = {0, run * width, width}, .row_at = offset,
                          .panel = depth * width, .add_pitch = m, .c_pitch = m});
    }
  }
}

#endif
