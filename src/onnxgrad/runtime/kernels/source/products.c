/* Products of two matrices: xᵀ·g, the cotangent of W in x·W; and x·W or x·Wᵀ with a bias and a ReLU, layers.
 *
 * As in Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008): operands are copied so that
 * a tile of the result reads them one number after the other. The right operand of a layer is copied as a
 * whole, once, and its left one read where it is. Of a sum over rows, strips of both are copied. Pieces of it are as few
 * as there are processors, because each copies what it reads. Sums over many rows are divided too, and their parts added
 * in order. A cotangent may be added to a running sum, in its memory. How a sum is divided depends on the sizes alone, so
 * the numbers are the same for every number of threads. */
#include "gemm.h"

enum {
  DEPTH = 136,     /* of the strips: a panel stays near the processor, and panels do not share places of its cache */
  BAND = 480,      /* rows of the result that are computed together, at most */
  WIDTH = 512,     /* and columns */
  PIECE = 1 << 22, /* multiplications that are worth a thread */
  NARROW = 64,     /* rows that are read where they are: neighbours share a page */
  FEW = 4,         /* rows of an operand: to copy the other would take longer than the product */
};

typedef struct {
  const float *x, *w, *bias, *panels; /* [m, k] or turned [k, m]; [k, n] or turned [n, k] */
  float *out;
  int64_t m, n, k;
  int64_t left, right, relu; /* whether operands are turned */
  int64_t adds;              /* whether `out` is added to */
  int64_t band, width, depth; /* of a piece */
  int64_t down, across, deep; /* how many there are */
  int64_t strip;              /* of the sums of a piece */
  void (*then)(const void *data, const Part *); /* what reads a piece in the place of `out` */
  const void *data;
  int64_t packed; /* numbers of the space before such a piece */
} Job;

/* Whether the right operand is read where it is. */
static int is_direct(const Job *j) { return (j->left ? j->n <= NARROW : j->m <= FEW) && !j->right && j->n % LANES == 0; }

/* Pieces that share the larger operand follow each other. */
static void piece(void *data, int64_t index, float *space) {
  const Job *j = data;
  const int64_t part = index / (j->down * j->across), at = index % (j->down * j->across), is_wide = j->n > j->m;
  const int64_t row = (is_wide ? at % j->down : at / j->across) * j->band, rows = least(j->band, j->m - row);
  const int64_t column = (is_wide ? at / j->down : at % j->across) * j->width, columns = least(j->width, j->n - column);
  const int64_t first = part * j->depth, last = least(first + j->depth, j->k), direct = is_direct(j);
  float *out = j->then ? space + j->packed : j->out + part * j->m * j->n + row * j->n + column;
  const int64_t pitch = j->then ? j->width : j->n;
  int64_t k = first, depth;
  do {
    depth = least(j->strip, last - k);
    Product p = {.a = j->x + row * j->k + k, .down = j->k, .b = j->panels + column * j->k, .c = out, .rows = rows,
                 .columns = columns, .count = {1, 1, depth}, .a_step = {0, 0, 1}, .b_step = {0, 0, COLUMNS},
                 .panel = depth * COLUMNS, .c_pitch = pitch, .relu = j->relu && last == j->k};
    if (direct) {
      p.b = j->w + k * j->n + column, p.panel = COLUMNS, p.b_step[2] = j->n;
    } else if (j->left) {
      p.b = space;
      pack_panels(j->w + (j->right ? column * j->k + k : k * j->n + column), j->right ? 1 : j->n, j->right ? j->k : 1,
                  depth, columns, COLUMNS, space);
    }
    if (j->left) p.a = j->x + k * j->m + row, p.down = 1, p.a_step[2] = j->m;
    if (j->left && j->m > NARROW) {
      pack_panels(p.a, j->m, 1, depth, rows, ROWS, space + (j->width + COLUMNS) * j->strip);
      p.a = space + (j->width + COLUMNS) * j->strip, p.a_step[2] = ROWS, p.band = ROWS * depth;
    }
    if (k > first || j->adds)
      p.add = out, p.add_pitch = pitch;
    else if (j->bias)
      p.add = j->bias + column;
    gemm(&p);
    k += depth;
  } while (k < last);
  if (j->then) j->then(j->data, &(Part){out, row, rows, column, columns, pitch});
}

