// NEON: 128 bits.
//
// unverified: NEON loops of batch normalisation | no arm64 host was at hand | on an arm64 host: pytest tests/kernels
#include "batch_norm/batch_norm_loops.h"

namespace narrowgauge {
namespace batch_norm {

Loops Loops::neon() { return make_loops(); }

}  // namespace batch_norm
}  // namespace narrowgauge
