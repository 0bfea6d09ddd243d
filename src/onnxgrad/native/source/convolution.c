/* Cotangents of the weights of convolutions. */

#include "kernel.h"

const Kernel convolution_kernels[] = {{0}};
