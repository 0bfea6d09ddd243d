/* Stores that go to memory past the caches, for results that nobody reads soon. */
#ifndef ONNXGRAD_STREAMING_H
#define ONNXGRAD_STREAMING_H

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#define CAN_STORE_PAST_CACHES 1
#else
#define CAN_STORE_PAST_CACHES 0
#endif

/* As memcpy. Before another thread may read what was stored: `stores_done`. */
static inline void store_past_caches(void *to, const void *from, size_t bytes) {
  char *target = to;
  const char *source = from;
#if CAN_STORE_PAST_CACHES
  size_t head = -(uintptr_t)target & 63;
  head = head < bytes ? head : bytes;
  memcpy(target, source, head);
  target += head, source += head, bytes -= head;
  for (; bytes >= 64; target += 64, source += 64, bytes -= 64) {
#if defined(__AVX512F__)
    _mm512_stream_si512((void *)target, _mm512_loadu_si512((const void *)source));
#elif defined(__AVX__)
    _mm256_stream_si256((void *)target, _mm256_loadu_si256((const void *)source));
    _mm256_stream_si256((void *)(target + 32), _mm256_loadu_si256((const void *)(source + 32)));
#else
    for (int i = 0; i < 64; i += 16)
      _mm_stream_si128((void *)(target + i), _mm_loadu_si128((const void *)(source + i)));
#endif
  }
#endif
  memcpy(target, source, bytes);
}

static inline void stores_done(void) {
#if CAN_STORE_PAST_CACHES
  _mm_sfence();
#endif
}

#endif
