/* Cotangents of normalizations. */

#include "kernel.h"

const Kernel normalization_kernels[] = {{0}};
