/* The micro-kernel of all products of matrices (see gemm.h). */
#include "gemm.h"

enum {
  AHEAD = 6,       /* rows that are asked for before they are copied: they are short and far from each other */
  PACKED = 1 << 14 /* numbers that are worth a thread */
};

/* Sums of one column of a and one row of b. Compilers would keep more than these two places, and run out of registers. */
#define ADD(set)                                                                                                       \
  do {                                                                                                                 \
    lanes here[VECTORS];                                                                                               \
    _Pragma("GCC unroll 16") for (int v = 0; v < vectors; v++) {                                                       \
      here[v] = *(const lanes *)(from + v * LANES);                                                                    \
      HELD(here[v]);                                                                                                   \
    }                                                                                                                  \
    _Pragma("GCC unroll 16") for (int i = 0; i < rows; i++) {                                                          \
      const lanes factor = lanes_of(a[i][at]);                                                                         \
      _Pragma("GCC unroll 16") for (int v = 0; v < vectors; v++) sum[i][(set) * vectors + v] += factor * here[v];      \
    }                                                                                                                  \
    at += along, from += down;                                                                                         \
    __asm__("" : "+r"(at), "+r"(from));                                                                                \
  } while (0)

/* Few sums are made in two sets, so that one need not wait for the other. */
INLINE void tile(const int rows, const int vectors, const Product *p, const float *from_a, const int64_t *row_at,
                 const float *b, const float *add, float *c) {
  const int sets = rows * vectors <= ROWS ? 2 : 1;
  lanes sum[ROWS][2 * VECTORS];
  const float *a[ROWS];
#pragma GCC unroll 16
  for (int i = 0; i < rows; i++) {
    a[i] = from_a + (row_at ? row_at[i] : i * p->down);
#pragma GCC unroll 16
    for (int v = 0; v < sets * vectors; v++) sum[i][v] = lanes_of(0);
    __builtin_prefetch(c + i * p->c_pitch, 1);
#pragma GCC unroll 16
    for (int v = 0; v < vectors; v++) __builtin_prefetch(c + i * p->c_pitch + v * LANES + LANES - 1, 1);
  }
  const int64_t along = p->a_step[2], down = p->b_step[2];
  int64_t start = 0, y = p->count[1];
  for (int64_t left = p->count[0] * y; left > 0; left--) {
    const float *from = b;
    int64_t at = start, z = p->count[2];
    for (; sets == 2 && z > 1; z -= 2) {
      ADD(0);
      ADD(1);
    }
    for (; z > 0; z--) ADD(0);
    if (left == 1) break;
    start += p->a_step[1], b += p->b_step[1];
    if (--y) continue;
    y = p->count[1];
    start += p->a_step[0] - y * p->a_step[1], b += p->b_step[0] - y * p->b_step[1];
  }
#define EACH                                \
  _Pragma("GCC unroll 16") for (int i = 0; i < rows; i++) \
  _Pragma("GCC unroll 16") for (int v = 0; v < vectors; v++)
  if (sets == 2) EACH sum[i][v] += sum[i][vectors + v];
  if (add) EACH sum[i][v] += *(const lanes *)(add + i * p->add_pitch + v * LANES);
  if (p->relu) EACH sum[i][v] = lanes_where(sum[i][v] < 0, lanes_of(0), sum[i][v]);
  EACH *(lanes *)(c + i * p->c_pitch + v * LANES) = sum[i][v];
}

typedef void Tile(const Product *, const float *, const int64_t *, const float *, const float *, float *);
#define TILE(V, R)                                                                                                     \
  static void tile_##V##_##R(const Product *p, const float *a, const int64_t *row_at, const float *b,                  \
                             const float *add, float *c) {                                                             \
    tile(R, V, p, a, row_at, b, add, c);                                                                               \
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
  const int64_t band = p->row_at ? 0 : p->band ? p->band : ROWS * p->down;
  for (int64_t q = 0; q < p->columns; q += COLUMNS) {
    const int64_t columns = least(COLUMNS, p->columns - q), vectors = quotient(columns, LANES);
    const float *a = p->a, *b = p->b + q / COLUMNS * p->panel, *add = p->add ? p->add + q : NULL;
    const int64_t *row_at = p->row_at;
    float *c = p->c + q;
    for (int64_t r = 0; r < p->rows; r += ROWS) {
      const int64_t rows = least(ROWS, p->rows - r);
      Tile *const tile = tiles[vectors - 1][rows - 1];
      if (columns == vectors * LANES) {
        tile(p, a, row_at, b, add, c);
      } else { /* columns are cut off */
        float part[ROWS * COLUMNS] = {0};
        Product all = *p;
        all.add_pitch = all.c_pitch = COLUMNS;
        for (int i = 0; add && i < rows; i++)
          memcpy(part + i * COLUMNS, add + i * p->add_pitch, (size_t)columns * sizeof(float));
        tile(&all, a, row_at, b, add ? part : NULL, part);
        for (int i = 0; i < rows; i++) memcpy(c + i * p->c_pitch, part + i * COLUMNS, (size_t)columns * sizeof(float));
      }
      a += band, c += ROWS * p->c_pitch;
      if (add) add += ROWS * p->add_pitch;
      if (row_at) row_at += ROWS;
    }
  }
}

