/* Products of matrices, in one micro-kernel, and the copies that it reads.
 *
 *   c[r, q] = add[r, q] + sum over k of a[r, k] * b[k, q]
 *
 * k runs over a nest of three loops, each with its steps in a and in b: so windows of a convolution are read where they
 * are. A tile of ROWS rows by VECTORS vectors of c is held in registers from the first k to the last; `add` comes after
 * the sum. Columns are whole vectors in b, of which the last may be cut off in `add` and c.
 *
 * To multiply by rows of `n` numbers beside each other: .panel = COLUMNS, .b_step = {0, 0, n}, where n is a multiple of
 * LANES. By panels that `pack_panels` has laid out: .panel = depth * COLUMNS, .b_step = {0, 0, COLUMNS}. */
#pragma once
#include "kernel.h"
#include "lanes.h"

#if defined(__AVX512F__) || defined(__aarch64__)
#define VECTORS 4
#else
#define VECTORS 2
#endif
enum { ROWS = 6, COLUMNS = VECTORS * LANES }; /* of a tile */

typedef struct {
  const float *a, *b, *add; /* no `add`: zeros */
  float *c;                 /* may be `add` */
  int64_t rows, columns;
  int64_t count[3], a_step[3], b_step[3]; /* of the loops, the inner one last */
  int64_t down, band;         /* from a row of a to the next, and from a tile of rows to the next (0: ROWS * down), */
  const int64_t *row_at;      /* or where each row is */
  int64_t panel;              /* from the columns of a tile in b to those of the next */
  int64_t add_pitch, c_pitch; /* from a row to the next; 0: `add` is one row for all */
  int relu;                   /* c is at least 0 */
} Product;

void gemm(const Product *);

/* a b of `depth` columns and rows, added to c or in its place: numbers of a row of a are `along` apart, rows of b `down`,
 * its panels `panel`. */
INLINE void multiply_matrices(int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t row, int64_t along,
                              const float *b, int64_t down, int64_t panel, float *c, int64_t pitch, int adds) {
  gemm(&(Product){.a = a, .b = b, .c = c, .add = adds ? c : NULL, .rows = rows, .columns = columns,
                  .count = {1, 1, depth}, .a_step = {0, 0, along}, .b_step = {0, 0, down}, .down = row,
                  .panel = panel, .add_pitch = pitch, .c_pitch = pitch});
}

INLINE int64_t rounded(int64_t n) { return quotient(n, LANES) * LANES; }

/* `depth` rows of `columns` numbers, from[row * down + column * along], as panels of `width` columns with zeros behind the
 * last: [panel][row][width]. */
void pack_panels(const float *from, int64_t down, int64_t along, int64_t depth, int64_t columns, int64_t width, float *to);
/* The same of a matrix, or of its transpose that is `turned`, into panels of COLUMNS, by all threads. */
void pack_matrix(Call *, const float *from, int64_t depth, int64_t columns, int64_t turned, float *to);

/* The transpose of `rows` rows of `count` numbers that are `down` apart: rows of `wide` numbers with zeros behind these,
 * `apart` from each other; each `run` of them begin at a multiple of `pitch`. */
void turn_rows(float *to, int64_t apart, int64_t wide, int64_t pitch, int64_t run, const float *from, int64_t down,
               int64_t rows, int64_t count);

/* A part of a product: `rows` of `columns` numbers, `pitch` apart, which belong at `row` and `column`. May be changed. */
typedef struct {
  float *at;
  int64_t row, rows, column, columns, pitch;
} Part;

/* then(data, part) for parts that cover x^T*w, which is nowhere as a whole: x [k, m], w [k, n]; on the threads of the session. */
void each_part(Call *, const float *x, const float *w, int64_t k, int64_t m, int64_t n,
               void (*then)(const void *data, const Part *), const void *data);
