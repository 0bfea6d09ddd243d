/* Vectors of as many floats as a register of this processor holds; in files that define DOUBLE, of doubles. */
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(__AVX__)
#include <immintrin.h>
#endif

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
#ifdef __clang__
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

INLINE lanes lanes_of(real x) { return x - (lanes){0}; }

/* a where the mask is set, else b */
INLINE lanes lanes_where(lanes_mask mask, lanes a, lanes b) {
  return (lanes)((mask & (lanes_mask)a) | (~mask & (lanes_mask)b));
}

/* the smaller, and the larger one; NaN where x is */
#if defined(__AVX512F__) && !defined(DOUBLE)
INLINE lanes at_most(lanes x, real y) { return (lanes)_mm512_min_ps(_mm512_set1_ps(y), (__m512)x); }
INLINE lanes at_least(lanes x, real y) { return (lanes)_mm512_max_ps(_mm512_set1_ps(y), (__m512)x); }
#elif defined(__AVX__) && !defined(DOUBLE)
INLINE lanes at_most(lanes x, real y) { return (lanes)_mm256_min_ps(_mm256_set1_ps(y), (__m256)x); }
INLINE lanes at_least(lanes x, real y) { return (lanes)_mm256_max_ps(_mm256_set1_ps(y), (__m256)x); }
#else
INLINE lanes at_most(lanes x, real y) { return lanes_where(x > y, lanes_of(y), x); }
INLINE lanes at_least(lanes x, real y) { return lanes_where(x < y, lanes_of(y), x); }
#endif

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

/* f(0), f(1), … for each number of a vector */
#define EVERY_4(f, i) f(i), f((i) + 1), f((i) + 2), f((i) + 3)
#define EVERY_8(f, i) EVERY_4(f, i), EVERY_4(f, (i) + 4)
#define EVERY_16(f, i) EVERY_8(f, i), EVERY_8(f, (i) + 8)
#define EVERY(f) NUMBERED(EVERY_, LANES)(f, 0)
#define PLACE(i) i

/* The first `count` numbers at `from`, all of a vector at most, and `rest` in the place of others. */
#if defined(__AVX512F__) && !defined(DOUBLE) && !defined(__SANITIZE_ADDRESS__)
#define FIRST(count) ((__mmask16)((1u << (count)) - 1))
INLINE lanes part_at(const real *from, int64_t count, lanes rest) {
  return (lanes)_mm512_mask_loadu_ps((__m512)rest, FIRST(count), from);
}
INLINE void put_part(real *to, int64_t count, lanes v) { _mm512_mask_storeu_ps(to, FIRST(count), (__m512)v); }
#elif defined(__AVX__) && !defined(DOUBLE) && !defined(__SANITIZE_ADDRESS__)
#define FIRST(count) ((lanes_mask){EVERY(PLACE)} < (int)(count))
INLINE lanes part_at(const real *from, int64_t count, lanes rest) {
  return lanes_where(FIRST(count), (lanes)_mm256_maskload_ps(from, (__m256i)FIRST(count)), rest);
}
INLINE void put_part(real *to, int64_t count, lanes v) { _mm256_maskstore_ps(to, (__m256i)FIRST(count), (__m256)v); }
#else
INLINE lanes part_at(const real *from, int64_t count, lanes rest) {
  memcpy(&rest, from, (size_t)count * sizeof *from);
  return rest;
}
INLINE void put_part(real *to, int64_t count, lanes v) { memcpy(to, &v, (size_t)count * sizeof *to); }
#endif

INLINE lanes lanes_read(const real *from, int64_t count, real rest) {
  return count >= LANES ? *(const lanes *)from : part_at(from, count, lanes_of(rest));
}

INLINE void lanes_write(real *to, int64_t count, lanes v) {
  if (count >= LANES)
    *(lanes *)to = v;
  else
    put_part(to, count, v);
}

/* Keeps `v` in a register: read from memory again for each use, it would be read more often than there is time for. */
#if defined(__x86_64__)
#define HELD(v) __asm__("" : "+v"(v))
#elif defined(__aarch64__)
#define HELD(v) __asm__("" : "+w"(v))
#else
#define HELD(v) (void)(v)
#endif

/* Numbers of two vectors by their places in the first and then the second. */
#ifdef __clang__
#define SHUFFLE(a, b, place) __builtin_shufflevector(a, b, EVERY(place))
#else
#define SHUFFLE(a, b, place) __builtin_shuffle(a, b, (lanes_mask){EVERY(place)})
#endif
/* Of two vectors beside each other, every second number; or both alternating, the first and the second half of that. */
#define EVEN(i) 2 * (i)
#define ODD(i) 2 * (i) + 1
#define LOW(i) (i) / 2 + (i) % 2 * LANES
#define HIGH(i) LOW(i) + LANES / 2
/* Parts of a vector that change places. */
#define BY_8(i) (i) ^ (8 % LANES)
#define BY_4(i) (i) ^ (4 % LANES)
#define BY_2(i) (i) ^ 2
#define BY_1(i) (i) ^ 1

INLINE lanes lanes_add(lanes a, lanes b) { return a + b; }
INLINE lanes lanes_most(lanes a, lanes b) { return lanes_where(a > b, a, b); }

#define LANES_ALL(name, both)                             \
  INLINE real name(lanes v) {                            \
    if (LANES > 8) v = both(v, SHUFFLE(v, v, BY_8));      \
    if (LANES > 4) v = both(v, SHUFFLE(v, v, BY_4));      \
    v = both(v, SHUFFLE(v, v, BY_2));                     \
    return both(v, SHUFFLE(v, v, BY_1))[0];               \
  }
LANES_ALL(lanes_sum, lanes_add)
LANES_ALL(lanes_largest, lanes_most)

/* A square of numbers, transposed: a[q][k] = a[k][q]. Each stage interleaves the two halves. */
INLINE void turn(lanes a[LANES]) {
  lanes b[LANES];
#pragma GCC unroll 4
  for (int stage = 1; stage < LANES; stage *= 2) {
#pragma GCC unroll 8
    for (int k = 0; k < LANES / 2; k++) {
      b[2 * k] = SHUFFLE(a[k], a[k + LANES / 2], LOW);
      b[2 * k + 1] = SHUFFLE(a[k], a[k + LANES / 2], HIGH);
    }
#pragma GCC unroll 16
    for (int k = 0; k < LANES; k++) a[k] = b[k];
  }
}
