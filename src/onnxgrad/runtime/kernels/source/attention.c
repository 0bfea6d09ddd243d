/* Attention, Y = P V with P = softmax(s Q K' + mask), and its cotangents, without a matrix of all scores.
 *
 * A band of rows of P at a time is computed, as wide as there are keys, so that it stays near the processor. For the
 * cotangents it is computed again:
 *
 *   dP = dY V'      dS = s P (dP - sum P dP)      Q: dS K      K: dS' Q      V: P' dY
 *
 * Heads are divided among the threads. Operands and results are seen through an order of their axes, which saves the
 * transposes around them. A head's operands are copied first, as panels; in a band, columns beyond the keys have
 * probability 0. Keys that a mask hides from all queries of a band are left out at both ends. */
#include "exponential.h"
#include "gemm.h"

enum { BAND_BYTES = 1 << 16, MOST_ROWS = 60 };

/* What a mask adds so that nothing is left, beside any score that is not hidden. */
#define HIDDEN (-1e30f)

/* Matrices of all heads, over two leading axes, somewhere in a tensor. */
typedef struct {
  float *at;
  int64_t dims[4], strides[4];
} View;

typedef struct {
  View q, k, v, g, y, dq, dk, dv; /* rows are queries or keys */
  const float *mask, *scale;
  int64_t heads, queries, keys, inside, outside;
  int64_t rows, wide_keys, wide_inside, wide_outside; /* of a band; rounded up to vectors or panels */
  int64_t mask_strides[4];
  int divides, guarded; /* guarded: a query whose probabilities are no numbers has none */
} Job;

typedef struct {
  int64_t first, rows, from, keys, wide;
  const float *mask;
} Band;

static const float *mask_of(const Job *j, int64_t head) {
  return j->mask + head / j->q.dims[1] * j->mask_strides[0] + head % j->q.dims[1] * j->mask_strides[1];
}

INLINE lanes scaled(const Job *j, lanes v) { return j->divides ? v / *j->scale : v * *j->scale; }

/* Queries from `first` on; all keys, where one of them sees none. */
static Band band_of(const Job *j, int64_t first, const float *mask) {
  const int64_t down = j->mask_strides[2];
  Band band = {first, least(j->rows, j->queries - first), 0, j->keys, rounded(j->keys), mask ? mask + first * down : NULL};
  int64_t low = j->keys, high = 0;
  if (!mask || !j->mask_strides[3]) return band;
  for (int64_t r = 0; r < (down ? band.rows : 1); r++) {
    const float *row = band.mask + r * down;
    int64_t begin = 0, end = j->keys;
    while (begin < end && row[begin] <= HIDDEN) begin++;
    if (begin == end) return band;
    while (end > high && row[end - 1] <= HIDDEN) end--;
    low = least(low, begin);
    if (end > high) high = end;
  }
  band.from = low / COLUMNS * COLUMNS;
  band.keys = high - band.from;
  band.wide = rounded(band.keys);
  band.mask += band.from;
  return band;
}

/* Probabilities, given the products of queries with the keys. */
static void normalize(const Job *j, float *scores, const Band *band) {
  const int64_t down = j->mask_strides[2], along = j->mask_strides[3];
  for (int64_t r = 0; r < band->rows; r++) {
    float *s = scores + r * j->wide_keys;
    const float *add = band->mask ? band->mask + r * down : NULL;
    lanes most = lanes_of(-INFINITY);
    for (int64_t k = 0; k < band->wide; k += LANES) {
      lanes here = *(lanes *)(s + k);
      if (j->scale) here = scaled(j, here);
      if (add) here += along ? lanes_read(add + k, band->keys - k, 0) : lanes_of(*add);
      if (k + LANES > band->keys) here = lanes_read((const float *)&here, band->keys - k, -INFINITY);
      *(lanes *)(s + k) = here;
      most = lanes_most(here, most);
    }
    const lanes mosts = lanes_of(lanes_largest(most));
    lanes total = {0};
    for (int64_t k = 0; k < band->wide; k += LANES) {
      const lanes e = lanes_exp(*(lanes *)(s + k) - mosts);
      *(lanes *)(s + k) = e;
      total += e;
    }
    const float sum = lanes_sum(total);
    if (j->guarded && !(sum == sum)) {
      memset(s, 0, (size_t)band->wide * sizeof(float));
      continue;
    }
    const lanes inverse = lanes_of(1 / sum);
    for (int64_t k = 0; k < band->wide; k += LANES) *(lanes *)(s + k) *= inverse;
  }
}

