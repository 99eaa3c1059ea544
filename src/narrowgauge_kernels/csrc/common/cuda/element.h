// What a tensor consists of, said to launchers, which know no torch header.
#pragma once

namespace narrowgauge {

enum class Element { kFloat32, kFloat64, kFloat16, kBFloat16 };

}  // namespace narrowgauge
