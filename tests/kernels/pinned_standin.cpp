// The allocator of page-locked memory, on a driver that gives ordinary memory: for hosts without a
// GPU. Everything but that driver is what runs on one. Called through ctypes.
#include <cstdlib>

#include "pinned_memory/pinned_allocator.h"

using namespace narrowgauge::pinned;

namespace {

class StandIn final : public Driver {
 public:
  void* allocate(std::size_t bytes) override {
    ++calls;
    void* pointer = nullptr;
    return refuses || posix_memalign(&pointer, kLeastBlock, bytes) != 0 ? nullptr : pointer;
  }
  bool has_passed(Mark mark) override {
    ++calls;
    return *static_cast<bool*>(mark);
  }
  std::atomic<bool> refuses{false};
  std::atomic<long> calls{0};
};

StandIn& driver() {
  static StandIn* made = new StandIn();
  return *made;
}

Pool& pool() { return PinnedAllocator::current()->pool(); }

}  // namespace

extern "C" {

void standin_install(std::size_t limit) {
  if (PinnedAllocator::current() == nullptr) {
    PinnedAllocator::install(driver(), limit);
  } else {
    pool().set_limit(limit);
  }
}
void standin_refuse(bool refuses) { driver().refuses = refuses; }
long standin_calls() { return driver().calls; }
bool standin_owns(const void* pointer) { return pool().owns(pointer); }
void standin_keep(const void* pointer, bool* passed) { pool().keep_until(pointer, passed); }
void standin_abandon(const void* pointer) { pool().abandon(pointer); }
std::size_t standin_class(std::size_t bytes) { return size_class(bytes); }
void standin_statistics(std::size_t* numbers) {
  const Statistics now = pool().statistics();
  const std::size_t all[] = {now.held,  now.used,           now.peak,
                             now.limit, now.pageable_bytes, now.pageable_allocations};
  std::copy(all, all + 6, numbers);
}

}  // extern "C"