/* The cotangents of the products, in the place of those of the probabilities. */
static void pull_scores(const Job *j, const float *p, float *dp, const Band *band) {
  for (int64_t r = 0; r < band->rows; r++, p += j->wide_keys, dp += j->wide_keys) {
    lanes total = {0};
    for (int64_t k = 0; k < band->wide; k += LANES) total += *(const lanes *)(p + k) * *(lanes *)(dp + k);
    const lanes sum = lanes_of(lanes_sum(total));
    for (int64_t k = 0; k < band->wide; k += LANES) {
      lanes here = *(const lanes *)(p + k) * (*(lanes *)(dp + k) - sum);
      if (j->scale) here = scaled(j, here);
      *(lanes *)(dp + k) = here;
    }
  }
}

/* Columns of a matrix, as wide as they are laid out: one panel, or whole ones. */
static int64_t padded(int64_t n) { return n <= COLUMNS ? rounded(n) : quotient(n, COLUMNS) * COLUMNS; }

static float *head_of(const View *v, int64_t head) {
  return v->at + head / v->dims[1] * v->strides[0] + head % v->dims[1] * v->strides[1];
}

typedef struct {
  float *at;
  int64_t depth, columns, width;
} Panels;

INLINE float *taken(float **space, int64_t count) {
  float *here = *space;
  *space += count;
  return here;
}

static Panels panels_in(float **space, int64_t depth, int64_t columns) {
  return (Panels){taken(space, depth * padded(columns)), depth, columns, least(COLUMNS, rounded(columns))};
}

/* Some rows of a matrix in panels; with strides the other way round, its transpose. */
static void lay(Panels *to, const float *from, int64_t down, int64_t along, int64_t rows) {
  to->depth = rows;
  pack_panels(from, down, along, rows, to->columns, to->width, to->at);
}

/* c = a b, or c += a b, for the columns and rows of b from some on; a number of a is a[row * down + k * along]. */
static void multiply(int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t down, int64_t along, Panels b,
                     int64_t first_row, int64_t first_column, float *c, int64_t pitch, int add) {
  const int64_t panel = b.depth * b.width;
  const float *from = b.at + first_column / COLUMNS * panel + first_row * b.width;
  multiply_matrices(rows, columns, depth, a, down, along, from, b.width, panel, c, pitch, add);
}

static void give(const float *from, int64_t pitch, int64_t rows, int64_t columns, float *to, const int64_t *strides) {
  for (int64_t r = 0; r < rows; r++, from += pitch, to += strides[0]) {
    if (strides[1] == 1) memcpy(to, from, (size_t)columns * sizeof(float));
    for (int64_t k = 0; k < columns && strides[1] != 1; k++) to[k * strides[1]] = from[k];
  }
}

static void attend(void *data, int64_t head, float *space) {
  const Job *j = data;
  Panels k = panels_in(&space, j->inside, j->keys), v = panels_in(&space, j->keys, j->outside);
  float *band = taken(&space, j->rows * j->wide_keys), *y = taken(&space, j->rows * j->wide_outside);
  const float *q = head_of(&j->q, head), *mask = j->mask ? mask_of(j, head) : NULL;
  float *to = head_of(&j->y, head);
  const int64_t *qs = j->q.strides + 2, *ks = j->k.strides + 2, *vs = j->v.strides + 2, *ys = j->y.strides + 2;
  lay(&k, head_of(&j->k, head), ks[1], ks[0], j->inside);
  lay(&v, head_of(&j->v, head), vs[0], vs[1], j->keys);
  for (int64_t first = 0; first < j->queries; first += j->rows) {
    const Band seen = band_of(j, first, mask);
    multiply(seen.rows, seen.wide, j->inside, q + first * qs[0], qs[0], qs[1], k, 0, seen.from, band, j->wide_keys, 0);
    normalize(j, band, &seen);
    multiply(seen.rows, rounded(j->outside), seen.keys, band, j->wide_keys, 1, v, seen.from, 0, y, j->wide_outside, 0);
    give(y, j->wide_outside, seen.rows, j->outside, to + first * ys[0], ys);
  }
}

