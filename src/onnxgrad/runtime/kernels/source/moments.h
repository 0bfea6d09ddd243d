/* Two sums over numbers that lie side by side, in float over some 4096 of them and in double over these: of u and of
 * u * d, where d = x - mean. */
#pragma once
#include "kernel.h"
#include "lanes.h"

enum { TOGETHER = 4096 };

/* What u is: d, then without the second sum, or g; this where y is positive, and times s. */
enum { FIRST_SUM = 1, OF_G = 2, MASKED = 4, SCALED = 8 };

typedef struct {
  const real *x, *g, *y, *s;
} Numbers;

typedef struct {
  double u, ud;
} Sums;

/* g where y is positive, else g * 0: an infinity leaves a mark, as it does in the graph. */
INLINE lanes where_positive(lanes g, lanes y) { return g * (lanes)((lanes_mask)(lanes_of(1)) & (y > 0)); }

/* u of `count` numbers, a vector at most, and 0 beyond: the k-th ones of a run that begins at `from`. */
INLINE lanes numbers_of(const int kind, const Numbers *n, int64_t from, int64_t k, int64_t count, lanes d) {
  lanes u = kind & OF_G ? lanes_read(n->g + from + k, count, 0) : d;
  if (kind & MASKED) u = where_positive(u, lanes_read(n->y + from + k, count, 0));
  if (kind & SCALED) u *= lanes_read(n->s + k, count, 0);
  return u;
}

/* Of `runs` of `count` numbers that begin `stride` apart, the first one at `from`. */
INLINE Sums sums_of(const int kind, const Numbers *n, int64_t from, int64_t runs, int64_t stride, int64_t count,
                    real mean) {
  const lanes means = lanes_of(mean);
  lanes first[4] = {{0}}, second[4] = {{0}};
  Sums all = {0, 0};
  int64_t numbers = 0;
#define ADDED(i, at, some)                                                \
  do {                                                                    \
    const lanes d = lanes_read(n->x + from + (at), some, mean) - means;   \
    const lanes u = numbers_of(kind, n, from, at, some, d);               \
    first[i] += u;                                                        \
    if (!(kind & FIRST_SUM)) second[i] += u * d;                          \
  } while (0)
  for (int64_t run = 0; run < runs; run++, from += stride)
    for (int64_t k = 0, start = 0; start < count; start += TOGETHER) {
      const int64_t end = least(start + TOGETHER, count);
      for (; k + 4 * LANES <= end; k += 4 * LANES)
        for (int i = 0; i < 4; i++) ADDED(i, k + i * LANES, LANES);
      for (; k + LANES <= end; k += LANES) ADDED(0, k, LANES);
      if (k < end) ADDED(0, k, end - k);
      if ((numbers += end - start) < TOGETHER && (run + 1 < runs || end < count)) continue;
      all.u += lanes_sum((first[0] + first[1]) + (first[2] + first[3]));
      all.ud += lanes_sum((second[0] + second[1]) + (second[2] + second[3]));
      for (int i = 0; i < 4; i++) first[i] = second[i] = lanes_of(0);
      numbers = 0;
    }
  return all;
}
