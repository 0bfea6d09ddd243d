/* The operations of programs, as loops; each type of numbers has them once. */
#include "program.h"

#define ONE_BY_ONE(name, operands, source, result, value)                                          \
  INLINE void each_##name(const int single, void *to, const void *from_x, const void *from_y, const void *from_z, \
                          int64_t count) {                                                         \
    const source *xs = from_x, *ys = operands > 1 ? from_y : from_x, *zs = operands > 2 ? from_z : from_x; \
    const source only_x = *xs, only_y = *ys, only_z = *zs;                                         \
    result *out = to;                                                                              \
    INDEPENDENT                                                                                    \
    for (int64_t i = 0; i < count; i++) {                                                          \
      const source x = single & 1 ? only_x : xs[i], y = single & 2 ? only_y : ys[i];               \
      const source z = single & 4 ? only_z : zs[i];                                                \
      (void)x, (void)y, (void)z;                                                                   \
      out[i] = (result)(value);                                                                    \
    }                                                                                              \
  }                                                                                                \
  static void run_##name(int single, void *to, const void *x, const void *y, const void *z, int64_t count) { \
    switch (single & (operands > 1 ? (1 << operands) - 1 : 0)) {                                   \
      case 1: each_##name(1, to, x, y, z, count); break;                                           \
      case 2: each_##name(2, to, x, y, z, count); break;                                           \
      case 3: each_##name(3, to, x, y, z, count); break;                                           \
      case 4: each_##name(4, to, x, y, z, count); break;                                           \
      case 5: each_##name(5, to, x, y, z, count); break;                                           \
      case 6: each_##name(6, to, x, y, z, count); break;                                           \
      default: each_##name(0, to, x, y, z, count);                                                 \
    }                                                                                              \
  }
#define REAL(name, operands, value) ONE_BY_ONE(name, operands, real, real, value)
#define WHOLE(name, operands, value) ONE_BY_ONE(name, operands, whole, whole, value)
#define NATURAL(name, operands, value) ONE_BY_ONE(name, operands, natural, natural, value)
#define REAL_MASK(name, operands, value) ONE_BY_ONE(name, operands, real, whole, -(value))
#define WHOLE_MASK(name, operands, value) ONE_BY_ONE(name, operands, whole, whole, -(value))
#define NATURAL_MASK(name, operands, value) ONE_BY_ONE(name, operands, natural, whole, -(value))
#define FROM_WHOLE(name, operands, value) ONE_BY_ONE(name, operands, whole, real, value)
#define VECTOR(name, operands, value)                                                                        \
  static void run_##name(int single, void *to, const void *from_x, const void *from_y, const void *from_z, \
                         int64_t count) {                                                          \
    const real *xs = from_x;                                                                       \
    real *out = to;                                                                                \
    (void)single, (void)from_y, (void)from_z;                                                      \
    for (int64_t i = 0; i < count; i += LANES) {                                                   \
      const lanes x = lanes_read(xs + i, count - i, 1);                                            \
      lanes_write(out + i, count - i, value);                                                      \
    }                                                                                              \
  }
#define DEFINED(name, operands, kind, value) kind(name, operands, value)
OPERATIONS(DEFINED)

const Operation elementwise_operations[] = {
#define LISTED(name, operands, kind, value) {run_##name, operands},
    OPERATIONS(LISTED)
};