static void pull(void *data, int64_t head, float *space) {
  const Job *j = data;
  const int64_t inside = rounded(j->inside), outside = rounded(j->outside);
  Panels kt = panels_in(&space, j->inside, j->keys), vt = panels_in(&space, j->outside, j->keys);
  Panels k = panels_in(&space, j->keys, j->inside), q = panels_in(&space, j->rows, j->inside);
  Panels g = panels_in(&space, j->rows, j->outside);
  float *dk = taken(&space, j->keys * j->wide_inside), *dv = taken(&space, j->keys * j->wide_outside);
  float *band = taken(&space, j->rows * j->wide_keys), *ds = taken(&space, j->rows * j->wide_keys);
  float *dq = taken(&space, j->rows * j->wide_inside);
  const float *mask = j->mask ? mask_of(j, head) : NULL, *keys = head_of(&j->k, head);
  const int64_t *qs = j->q.strides + 2, *ks = j->k.strides + 2, *vs = j->v.strides + 2, *gs = j->g.strides + 2;
  const int64_t *dqs = j->dq.strides + 2;
  lay(&kt, keys, ks[1], ks[0], j->inside);
  lay(&k, keys, ks[0], ks[1], j->keys);
  lay(&vt, head_of(&j->v, head), vs[1], vs[0], j->outside);
  memset(dk, 0, (size_t)(j->keys * j->wide_inside) * sizeof(float));
  memset(dv, 0, (size_t)(j->keys * j->wide_outside) * sizeof(float));
  for (int64_t first = 0; first < j->queries; first += j->rows) {
    const Band seen = band_of(j, first, mask);
    const int64_t rows = seen.rows, from = seen.from;
    const float *q_rows = head_of(&j->q, head) + first * qs[0], *g_rows = head_of(&j->g, head) + first * gs[0];
    lay(&q, q_rows, qs[0], qs[1], rows);
    lay(&g, g_rows, gs[0], gs[1], rows);
    multiply(rows, seen.wide, j->inside, q_rows, qs[0], qs[1], kt, 0, from, band, j->wide_keys, 0);
    normalize(j, band, &seen);
    multiply(seen.keys, outside, rows, band, 1, j->wide_keys, g, 0, 0, dv + from * j->wide_outside, j->wide_outside, 1);
    multiply(rows, seen.wide, j->outside, g_rows, gs[0], gs[1], vt, 0, from, ds, j->wide_keys, 0);
    pull_scores(j, band, ds, &seen);
    multiply(rows, inside, seen.keys, ds, j->wide_keys, 1, k, from, 0, dq, j->wide_inside, 0);
    give(dq, j->wide_inside, rows, j->inside, head_of(&j->dq, head) + first * dqs[0], dqs);
    multiply(seen.keys, inside, rows, ds, 1, j->wide_keys, q, 0, 0, dk + from * j->wide_inside, j->wide_inside, 1);
  }
  give(dk, j->wide_inside, j->keys, j->inside, head_of(&j->dk, head), j->dk.strides + 2);
  give(dv, j->wide_outside, j->keys, j->outside, head_of(&j->dv, head), j->dv.strides + 2);
}

enum { OPERANDS = 3, RESULTS = 3, VIEWS = 7 };

typedef struct {
  int64_t divides, guarded, order[4 * VIEWS]; /* the axes of each tensor that are heads, heads, rows and columns */
} Settings;

/* Whether axes are in an order, of which a tensor of rank 3 lacks the first. */
static int ordered(const int64_t *order, size_t rank) {
  int found = 0;
  for (int i = 0; i < 4; i++) found |= order[i] >= 0 && order[i] < 4 ? 1 << order[i] : 0;
  return found == 15 && (rank == 4 || (rank == 3 && !order[0]));
}

static int seen(View *view, const Shape *shape, const int64_t *order) {
  if (!ordered(order, shape->rank)) return 0;
  int64_t dims[4] = {1, 1, 1, 1}, strides[4], stride = 1;
  for (size_t i = 0; i < shape->rank; i++) dims[4 - shape->rank + i] = shape->dims[i];
  for (int i = 3; i >= 0; i--) strides[i] = stride, stride *= shape->count ? dims[i] : 1;
  for (int i = 0; i < 4; i++) view->dims[i] = dims[order[i]], view->strides[i] = strides[order[i]];
  return 1;
}

/* A result with the heads and rows of `like`; zeros where it is a sum of nothing. */
static int made(Call *call, size_t index, View *view, const View *like, int64_t columns, const int64_t *order,
                size_t rank, int is_nothing) {
  Shape shape = {.rank = rank};
  if (!ordered(order, rank)) return 0;
  for (int i = 0; i < 4; i++)
    if (rank == 4 || i) shape.dims[order[i] - (rank == 3)] = i == 3 ? columns : like->dims[i];
  view->at = output(call, index, &shape);
  if (view->at && !call->failed && is_nothing) memset(view->at, 0, (size_t)shape.count * sizeof(float));
  return seen(view, &shape, order);
}

