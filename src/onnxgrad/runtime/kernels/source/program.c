/* Programs as they are read from a file. */
#include "program.h"

/* Whether `count` columns from `first` on are of the value `at`, which is one with rows. */
static int reaches(const Program *p, int32_t at, int32_t first, int64_t count) {
  if (!within(at, p->values) || first < 0 || count < 1) return 0;
  const Value *v = &p->value[at];
  return v->kind != CONSTANT && v->kind != MATRIX && first + count <= v->width;
}

static const char *wrong_value(Program *p, int i, const Kernel *kernel) {
  const Value *v = &p->value[i];
  const int is_result = v->kind == RESULT || v->kind == STATE;
  if (!within(v->kind, KINDS) || v->width < 1 || v->width > WIDEST) return "a program has a value of no kind";
  if (v->kind == CONSTANT) return NULL;
  if (v->kind == REGISTER) {
    if (!within(v->place, WIDEST + 1 - v->width)) return "a register is too wide";
    p->columns = (int32_t)most(p->columns, v->place + v->width);
  } else if (!within(v->place, (int64_t)strlen(is_result ? kernel->outputs : kernel->inputs))) {
    return "a program has a value that is nowhere";
  }
  for (int k = 0; k < i && is_result; k++)
    if ((p->value[k].kind == RESULT || p->value[k].kind == STATE) && p->value[k].place == v->place)
      return "a program has a result twice";
  return NULL;
}

static const char *wrong_step(const Program *p, const Step *s, int64_t *written) {
  if (!within(s->code, CODES) || s->width < 1 || s->width > WIDEST) return "a program has an unknown operation";
  if (!reaches(p, s->at[0], s->first[0], s->width)) return "a step goes beyond its target";
  const int32_t kind = p->value[s->at[0]].kind;
  if (kind != REGISTER && kind != RESULT && kind != STATE) return "a step writes what is given";
  written[s->at[0]] += s->width;
  if (s->code == PRODUCT) {
    if (!within(s->at[3], p->values) || p->value[s->at[3]].kind != MATRIX) return "a product has no matrix";
    if (p->value[s->at[3]].width != s->width || s->first[3] > WIDEST || !reaches(p, s->at[1], s->first[1], s->first[3]))
      return "a product has the wrong size";
    return s->at[2] == -1 || reaches(p, s->at[2], s->first[2], s->width) ? NULL : "a product reads too much";
  }
  for (int k = 1; k <= operands_of(s); k++) {
    const Value *v = within(s->at[k], p->values) ? &p->value[s->at[k]] : NULL;
    const int is_one = v && s->code == COPY && v->width == 1;
    if (!v || (v->kind != CONSTANT && !reaches(p, s->at[k], s->first[k], is_one ? 1 : s->width)))
      return "a step reads too much";
  }
  return NULL;
}

/* As many things of `size` integers as there are; they begin at `out`. */
static int32_t read_all(Attributes *from, const char *name, int32_t *out, size_t size, size_t limit) {
  int64_t numbers[limit * size];
  const size_t count = attribute_some_ints(from, name, numbers, limit * size);
  if (count % size) attributes_fail(from, "a program is cut off");
  for (size_t i = 0; i < count; i++) {
    if (numbers[i] < INT32_MIN || numbers[i] > UINT32_MAX) attributes_fail(from, "a program has a number of 64 bits");
    out[i] = (int32_t)(uint32_t)numbers[i];
  }
  return (int32_t)(count / size);
}

void read_program(Attributes *from, Program *p, const Kernel *kernel) {
  int64_t written[VALUES] = {0};
  p->values = read_all(from, "values", &p->value->kind, sizeof(Value) / sizeof(int32_t), VALUES);
  p->steps = read_all(from, "steps", &p->step->code, sizeof(Step) / sizeof(int32_t), STEPS);
  const char *wrong = NULL;
  for (int i = 0; i < p->values && !wrong; i++) wrong = wrong_value(p, i, kernel);
  if (!wrong && p->columns > WIDEST) wrong = "registers are too wide";
  for (int i = 0; i < p->steps && !wrong; i++) wrong = wrong_step(p, &p->step[i], written);
  for (int i = 0; i < p->values && !wrong; i++)
    if ((p->value[i].kind == RESULT || p->value[i].kind == STATE) && written[i] != p->value[i].width)
      wrong = "a result is not written, or twice";
  if (wrong) attributes_fail(from, wrong);
  from->end = p->step + p->steps;
}
