// torch's allocator of CPU memory on a pool, and the one before it for what the pool does not take.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>

#include "pinned_memory/pinned_pool.h"

namespace narrowgauge {
namespace pinned {

class PinnedAllocator final : public c10::Allocator {
 public:
  // Above the 0 of those that torch sets as it is loaded.
  static constexpr std::uint8_t kPriority = 100;

  // Makes it the allocator of the process, for good: tensors keep pointers to it.
  static PinnedAllocator& install(Driver& driver, std::size_t limit) {
    c10::Allocator* previous = c10::GetCPUAllocator();
    TORCH_CHECK(previous->raw_deleter() != nullptr,
                "pinned: the allocator of CPU memory in this process does not say how it frees");
    PinnedAllocator* allocator = new PinnedAllocator(driver, limit, *previous);
    current() = allocator;
    c10::SetCPUAllocator(allocator, kPriority);
    TORCH_CHECK(c10::GetCPUAllocator() == allocator,
                "pinned: the allocator of CPU memory in this process cannot be replaced");
    return *allocator;
  }
  // nullptr before `install`.
  static PinnedAllocator*& current() {
    static PinnedAllocator* allocator = nullptr;
    return allocator;
  }

  Pool& pool() { return pool_; }

  // One of the two is what this torch's base class declares: it is const before torch 2.3.
  c10::DataPtr allocate(std::size_t bytes) { return allocated(bytes); }
  c10::DataPtr allocate(std::size_t bytes) const { return allocated(bytes); }

  // Takes what came from the previous allocator too: code that frees by this deleter, such as
  // oneDNN's, may have allocated before `install`.
  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  // Of the base class from torch 2.2 on.
  void copy_data(void* to, const void* from, std::size_t count) const {
    std::memcpy(to, from, count);
  }

 private:
  PinnedAllocator(Driver& driver, std::size_t limit, c10::Allocator& previous)
      : pool_(driver, limit), previous_(previous) {}

  c10::DataPtr allocated(std::size_t bytes) const {
    void* pointer = pool_.take(bytes);
    if (pointer == nullptr) {
      return previous_.allocate(bytes);
    }
    c10::profiledCPUMemoryReporter().New(pointer, bytes);
    return {pointer, pointer, &release, c10::Device(c10::DeviceType::CPU)};
  }

  static void release(void* pointer) {
    PinnedAllocator& own = *current();
    if (own.pool_.owns(pointer)) {
      c10::profiledCPUMemoryReporter().Delete(pointer);
      own.pool_.give_back(pointer);
    } else {
      own.previous_.raw_deleter()(pointer);
    }
  }

  mutable Pool pool_;
  c10::Allocator& previous_;
};

}  // namespace pinned
}  // namespace narrowgauge