/* A square of `rows` rows of `some` numbers, to rows of `room` numbers that are `apart`, or `at` these places. */
INLINE void turn_square(float *to, int64_t apart, const int64_t *at, int64_t room, const float *from, int64_t down,
                        int64_t rows, int64_t some) {
  lanes a[LANES];
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) a[i] = i < rows ? lanes_read(from + i * down, some, 0) : lanes_of(0);
  turn(a);
#pragma GCC unroll 16
  for (int q = 0; q < LANES; q++)
    if (q < some) lanes_write(to + (at ? at[q] : q * apart), room, a[q]);
}

void turn_rows(float *to, int64_t apart, int64_t wide, int64_t pitch, int64_t run, const float *from, int64_t down,
               int64_t rows, int64_t count) {
  for (int64_t p = 0; p < count; p += LANES) {
    if (p + LANES > count) p = most(count - LANES, 0); /* the last ones, some of them once more */
    const int64_t some = least(LANES, count - p), column = p % run, gap = (pitch - run) * apart;
    float *out = to + p * apart + p / run * gap;
    int64_t at[LANES];
    for (int64_t q = 0; q < LANES; q++) at[q] = q * apart;
    for (int64_t q = run - column; q < some; q += run)
      for (int64_t i = q; i < some; i++) at[i] += gap;
    for (int64_t k = 0; k < wide; k += LANES) {
      if (k + LANES > wide) k = most(wide - LANES, 0);
      const float *here = from + k * down + p;
      if (some == LANES && column + LANES <= run && k + LANES <= least(wide, rows))
        turn_square(out + k, apart, NULL, LANES, here, down, LANES, LANES);
      else if (some == LANES && k + LANES <= wide)
        turn_square(out + k, apart, at, LANES, here, down, rows - k, LANES);
      else
        turn_square(out + k, apart, at, wide - k, here, down, rows - k, some);
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
  if (along == 1 && width == COLUMNS) pack_rows(from, down, depth, columns, COLUMNS, to);
  if (along == 1 && width == ROWS) pack_rows(from, down, depth, columns, ROWS, to);
  if (along == 1 && width != COLUMNS && width != ROWS) pack_rows(from, down, depth, columns, width, to);
  for (int64_t q = 0; q < columns && along != 1; q += width, from += width * along, to += depth * width) {
    const int64_t there = least(width, columns - q);
    if (down == 1) turn_rows(to, width, width, depth, depth, from, along, there, depth);
    for (int64_t k = 0; k < depth && down != 1; k++)
      for (int64_t c = 0; c < width; c++) to[k * width + c] = c < there ? from[k * down + c * along] : 0;
  }
}

typedef struct {
  const float *from;
  float *to;
  int64_t depth, columns, turned;
} Packing;

static void pack(void *data, int64_t from, int64_t to) {
  const Packing *j = data;
  const int64_t down = j->turned ? 1 : j->columns, along = j->turned ? j->depth : 1, first = from * COLUMNS;
  pack_panels(j->from + first * along, down, along, j->depth, least(to * COLUMNS, j->columns) - first, COLUMNS,
              j->to + first * j->depth);
}

void pack_matrix(Call *call, const float *from, int64_t depth, int64_t columns, int64_t turned, float *to) {
  Packing job = {from, to, depth, columns, turned};
  parallel_ranges(call, quotient(columns, COLUMNS), most(PACKED / (depth * COLUMNS), 1), pack, &job);
}
