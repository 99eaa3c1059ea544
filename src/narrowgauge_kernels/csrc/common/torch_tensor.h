// torch's tensor, and what makes one: all of ATen takes a compiler three times as long.
#pragma once

#if __has_include(<ATen/ops/empty.h>)  // a header for each operator: torch 1.11 and later
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#else
#include <ATen/ATen.h>
#endif
