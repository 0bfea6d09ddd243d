/* Programs: what groups of elementwise operators, sums of them, and recurrences are, in one format.
 *
 * A program has values and steps. A value has rows of `width` numbers, and is four integers: kind, width, place, flag. A
 * step is ten: what is done, on how many columns, and four times a value, then four times the column of it that is the
 * first one: where it goes, and what it comes from. Elementwise programs know rows of one number, for each element. */
#pragma once
#include "elementwise.h"
#include "kernel.h"

/* Most values, steps, operands and results, and columns of anything. */
enum { VALUES = 512, STEPS = 2048, OPERANDS = 40, RESULTS = 32, WIDEST = 1 << 16 };

/* What a value is, and what its place is: of the registers, the first column; one number, its bits (those beyond 32 in
 * `flag`); rows of an operand; rows of a result. In recurrences also: a state, the result that is its last and the operand
 * that is its first one; rows of an operand that are others at each time; one row of an operand for all; an operand that
 * is a matrix of as many columns as `width`. `flag`: whether times go backwards, or the matrix is turned. */
enum { REGISTER, CONSTANT, FIXED, RESULT, STATE, SCANNED, SHARED, MATRIX, KINDS };

enum {
#define NAMED(name, operands, kind, value) name,
  OPERATIONS(NAMED)
  /* also of one column, to all */
  COPY,
  /* of elements: the axes that are summed over, as bits from the last one on; what becomes of them */
  SUM,
  MEAN,
  /* rows; what is added, or a value of -1; a matrix, whose first column is its depth */
  PRODUCT,
  CODES
};

typedef struct {
  int32_t kind, width;
  _Alignas(8) int32_t place; /* with `flag` behind it, a constant of 64 bits */
  int32_t flag;
} Value;

typedef struct {
  int32_t code, width, at[4], first[4];
} Step;

typedef struct {
  int32_t values, steps, columns; /* of all registers */
  Value value[VALUES];
  Step step[STEPS];
} Program;

/* Reads the attributes "values" and "steps" of a call of `kernel`, whose settings end with the program. Afterwards no
 * number leads beyond a table, a value or an operand, and each result is written as often as it has columns. */
void read_program(Attributes *from, Program *, const Kernel *kernel);

/* Whether a number of a file is one from 0 to below `most`. */
static inline int within(int64_t number, int64_t most) { return number >= 0 && number < most; }

/* How many values a step reads. */
static inline int operands_of(const Step *step) {
  return step->code < COPY ? elementwise_operations[step->code].operands : step->code == PRODUCT ? 2 : 1;
}

static inline int is_sum(const Step *step) { return step->code == SUM || step->code == MEAN; }
