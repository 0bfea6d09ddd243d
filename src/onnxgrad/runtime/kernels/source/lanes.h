/* Vectors of as many floats as a register of this processor holds; in files that define DOUBLE, of doubles. */
#ifndef ONNXGRAD_LANES_H
#define ONNXGRAD_LANES_H
#include <stdint.h>
#include <string.h>

#ifdef DOUBLE
typedef double real __attribute__((may_alias));
typedef int64_t whole __attribute__((may_alias));
typedef uint64_t natural __attribute__((may_alias));
#else
typedef float real __attribute__((may_alias));
typedef int32_t whole __attribute__((may_alias));
typedef uint32_t natural __attribute__((may_alias));
#endif
#if defined(__AVX512F__) && !defined(DOUBLE)
#define LANES 16
#elif defined(__AVX512F__) || (defined(__AVX__) && !defined(DOUBLE))
#define LANES 8
#else
#define LANES 4
#endif
#define VECTOR_OF(type, count) type __attribute__((vector_size((count) * sizeof(type)), aligned(sizeof(type)), may_alias))
typedef VECTOR_OF(real, LANES) lanes;
typedef VECTOR_OF(whole, LANES) lanes_mask;
typedef VECTOR_OF(natural, LANES) lanes_bits;
#define JOINED(a, b) a##b
#define NUMBERED(name, n) JOINED(name, n)
#define INLINE static inline __attribute__((always_inline))

INLINE lanes lanes_of(real x) { return x - (lanes){0}; }

/* a where the mask is set, else b */
INLINE lanes lanes_where(lanes_mask mask, lanes a, lanes b) {
  return (lanes)((mask & (lanes_mask)a) | (~mask & (lanes_mask)b));
}

INLINE lanes magnitude(lanes x) { return (lanes)((lanes_bits)x & ((natural)-1 >> 1)); }
/* a number from 0 on, with the sign of s */
INLINE lanes signed_as(lanes x, lanes s) { return (lanes)((lanes_bits)x | ((lanes_bits)s & ~((natural)-1 >> 1))); }

/* The sum of powers of x, for coefficients of which that of the highest power is the first one. */
INLINE lanes polynomial(lanes x, const real *coefficients, int count) {
  lanes p = lanes_of(*coefficients);
#pragma GCC unroll 16
  for (int k = 1; k < count; k++) p = p * x + coefficients[k];
  return p;
}
#define POLYNOMIAL(x, ...) polynomial(x, (const real[]){__VA_ARGS__}, sizeof((const real[]){__VA_ARGS__}) / sizeof(real))

/* The first `count` numbers at `from`, all of a vector at most, and `rest` in the place of others. */
INLINE lanes lanes_read(const real *from, int64_t count, real rest) {
  if (count >= LANES) return *(const lanes *)from;
  lanes v = lanes_of(rest);
  memcpy(&v, from, (size_t)count * sizeof(real));
  return v;
}

INLINE void lanes_write(real *to, int64_t count, lanes v) {
  if (count >= LANES)
    *(lanes *)to = v;
  else
    memcpy(to, &v, (size_t)count * sizeof(real));
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
#define SHUFFLE(type, a, b, ...)                                                               \
  __extension__({                                                                              \
    const __typeof__(a) first_ = (a), second_ = (b);                                           \
    static const int at_[] = {__VA_ARGS__};                                                    \
    enum { count_ = sizeof(first_) / sizeof(real) };                                           \
    real from_[2 * count_], to_[sizeof(type) / sizeof(real)];                                  \
    memcpy(from_, &first_, sizeof first_);                                                     \
    memcpy(from_ + count_, &second_, sizeof second_);                                          \
    for (size_t k_ = 0; k_ < sizeof(type) / sizeof(real); k_++) to_[k_] = from_[at_[k_]];      \
    type result_;                                                                              \
    memcpy(&result_, to_, sizeof result_);                                                     \
    result_;                                                                                   \
  })
#endif

typedef VECTOR_OF(real, 4) lanes_4;
typedef VECTOR_OF(real, 8) lanes_8;

/* The sum of a vector, and its largest number: of halves, and halves of these. */
#define PLUS(a, b) ((a) + (b))
#define LARGER(a, b) \
  ((__typeof__(a))((((a) > (b)) & (__typeof__((a) > (b)))(a)) | (~((a) > (b)) & (__typeof__((a) > (b)))(b))))
#define REDUCED(name, both)                                                                                       \
  INLINE real name##_4(lanes_4 v) {                                                                               \
    const lanes_4 half = both(v, SHUFFLE(lanes_4, v, v, 2, 3, 0, 1));                                             \
    return both(half, SHUFFLE(lanes_4, half, half, 1, 0, 3, 2))[0];                                               \
  }                                                                                                               \
  INLINE real name##_8(lanes_8 v) {                                                                               \
    const lanes_4 low = SHUFFLE(lanes_4, v, v, 0, 1, 2, 3), high = SHUFFLE(lanes_4, v, v, 4, 5, 6, 7);            \
    return name##_4(both(low, high));                                                                             \
  }
REDUCED(lanes_sum, PLUS)
REDUCED(lanes_largest, LARGER)
#if LANES == 16
#define HALVED(v, both) both(SHUFFLE(lanes_8, v, v, 0, 1, 2, 3, 4, 5, 6, 7), SHUFFLE(lanes_8, v, v, 8, 9, 10, 11, 12, 13, 14, 15))
INLINE real lanes_sum(lanes v) { return lanes_sum_8(HALVED(v, PLUS)); }
INLINE real lanes_largest(lanes v) { return lanes_largest_8(HALVED(v, LARGER)); }
#else
INLINE real lanes_sum(lanes v) { return NUMBERED(lanes_sum_, LANES)(v); }
INLINE real lanes_largest(lanes v) { return NUMBERED(lanes_largest_, LANES)(v); }
#endif
INLINE lanes lanes_most(lanes a, lanes b) { return LARGER(a, b); }

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