static int sized(Job *j, const Shape *mask) {
  const View *q = &j->q, *k = &j->k, *v = &j->v;
  for (int i = 0; i < 2; i++)
    if (k->dims[i] != q->dims[i] || v->dims[i] != q->dims[i]) return 0;
  j->queries = q->dims[2], j->inside = q->dims[3], j->keys = k->dims[2], j->outside = v->dims[3];
  if (k->dims[3] != j->inside || v->dims[2] != j->keys) return 0;
  if (__builtin_mul_overflow(q->dims[0], q->dims[1], &j->heads)) return 0;
  if (!j->mask) return 1;
  int64_t stride = 1;
  const int64_t whole[4] = {q->dims[0], q->dims[1], j->queries, j->keys};
  for (size_t i = 0; i < mask->rank; i++) { /* from the last axis on */
    const int64_t here = mask->dims[mask->rank - 1 - i];
    if (i > 3 || (here != 1 && here != whole[3 - i])) return 0;
    j->mask_strides[3 - i] = here == 1 ? 0 : stride;
    stride *= mask->count ? here : 1;
  }
  return 1;
}

static void run(Call *call, Job *j) {
  j->wide_keys = padded(j->keys), j->wide_inside = padded(j->inside), j->wide_outside = padded(j->outside);
  j->rows = least(BAND_BYTES / 4 / j->wide_keys / ROWS * ROWS, MOST_ROWS);
  j->rows = least(most(j->rows, ROWS), j->queries);
  const int64_t matrices = j->wide_keys * (j->inside + j->outside) + 2 * j->keys * (j->wide_inside + j->wide_outside);
  const int64_t space = matrices + j->rows * 2 * (j->wide_keys + j->wide_inside + j->wide_outside);
  parallel_spaces(call, j->heads, space, j->g.at ? pull : attend, j);
}

/* (q, k, v, scale, mask) to y; or, with a cotangent of y before these, to those of (q, k, v). */
static void compute_any(Call *call, const Settings *s, const size_t pulled) {
  Job j = {.scale = input(call, pulled + 3), .mask = input(call, pulled + 4), .divides = s->divides != 0,
           .guarded = s->guarded != 0};
  const Shape scale = shape_of(call, pulled + 3), mask = shape_of(call, pulled + 4), q = shape_of(call, pulled);
  View *operands[] = {&j.q, &j.k, &j.v}, *results[] = {&j.dq, &j.dk, &j.dv};
  const int64_t *rest = s->order + 4 * OPERANDS;
  int sound = !j.scale || scale.count == 1;
  for (size_t i = 0; i < OPERANDS; i++) {
    const Shape shape = shape_of(call, pulled + i);
    operands[i]->at = (float *)input(call, pulled + i); /* only read */
    sound = sound && shape.rank == q.rank && seen(operands[i], &shape, s->order + 4 * i);
  }
  sound = sound && !call->failed && sized(&j, &mask);
  if (sound && pulled) {
    const Shape g = shape_of(call, 0);
    j.g.at = (float *)input(call, 0);
    sound = g.rank == q.rank && seen(&j.g, &g, rest) && j.g.dims[3] == j.outside;
    for (int i = 0; i < 3; i++) sound = sound && j.g.dims[i] == j.q.dims[i];
    for (size_t i = 0; i < RESULTS && sound; i++)
      sound = made(call, i, results[i], operands[i], operands[i]->dims[3], rest + 4 * (i + 1), q.rank,
                   !j.queries || !j.keys);
  } else if (sound) {
    sound = made(call, 0, &j.y, &j.q, j.outside, rest, q.rank, !j.keys);
  }
  if (refused(call, !sound, "Attention: operands do not belong together") || !j.heads || !j.queries || !j.keys) return;
  if (j.outside || (pulled && j.inside)) run(call, &j);
}

static void read(Attributes *from, void *settings) {
  Settings *s = settings;
  s->divides = attribute_int(from, "divides");
  s->guarded = attribute_int(from, "guarded");
  attribute_some_ints(from, "order", s->order, 4 * VIEWS); /* what is missing is no order */
}
static void compute(Call *call, const void *settings) { compute_any(call, settings, 0); }
static void compute_grad(Call *call, const void *settings) { compute_any(call, settings, 1); }

const Kernel attention_kernels[] = {
    {"Attention", "fffFF", "f", sizeof(Settings), read, compute},
    {"AttentionGrad", "ffffFF", "fff", sizeof(Settings), read, compute_grad},
    {0}};
