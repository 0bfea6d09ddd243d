/* The micro-kernel of all products of matrices (see gemm.h). */
#include "gemm.h"

#include <string.h>

enum { AHEAD = 6 /* rows that are asked for before they are copied: they are short and far from each other */ };

INLINE void tile(const int rows, const int vectors, const Product *p, const float *const *row, const float *b,
                 const float *add, int64_t add_pitch, float *c, int64_t c_pitch) {
  lanes sum[ROWS][VECTORS];
  const float *a[ROWS];
#pragma GCC unroll 16
  for (int i = 0; i < rows; i++) {
    a[i] = row[i];
#pragma GCC unroll 16
    for (int v = 0; v < vectors; v++) sum[i][v] = lanes_of(0);
  }
  const int64_t along = p->a_step[2], down = p->b_step[2], count = p->count[2];
  for (int64_t x = 0; x < p->count[0]; x++)
    for (int64_t y = 0; y < p->count[1]; y++) {
      const float *from = b + x * p->b_step[0] + y * p->b_step[1];
      int64_t at = x * p->a_step[0] + y * p->a_step[1];
      for (int64_t z = 0; z < count; z++, at += along, from += down) {
        lanes here[VECTORS];
#pragma GCC unroll 16
        for (int v = 0; v < vectors; v++) {
          here[v] = *(const lanes *)(from + v * LANES);
          HELD(here[v]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
          const lanes factor = lanes_of(a[i][at]);
#pragma GCC unroll 16
          for (int v = 0; v < vectors; v++) sum[i][v] += factor * here[v];
        }
      }
    }
#define EACH                                \
  _Pragma("GCC unroll 16") for (int i = 0; i < rows; i++) \
  _Pragma("GCC unroll 16") for (int v = 0; v < vectors; v++)
  if (add) EACH sum[i][v] += *(const lanes *)(add + i * add_pitch + v * LANES);
  if (p->relu) EACH sum[i][v] = lanes_where(sum[i][v] < 0, lanes_of(0), sum[i][v]);
  EACH *(lanes *)(c + i * c_pitch + v * LANES) = sum[i][v];
}

typedef void Tile(const Product *, const float *const *, const float *, const float *, int64_t, float *, int64_t);
#define TILE(V, R)                                                                                                     \
  static void tile_##V##_##R(const Product *p, const float *const *row, const float *b, const float *add,              \
                             int64_t add_pitch, float *c, int64_t c_pitch) {                                           \
    tile(R, V, p, row, b, add, add_pitch, c, c_pitch);                                                                 \
  }
#define TILES(V) TILE(V, 1) TILE(V, 2) TILE(V, 3) TILE(V, 4) TILE(V, 5) TILE(V, 6)
#define NAMES(V) {tile_##V##_1, tile_##V##_2, tile_##V##_3, tile_##V##_4, tile_##V##_5, tile_##V##_6},
TILES(1)
TILES(2)
#if VECTORS > 2
TILES(3)
TILES(4)
#endif
static Tile *const tiles[VECTORS][ROWS] = {
    NAMES(1) NAMES(2)
#if VECTORS > 2
    NAMES(3) NAMES(4)
#endif
};

void gemm(const Product *p) {
  const int64_t band = p->band ? p->band : ROWS * p->down;
  for (int64_t q = 0; q < p->columns; q += COLUMNS) {
    const int64_t columns = least(COLUMNS, p->columns - q), vectors = quotient(columns, LANES);
    const float *b = p->b + q / COLUMNS * p->panel;
    for (int64_t r = 0; r < p->rows; r += ROWS) {
      const int64_t rows = least(ROWS, p->rows - r);
      const float *row[ROWS], *add = p->add ? p->add + r * p->add_pitch + q : NULL;
      float *c = p->c + r * p->c_pitch + q;
      for (int i = 0; i < rows; i++)
        row[i] = p->a + (p->row_at ? p->row_at[r + i] : r / ROWS * band + i * p->down);
      if (columns == vectors * LANES) {
        tiles[vectors - 1][rows - 1](p, row, b, add, p->add_pitch, c, p->c_pitch);
        continue;
      }
      float part[ROWS * COLUMNS] = {0}; /* of columns that are cut off */
      for (int i = 0; add && i < rows; i++)
        memcpy(part + i * COLUMNS, add + i * p->add_pitch, (size_t)columns * sizeof(float));
      tiles[vectors - 1][rows - 1](p, row, b, add ? part : NULL, COLUMNS, part, COLUMNS);
      for (int i = 0; i < rows; i++)
        memcpy(c + i * p->c_pitch, part + i * COLUMNS, (size_t)columns * sizeof(float));
    }
  }
}

/* Rows of numbers beside each other, into all panels at a time. */
INLINE void pack_rows(const float *from, int64_t down, int64_t depth, int64_t columns, int64_t width, float *to) {
  const int64_t whole = columns / width * width, rest = columns - whole;
  for (int64_t k = 0; k < depth; k++, from += down, to += width) {
    float *out = to;
    for (int64_t q = 0; q < whole; q += width, out += depth * width) {
      if (k + AHEAD < depth)
        for (int64_t i = 0; i < width; i += 16) __builtin_prefetch(from + AHEAD * down + q + i);
      memcpy(out, from + q, (size_t)width * sizeof(float));
    }
    if (!rest) continue;
    memcpy(out, from + whole, (size_t)rest * sizeof(float));
    memset(out + rest, 0, (size_t)(width - rest) * sizeof(float));
  }
}

void pack_panels(const float *from, int64_t down, int64_t along, int64_t depth, int64_t columns, int64_t width,
                 float *to) {
  if (along == 1 && width == COLUMNS) {
    pack_rows(from, down, depth, columns, COLUMNS, to);
  } else if (along == 1 && width == ROWS) {
    pack_rows(from, down, depth, columns, ROWS, to);
  } else if (along == 1) {
    pack_rows(from, down, depth, columns, width, to);
  } else {
    for (int64_t q = 0; q < columns; q += width, from += width * along, to += depth * width) {
      const int64_t there = least(width, columns - q);
      int64_t k = 0;
      for (; down == 1 && width % LANES == 0 && k + LANES <= depth; k += LANES)
        for (int64_t c = 0; c < width; c += LANES) {
          lanes square[LANES];
#pragma GCC unroll 16
          for (int i = 0; i < LANES; i++)
            square[i] = c + i < there ? *(const lanes *)(from + (c + i) * along + k) : lanes_of(0);
          turn(square);
#pragma GCC unroll 16
          for (int i = 0; i < LANES; i++) *(lanes *)(to + (k + i) * width + c) = square[i];
        }
      for (; k < depth; k++)
        for (int64_t c = 0; c < width; c++) to[k * width + c] = c < there ? from[k * down + c * along] : 0;
    }
  }
}
