// What custom.py compiles a user's functor with, for the CPU: a library that gives out one Kernel.
#pragma once

#include "manual_float/manual_float_micro.h"

#define NARROWGAUGE_MANUAL_CPU(Multiply)                                                    \
  extern "C" __attribute__((visibility("default"))) const narrowgauge::manual::Kernel*      \
  narrowgauge_manual_kernel() {                                                             \
    return narrowgauge::manual::kernel_of<narrowgauge::mac::Custom<Multiply>, 4, 2>();      \
  }
