/* Cotangents that are picked or added by rows, windows or signs: embeddings, pooling, ReLU. */

#include "kernel.h"

const Kernel row_kernels[] = {{0}};
