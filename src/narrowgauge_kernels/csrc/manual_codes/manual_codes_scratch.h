// Memory for the length of a call. No torch header.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace narrowgauge {
namespace codes {

// Blocks that a thread gave back and may take again. Memory that goes back to the system at the end
// of each call comes anew page by page in the next, which took longer than a layer's products.
class KeptBlocks {
 public:
  struct Block {
    std::unique_ptr<unsigned char[]> memory;
    std::size_t bytes;
  };

  // The smallest that is large enough and not four times as large, or a new one.
  Block take(std::size_t bytes) {
    std::size_t best = blocks_.size();
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      const bool fits = blocks_[i].bytes >= bytes && blocks_[i].bytes / 4 <= bytes;
      if (fits && (best == blocks_.size() || blocks_[i].bytes < blocks_[best].bytes)) {
        best = i;
      }
    }
    if (best == blocks_.size()) {
      return {std::unique_ptr<unsigned char[]>(new unsigned char[bytes]), bytes};
    }
    Block taken = std::move(blocks_[best]);
    kept_ -= taken.bytes;
    blocks_.erase(blocks_.begin() + static_cast<std::ptrdiff_t>(best));
    return taken;
  }

  // Those that nobody took for the longest time make room.
  void give(Block block) {
    if (block.bytes > kMostKept) {
      return;
    }
    kept_ += block.bytes;
    blocks_.push_back(std::move(block));
    while (kept_ > kMostKept) {
      kept_ -= blocks_.front().bytes;
      blocks_.erase(blocks_.begin());
    }
  }

  static KeptBlocks& here() {
    static thread_local KeptBlocks kept;
    return kept;
  }

 private:
  static constexpr std::size_t kMostKept = std::size_t(16) << 20;  // of a thread
  std::vector<Block> blocks_;
  std::size_t kept_ = 0;
};

// Scratch that starts on a cache line, and holds whatever was there.
template <typename T>
class Scratch {
 public:
  explicit Scratch(std::int64_t count)
      : block_(KeptBlocks::here().take(static_cast<std::size_t>(count) * sizeof(T) + kLine)) {
    void* start = block_.memory.get();
    std::size_t space = block_.bytes;
    data_ = static_cast<T*>(std::align(kLine, static_cast<std::size_t>(count) * sizeof(T), start,
                                       space));
  }
  ~Scratch() { KeptBlocks::here().give(std::move(block_)); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  T* data() { return data_; }
  const T* data() const { return data_; }

 private:
  static constexpr std::size_t kLine = 64;
  KeptBlocks::Block block_;
  T* data_;
};

}  // namespace codes
}  // namespace narrowgauge
