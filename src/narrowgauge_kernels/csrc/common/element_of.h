// The Element of a tensor whose dtype was checked to be one.
#pragma once

#include "common/cuda/element.h"
#include "common/torch_tensor.h"

namespace narrowgauge {

inline Element element_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return Element::kFloat64;
    case at::kHalf:
      return Element::kFloat16;
    case at::kBFloat16:
      return Element::kBFloat16;
    default:
      return Element::kFloat32;
  }
}

}  // namespace narrowgauge
