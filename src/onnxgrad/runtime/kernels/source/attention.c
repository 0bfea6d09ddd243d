/* Attention, Y = P V with P = softmax(s Q K' + mask), and its cotangents, without a matrix of all scores.
 *
 * A band of rows of P at a time is computed, as wide as there are keys, so that it stays near the processor. For the
 * cotangents it is computed again:
 *
 *   dP = dY V'      dS = s P (dP - sum P dP)      Q: dS K      K: dS' Q      V: P' dY
 *
 * Heads are divided among the threads. Operands and results are seen through an order of their axes, which saves the
 * transposes around them. A head's operands are copied first, with rows that are whole vectors; in a band, columns
 * beyond the keys have probability 0. Keys that a mask hides from all queries of a band are left out at both ends.
 */
#include <math.h>
#include <string.h>
#ifdef _WIN32
#include <stdlib.h>
#else
#include <unistd.h>
#endif

#include "exponential.h"
#include "heads.h"

enum { BAND_BYTES = 1 << 16, MOST_ROWS = 64, MOST_PIECES = 256 };

/* What a mask adds so that nothing is left, beside any score that is not hidden. */
#define HIDDEN (-1e30f)

typedef struct {
  View q, k, v, g, y, dq, dk, dv; /* rows are queries or keys */
  const float *mask, *scale;
  float *space;
  int64_t heads, queries, keys, inside, outside;
  int64_t rows, wide_keys, wide_inside, wide_outside, room; /* of a band; rounded up to vectors; of a thread's space */
  int64_t mask_strides[4], pieces, next;
  int divides, guarded; /* guarded: a query whose probabilities are no numbers has none */
} Job;

/* Some queries, and the keys that they see. */
typedef struct {
  int64_t first, rows, from, keys, wide;
  const float *mask;
} Band;

/* --- a band of probabilities -------------------------------------------------------------------------------------- */

static const float *mask_of(const Job *j, int64_t head) {
  return j->mask + head / j->q.dims[1] * j->mask_strides[0] + head % j->q.dims[1] * j->mask_strides[1];
}

INLINE lanes scaled(const Job *j, lanes v) {
  const lanes scales = lanes_of(*j->scale);
  return j->divides ? v / scales : v * scales;
}

/* A vector of scores, given the products, of which `count` are there. */
INLINE lanes score_of(const Job *j, lanes v, const float *mask, int64_t along, int64_t count) {
  if (j->scale) v = scaled(j, v);
  if (mask) v += along ? lanes_read(mask, count, 0) : lanes_of(*mask);
  if (count < LANES) {
    float all[LANES];
    memcpy(all, &v, sizeof v);
    for (int64_t i = count; i < LANES; i++) all[i] = -INFINITY;
    memcpy(&v, all, sizeof v);
  }
  return v;
}

