// Any processor's.
#include "batch_norm/batch_norm_loops.h"

namespace narrowgauge {
namespace batch_norm {

Loops Loops::generic() { return make_loops(); }

}  // namespace batch_norm
}  // namespace narrowgauge