/* How a product whose left operand is turned is divided: rows, columns, sums; evenly, so that threads end together. */
static void divide(Job *j) {
  const double work = (double)j->m * (double)j->n * (double)j->k / PIECE;
  const int64_t wanted = work < (double)processors ? (int64_t)work + 1 : processors, longest = most(j->m, j->n);
  j->deep = 1;
  while (!j->bias && !j->relu && !j->then && j->k / 4 / j->deep / j->deep >= longest) j->deep *= 2;
  j->down = quotient(j->m, BAND), j->across = quotient(j->n, WIDTH);
  for (int64_t all; all = j->down * j->across * j->deep, all % wanted && all < 2 * wanted;) {
    const int64_t band = j->m / j->down, width = j->n / j->across;
    if (most(band, width) < 2 * COLUMNS) break;
    ++*(width > band ? &j->across : &j->down);
  }
  j->band = quotient(quotient(j->m, j->down), ROWS) * ROWS;
  j->width = quotient(quotient(j->n, j->across), COLUMNS) * COLUMNS;
  j->depth = most(1, quotient(j->k, j->deep)), j->strip = least(j->depth, DEPTH);
  j->down = quotient(j->m, j->band), j->across = quotient(j->n, j->width), j->deep = most(1, quotient(j->k, j->depth));
  j->packed = (j->width + COLUMNS + j->band) * j->strip;
}

void each_part(Call *call, const float *x, const float *w, int64_t k, int64_t m, int64_t n,
               void (*then)(const void *data, const Part *), const void *data) {
  Job j = {.x = x, .w = w, .m = m, .n = n, .k = k, .left = 1, .then = then, .data = data};
  divide(&j);
  parallel_spaces(call, j.down * j.across, j.packed + j.band * j.width, piece, &j);
}

typedef struct {
  int64_t left, right, relu;
} Settings;

static void read(Attributes *from, void *settings) {
  *(Settings *)settings = (Settings){.left = attribute_int(from, "left") != 0, .right = attribute_int(from, "right") != 0,
                                     .relu = attribute_int(from, "relu") != 0};
}

/* The product of (x, w, a bias or none), added to the operand `at` if that is not 0. */
static void multiply(Call *call, const Settings *s, size_t at) {
  const Shape x = shape_of(call, 0), w = shape_of(call, 1), bias = shape_of(call, 2), sum = shape_of(call, at);
  const int are_matrices = x.rank >= 2 && w.rank == 2 && !(s->left && x.rank > 2);
  if (refused(call, !are_matrices, "Product: operands are no matrices")) return;
  Job j = {.x = input(call, 0), .w = input(call, 1), .bias = input(call, 2), .left = s->left, .right = s->right,
           .relu = s->relu, .adds = at != 0, .k = w.dims[s->right], .n = w.dims[!s->right]};
  if (x.dims[s->left ? 0 : x.rank - 1] != j.k || (j.bias && (bias.rank != 1 || bias.dims[0] != j.n)) ||
      (!j.k && !s->left))
    fail(call, "Product: operands do not belong together");
  j.m = s->left ? x.dims[1] : x.count / most(j.k, 1);
  Shape shape = x;
  if (s->left) shape.dims[0] = j.m;
  shape.dims[x.rank - 1] = j.n;
  count_numbers(call, &shape);
  if (at && !call->failed && (!s->left || j.bias || j.relu || !same_shape(&shape, &sum)))
    fail(call, "Product: a running sum is of something else");
  float *out = j.out = at ? sum_of(call, at) : output(call, 0, &shape);
  if (at) pass_sum_on(call, 0, out);
  if (call->failed || !shape.count) return;
  if (s->left) {
    divide(&j);
    if (j.deep > 1) j.out = scratch(call, j.deep * shape.count, sizeof(float)), j.adds = 0;
  } else {
    j.deep = 1, j.depth = j.strip = j.k;
    j.band = least(16, quotient(j.m, 8 * ROWS)) * ROWS, j.width = 256;
    j.down = quotient(j.m, j.band), j.across = quotient(j.n, j.width);
    float *panels = is_direct(&j) ? NULL : scratch(call, quotient(j.n, COLUMNS) * COLUMNS * j.k, sizeof(float));
    if (panels) pack_matrix(call, j.w, j.k, j.n, j.right, panels);
    j.panels = panels;
  }
  if (call->failed) return;
  parallel_spaces(call, j.down * j.across * j.deep, j.packed, piece, &j);
  if (j.deep > 1) add_parts(call, out, at != 0, j.out, shape.count, j.deep);
}

static void compute(Call *call, const void *settings) { multiply(call, settings, 0); }
static void add(Call *call, const void *settings) { multiply(call, settings, 3); }

const Kernel product_kernels[] = {
    {"Product", "ffF", "f", sizeof(Settings), read, compute},
    {"RunningSumProduct", "ffFfl", "l", sizeof(Settings), read, add}, /* also (sum, where it is) to where it is */
    {0}};
