// AVX2: 256 bits.
#include "batch_norm/batch_norm_loops.h"

namespace narrowgauge {
namespace batch_norm {

Loops Loops::avx2() { return make_loops(); }

}  // namespace batch_norm
}  // namespace narrowgauge
