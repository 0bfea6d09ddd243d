/* Elementwise programs of doubles and int64. */
#define DOUBLE
#define elementwise_kernels elementwise_double_kernels
#define elementwise_operations elementwise_double_operations
#include "elementwise.c"
