/* Vectors of as many floats as a register of this processor holds. */
#ifndef ONNXGRAD_LANES_H
#define ONNXGRAD_LANES_H
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
typedef float lanes __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int lanes_mask __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))

/* Written out: a broadcast from memory takes no instruction of its own. */
INLINE lanes lanes_of(float x) {
#if LANES == 16
  return (lanes){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
#elif LANES == 8
  return (lanes){x, x, x, x, x, x, x, x};
#else
  return (lanes){x, x, x, x};
#endif
}

/* a where the mask is set, else b */
INLINE lanes lanes_where(lanes_mask mask, lanes a, lanes b) {
  return (lanes)((mask & (lanes_mask)a) | (~mask & (lanes_mask)b));
}

/* Keeps `v` in a register: read from memory again for each use, it would be read more often than there is time for. */
#if defined(__x86_64__)
#define HELD(v) __asm__("" : "+v"(v))
#elif defined(__aarch64__)
#define HELD(v) __asm__("" : "+w"(v))
#else
#define HELD(v) (void)(v)
#endif

/* Numbers of two vectors of one type, by their places in the first and then the second, as a vector of a given type. */
#if defined(__clang__) || (defined(__GNUC__) && __GNUC__ >= 12 && !defined(ONNXGRAD_PLAIN))
#define SHUFFLE(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#include <string.h>
#define SHUFFLE(type, a, b, ...)                                                               \
  __extension__({                                                                              \
    const __typeof__(a) first_ = (a), second_ = (b);                                           \
    static const int at_[] = {__VA_ARGS__};                                                    \
    enum { count_ = sizeof(first_) / sizeof(float) };                                          \
    float from_[2 * count_], to_[sizeof(type) / sizeof(float)];                                \
    memcpy(from_, &first_, sizeof first_);                                                     \
    memcpy(from_ + count_, &second_, sizeof second_);                                          \
    for (size_t k_ = 0; k_ < sizeof(type) / sizeof(float); k_++) to_[k_] = from_[at_[k_]];     \
    type result_;                                                                              \
    memcpy(&result_, to_, sizeof result_);                                                     \
    result_;                                                                                   \
  })
#endif

typedef float lanes_4 __attribute__((vector_size(16)));
typedef float lanes_8 __attribute__((vector_size(32)));

INLINE float lanes_sum_4(lanes_4 v) {
  v += SHUFFLE(lanes_4, v, v, 2, 3, 0, 1);
  v += SHUFFLE(lanes_4, v, v, 1, 0, 3, 2);
  return v[0];
}

#if LANES >= 8
INLINE float lanes_sum_8(lanes_8 v) {
  return lanes_sum_4(SHUFFLE(lanes_4, v, v, 0, 1, 2, 3) + SHUFFLE(lanes_4, v, v, 4, 5, 6, 7));
}
#endif

INLINE float lanes_sum(lanes v) {
#if LANES == 16
  return lanes_sum_8(SHUFFLE(lanes_8, v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                     SHUFFLE(lanes_8, v, v, 8, 9, 10, 11, 12, 13, 14, 15));
#elif LANES == 8
  return lanes_sum_8(v);
#else
  return lanes_sum_4(v);
#endif
}

/* Of two vectors beside each other, every second number. */
#define EVEN_4 0, 2, 4, 6
#define ODD_4 1, 3, 5, 7
#define EVEN_8 EVEN_4, 8, 10, 12, 14
#define ODD_8 ODD_4, 9, 11, 13, 15
#define EVEN_16 EVEN_8, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD_16 ODD_8, 17, 19, 21, 23, 25, 27, 29, 31

/* Two vectors, alternating: the first and the second half of that. */
#define LOW_4 0, 4, 1, 5
#define HIGH_4 2, 6, 3, 7
#define LOW_8 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH_8 4, 12, 5, 13, 6, 14, 7, 15
#define LOW_16 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH_16 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31

#define JOINED(a, b) a##b
#define NUMBERED(name, n) JOINED(name, n)

/* A square of numbers, transposed: a[q][k] = a[k][q]. Each stage interleaves the two halves. */
INLINE void turn(lanes a[LANES]) {
  lanes b[LANES];
#pragma GCC unroll 4
  for (int stage = 1; stage < LANES; stage *= 2) {
#pragma GCC unroll 8
    for (int k = 0; k < LANES / 2; k++) {
      b[2 * k] = SHUFFLE(lanes, a[k], a[k + LANES / 2], NUMBERED(LOW_, LANES));
      b[2 * k + 1] = SHUFFLE(lanes, a[k], a[k + LANES / 2], NUMBERED(HIGH_, LANES));
    }
#pragma GCC unroll 16
    for (int k = 0; k < LANES; k++) a[k] = b[k];
  }
}

#endif
