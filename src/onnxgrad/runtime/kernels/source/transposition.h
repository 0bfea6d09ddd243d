/* Squares of numbers, transposed in registers. */
#ifndef ONNXGRAD_TRANSPOSITION_H
#define ONNXGRAD_TRANSPOSITION_H

#include "lanes.h"

#if LANES == 16
#define LOW_HALVES(a, b) SHUFFLE(lanes, a, b, LOW_16)
#define HIGH_HALVES(a, b) SHUFFLE(lanes, a, b, HIGH_16)
#elif LANES == 8
#define LOW_HALVES(a, b) SHUFFLE(lanes, a, b, LOW_8)
#define HIGH_HALVES(a, b) SHUFFLE(lanes, a, b, HIGH_8)
#else
#define LOW_HALVES(a, b) SHUFFLE(lanes, a, b, LOW_4)
#define HIGH_HALVES(a, b) SHUFFLE(lanes, a, b, HIGH_4)
#endif

/* to[q][k] = from[k][q], of LANES rows of LANES numbers. */
INLINE void transpose(float *to, int64_t to_row, const float *from, int64_t from_row) {
  lanes a[LANES], b[LANES];
#pragma GCC unroll 16
  for (int k = 0; k < LANES; k++) a[k] = *(const lanes *)(from + k * from_row);
#pragma GCC unroll 4
  for (int stage = 1; stage < LANES; stage *= 2) {
#pragma GCC unroll 8
    for (int k = 0; k < LANES / 2; k++) {
      b[2 * k] = LOW_HALVES(a[k], a[k + LANES / 2]);
      b[2 * k + 1] = HIGH_HALVES(a[k], a[k + LANES / 2]);
    }
#pragma GCC unroll 16
    for (int k = 0; k < LANES; k++) a[k] = b[k];
  }
#pragma GCC unroll 16
  for (int k = 0; k < LANES; k++) *(lanes *)(to + k * to_row) = a[k];
}

#endif