/* Queries from `first` on; all keys, where one of them sees none. */
static Band band_of(const Job *j, int64_t first, const float *mask) {
  const int64_t down = j->mask_strides[2];
  Band band = {first, least(j->rows, j->queries - first), 0, j->keys, j->wide_keys, mask ? mask + first * down : NULL};
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
  band.from = low / LANES * LANES;
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
    int64_t k = 0;
    for (; k + LANES <= band->keys; k += LANES) {
      const lanes here = score_of(j, *(lanes *)(s + k), add ? add + k * along : NULL, along, LANES);
      *(lanes *)(s + k) = here;
      most = lanes_most(here, most);
    }
    if (k < band->keys) {
      const lanes here = score_of(j, *(lanes *)(s + k), add ? add + k * along : NULL, along, band->keys - k);
      *(lanes *)(s + k) = here;
      most = lanes_most(here, most);
    }
    const lanes mosts = lanes_of(lanes_largest(most));
    lanes total = {0};
    for (k = 0; k < band->wide; k += LANES) {
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
    for (k = 0; k < band->wide; k += LANES) *(lanes *)(s + k) *= inverse;
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

/* --- a head ------------------------------------------------------------------------------------------------------- */

INLINE float *taken(float **space, int64_t count) {
  float *here = *space;
  *space += count;
  return here;
}

static void attend(const Job *j, int64_t head, float *space) {
  float *k = taken(&space, j->inside * j->wide_keys), *v = taken(&space, j->keys * j->wide_outside);
  float *band = taken(&space, j->rows * j->wide_keys), *y = taken(&space, j->rows * j->wide_outside);
  const float *q = head_of(&j->q, head), *mask = j->mask ? mask_of(j, head) : NULL;
  float *to = head_of(&j->y, head);
  const int64_t *qs = j->q.strides + 2, *ks = j->k.strides + 2, *vs = j->v.strides + 2, *ys = j->y.strides + 2;
  transposed(head_of(&j->k, head), ks[0], ks[1], j->keys, j->inside, k, j->wide_keys);
  packed(head_of(&j->v, head), vs[0], vs[1], j->keys, j->outside, v, j->wide_outside);
  for (int64_t first = 0; first < j->queries; first += j->rows) {
    const Band seen = band_of(j, first, mask);
    const int64_t rows = seen.rows;
    const float *values = v + seen.from * j->wide_outside;
    product(rows, seen.wide, j->inside, q + first * qs[0], qs[0], qs[1], k + seen.from, j->wide_keys, band,
            j->wide_keys);
    normalize(j, band, &seen);
    product(rows, j->wide_outside, seen.keys, band, j->wide_keys, 1, values, j->wide_outside, y, j->wide_outside);
    unpacked(y, j->wide_outside, rows, j->outside, to + first * ys[0], ys[0], ys[1]);
  }
}

static void pull(const Job *j, int64_t head, float *space) {
  float *kt = taken(&space, j->inside * j->wide_keys), *k = taken(&space, j->keys * j->wide_inside);
  float *vt = taken(&space, j->outside * j->wide_keys), *dk = taken(&space, j->keys * j->wide_inside);
  float *dv = taken(&space, j->keys * j->wide_outside), *band = taken(&space, j->rows * j->wide_keys);
  float *ds = taken(&space, j->rows * j->wide_keys), *q = taken(&space, j->rows * j->wide_inside);
  float *dq = taken(&space, j->rows * j->wide_inside), *g = taken(&space, j->rows * j->wide_outside);
  const float *mask = j->mask ? mask_of(j, head) : NULL, *keys = head_of(&j->k, head);
  const int64_t *qs = j->q.strides + 2, *ks = j->k.strides + 2, *vs = j->v.strides + 2, *gs = j->g.strides + 2;
  const int64_t *dqs = j->dq.strides + 2, *dks = j->dk.strides + 2, *dvs = j->dv.strides + 2;
  transposed(keys, ks[0], ks[1], j->keys, j->inside, kt, j->wide_keys);
  packed(keys, ks[0], ks[1], j->keys, j->inside, k, j->wide_inside);
  transposed(head_of(&j->v, head), vs[0], vs[1], j->keys, j->outside, vt, j->wide_keys);
  memset(dk, 0, (size_t)(j->keys * j->wide_inside) * sizeof(float));
  memset(dv, 0, (size_t)(j->keys * j->wide_outside) * sizeof(float));
  for (int64_t first = 0; first < j->queries; first += j->rows) {
    const Band seen = band_of(j, first, mask);
    const int64_t rows = seen.rows, inside = seen.from * j->wide_inside, outside = seen.from * j->wide_outside;
    packed(head_of(&j->q, head) + first * qs[0], qs[0], qs[1], rows, j->inside, q, j->wide_inside);
    packed(head_of(&j->g, head) + first * gs[0], gs[0], gs[1], rows, j->outside, g, j->wide_outside);
    product(rows, seen.wide, j->inside, q, j->wide_inside, 1, kt + seen.from, j->wide_keys, band, j->wide_keys);
    normalize(j, band, &seen);
    add_product(seen.keys, j->wide_outside, rows, band, 1, j->wide_keys, g, j->wide_outside, dv + outside,
                j->wide_outside);
    product(rows, seen.wide, j->outside, g, j->wide_outside, 1, vt + seen.from, j->wide_keys, ds, j->wide_keys);
    pull_scores(j, band, ds, &seen);
    product(rows, j->wide_inside, seen.keys, ds, j->wide_keys, 1, k + inside, j->wide_inside, dq, j->wide_inside);
    unpacked(dq, j->wide_inside, rows, j->inside, head_of(&j->dq, head) + first * dqs[0], dqs[0], dqs[1]);
    add_product(seen.keys, j->wide_inside, rows, ds, 1, j->wide_keys, q, j->wide_inside, dk + inside, j->wide_inside);
  }
  unpacked(dk, j->wide_inside, j->keys, j->inside, head_of(&j->dk, head), dks[0], dks[1]);
  unpacked(dv, j->wide_outside, j->keys, j->outside, head_of(&j->dv, head), dvs[0], dvs[1]);
}

/* Heads, one after the other, in a space of its own. */
static void some(void *data, size_t piece) {
  Job *j = data;
  for (;;) {
    const int64_t head = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED);
    if (head >= j->heads) return;
    expect(&j->k, head + j->pieces, j->heads);
    expect(&j->v, head + j->pieces, j->heads);
    if (j->g.at) expect(&j->g, head + j->pieces, j->heads);
    if (j->g.at)
      pull(j, head, j->space + (int64_t)piece * j->room);
    else
      attend(j, head, j->space + (int64_t)piece * j->room);
  }
}

/* --- operands and results ----------------------------------------------------------------------------------------- */

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

/* A result with the heads and rows of `like`, and zeros for a start: those are sums of nothing. */
static int made(Call *call, size_t index, View *view, const View *like, int64_t columns, const int64_t *order,
                size_t rank) {
  Shape shape = {.rank = rank, .count = 1};
  if (!ordered(order, rank)) return 0;
  int64_t dims[4], others = 1;
  for (int i = 0; i < 4; i++) dims[order[i]] = i == 3 ? columns : like->dims[i];
  for (size_t i = 0; i < rank; i++) {
    const int64_t here = shape.dims[i] = dims[4 - rank + i];
    if (here && (__builtin_mul_overflow(others, here, &others) || others > MOST_NUMBERS)) return 0;
    shape.count = here && shape.count ? others : 0;
  }
  view->at = output(call, index, &shape);
  if (view->at && !call->failed) memset(view->at, 0, (size_t)shape.count * sizeof(float));
  return seen(view, &shape, order);
}

/* Sizes; 0 where they do not belong together. */
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

static int64_t processors(void) {
#ifdef _WIN32
  const char *told = getenv("NUMBER_OF_PROCESSORS");
  const long count = told ? atol(told) : 1;
#else
  const long count = sysconf(_SC_NPROCESSORS_ONLN);
#endif
  return count < 1 ? 1 : count;
}

static void run(Call *call, Job *j) {
  j->wide_keys = rounded(j->keys), j->wide_inside = rounded(j->inside), j->wide_outside = rounded(j->outside);
  j->rows = least(BAND_BYTES / 4 / j->wide_keys / TILE * TILE, MOST_ROWS);
  if (j->rows < TILE) j->rows = TILE;
  j->rows = least(j->rows, j->queries);
  const int64_t matrices = j->wide_keys * (j->inside + j->outside) + j->keys * (2 * j->wide_inside + j->wide_outside);
  j->room = rounded(matrices + j->rows * 2 * (j->wide_keys + j->wide_inside + j->wide_outside));
  j->pieces = least(j->heads, least(processors(), MOST_PIECES));
  j->space = scratch(call, j->pieces * j->room, sizeof(float));
  if (!call->failed) parallel(call, (size_t)j->pieces, some, j);
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
      sound = made(call, i, results[i], operands[i], operands[i]->dims[3], rest + 4 * (i + 1), q.rank);
  } else if (sound) {
    sound = made(call, 0, &j.y, &j.q, j.outside, rest, q.rank);
  }
  if (!sound) fail(call, "Attention: operands do not belong together");
  if (call->failed || !j.heads || !j.queries || !j.keys || !(j.outside || (pulled && j.inside))) return;
  run(call, &j);
}

static void compute(Call *call, const void *settings) { compute_any(call, settings, 0); }
static void compute_grad(Call *call, const void *settings) { compute_any(call, settings, 1); }

static void read_settings(Attributes *from, Settings *s, size_t views) {
  s->divides = attribute_int(from, "divides");
  s->guarded = attribute_int(from, "guarded");
  attribute_ints(from, "order", s->order, 4 * views);
}
static void read_forward(Attributes *from, void *settings) { read_settings(from, settings, OPERANDS + 1); }
static void read_backward(Attributes *from, void *settings) { read_settings(from, settings, VIEWS); }

const Kernel attention_kernels[] = {
    {"Attention", "fffFF", "f", sizeof(Settings), read_forward, compute},
    {"AttentionGrad", "ffffFF", "fff", sizeof(Settings), read_backward, compute_grad},
    {0},
};
