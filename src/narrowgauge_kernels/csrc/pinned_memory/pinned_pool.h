// A pool of page-locked blocks by size class. Knows neither torch nor CUDA: a driver gives the memory
// and says what a stream has done.
//
// A block never goes back to the driver: giving it back would wait for the device, and at the end of
// the process there may be no driver left. So nothing here asks the driver when memory is freed.
//
// A process that was forked from one with a pool may not call the driver, and the memory may not be
// there: it gets nothing from the pool, and what it gives back stays where it is.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace narrowgauge {
namespace pinned {

// Smaller than a page is not worth one, and moves in no time.
constexpr std::size_t kLeastBlock = 4096;
// At the limit a free block of up to so many times the size asked for does as well.
constexpr std::size_t kMostWaste = 4;

// A place in a stream's work, as the driver names it.
using Mark = void*;

class Driver {
 public:
  virtual ~Driver() = default;
  // Page-locked memory, or nullptr where there is none.
  virtual void* allocate(std::size_t bytes) = 0;
  // Whether the stream has got there. Once it has, the mark is not asked for again.
  virtual bool has_passed(Mark mark) = 0;
};

// All in bytes of whole blocks, but what is counted as pageable: that in bytes asked for.
struct Statistics {
  std::size_t held;   // page-locked by the pool
  std::size_t used;   // of it, in somebody's hands, or read or written by a stream still
  std::size_t peak;   // the most that was used
  std::size_t limit;  // of what may be held
  std::size_t pageable_bytes;
  std::size_t pageable_allocations;
};

// The least power of two that holds `bytes`, or three quarters of it where that does.
inline std::size_t size_class(std::size_t bytes) {
  std::size_t whole = kLeastBlock;
  while (whole < bytes) {
    whole *= 2;
  }
  const std::size_t less = whole / 4 * 3;
  return bytes <= less && less >= kLeastBlock ? less : whole;
}

class Pool {
 public:
  Pool(Driver& driver, std::size_t limit) : driver_(driver), limit_(limit) {
    instance() = this;
    pthread_atfork(before_fork, after_fork, after_fork_in_child);
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Also asks a driver again that had refused.
  void set_limit(std::size_t limit) {
    const std::lock_guard<std::mutex> guard(mutex_);
    limit_ = limit;
    refused_ = false;
  }

  // nullptr where ordinary memory has to do.
  void* take(std::size_t bytes) {
    if (bytes < kLeastBlock || bytes > kLargest) {
      return nullptr;
    }
    const std::size_t size = size_class(bytes);
    std::unique_lock<std::mutex> lock(mutex_);
    if (forked_) {
      return nullptr;
    }
    Block* block = free_block(size);
    if (block == nullptr) {
      block = new_block(size, lock);
    }
    if (block == nullptr) {
      block = larger_block(size);
    }
    if (block == nullptr) {
      pageable_bytes_ += bytes;
      ++pageable_allocations_;
      return nullptr;
    }
    block->lent = true;
    used_ += block->bytes;
    peak_ = std::max(peak_, used_);
    return block->pointer;
  }

  bool owns(const void* pointer) {
    // Almost everything else lies elsewhere, so that the lock is rarely taken for it.
    const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(pointer);
    if (at < lowest_.load(std::memory_order_relaxed) ||
        at > highest_.load(std::memory_order_relaxed)) {
      return false;
    }
    const std::lock_guard<std::mutex> guard(mutex_);
    return blocks_.count(pointer) != 0;
  }

  // Of a pointer that it `owns`.
  void give_back(void* pointer) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (forked_) {
      return;
    }
    Block& block = *blocks_.at(pointer);
    block.lent = false;
    if (block.abandoned) {
      return;  // used for good
    }
    if (block.marks.empty()) {
      used_ -= block.bytes;
      free_[block.bytes].push_back(&block);
    } else {
      waiting_.push_back(&block);
    }
  }

  // The block is not used again before the stream has got to the mark. Of a pointer that it `owns`.
  void keep_until(const void* pointer, Mark mark) {
    const std::lock_guard<std::mutex> guard(mutex_);
    blocks_.at(pointer)->marks.push_back(mark);
  }

  // The block is not used again: a captured graph may read it at any time.
  void abandon(const void* pointer) {
    const std::lock_guard<std::mutex> guard(mutex_);
    blocks_.at(pointer)->abandoned = true;
  }

  Statistics statistics() {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (!forked_) {
      settle();
    }
    return {held_, used_, peak_, limit_, pageable_bytes_, pageable_allocations_};
  }

 private:
  // Above it, classes would overflow.
  static constexpr std::size_t kLargest = std::size_t(1) << 62;

  struct Block {
    void* pointer;
    std::size_t bytes;
    std::vector<Mark> marks;
    bool lent;
    bool abandoned;
  };

  Block* free_block(std::size_t size) {
    Block* block = pop(size);
    if (block == nullptr && !waiting_.empty()) {
      settle();
      block = pop(size);
    }
    return block;
  }

  Block* pop(std::size_t size) {
    const auto found = free_.find(size);
    if (found == free_.end() || found->second.empty()) {
      return nullptr;
    }
    Block* block = found->second.back();
    found->second.pop_back();
    return block;
  }

  // Frees what streams have done with.
  void settle() {
    const auto is_done = [this](Block* block) {
      std::vector<Mark>& marks = block->marks;
      marks.erase(std::remove_if(marks.begin(), marks.end(),
                                 [this](Mark mark) { return driver_.has_passed(mark); }),
                  marks.end());
      if (marks.empty() && !block->abandoned) {
        used_ -= block->bytes;
        free_[block->bytes].push_back(block);
      }
      return marks.empty();
    };
    waiting_.erase(std::remove_if(waiting_.begin(), waiting_.end(), is_done), waiting_.end());
  }

  // Unlocked while the driver works: that takes milliseconds.
  Block* new_block(std::size_t size, std::unique_lock<std::mutex>& lock) {
    if (refused_ || held_ + size > limit_) {
      return nullptr;
    }
    held_ += size;
    lock.unlock();
    void* pointer = driver_.allocate(size);
    lock.lock();
    if (pointer == nullptr) {
      held_ -= size;
      refused_ = true;
      return nullptr;
    }
    const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(pointer);
    lowest_ = std::min(lowest_.load(), at);
    highest_ = std::max(highest_.load(), at);
    std::unique_ptr<Block> made(new Block{pointer, size, {}, false, false});
    Block* block = made.get();
    blocks_[pointer] = std::move(made);
    return block;
  }

  Block* larger_block(std::size_t size) {
    for (auto found = free_.upper_bound(size);
         found != free_.end() && found->first / kMostWaste <= size; ++found) {
      if (!found->second.empty()) {
        return pop(found->first);
      }
    }
    return nullptr;
  }

  // There is one pool: the handlers of a fork know no other. A child gets the lock in order, because
  // nobody has it while the fork happens.
  static Pool*& instance() {
    static Pool* pool = nullptr;
    return pool;
  }
  static void before_fork() { instance()->mutex_.lock(); }
  static void after_fork() { instance()->mutex_.unlock(); }
  static void after_fork_in_child() {
    instance()->forked_ = true;
    instance()->mutex_.unlock();
  }

  Driver& driver_;
  std::mutex mutex_;
  bool forked_ = false;
  bool refused_ = false;
  std::size_t limit_;
  std::size_t held_ = 0;
  std::size_t used_ = 0;
  std::size_t peak_ = 0;
  std::size_t pageable_bytes_ = 0;
  std::size_t pageable_allocations_ = 0;
  std::atomic<std::uintptr_t> lowest_{UINTPTR_MAX};
  std::atomic<std::uintptr_t> highest_{0};
  std::unordered_map<const void*, std::unique_ptr<Block>> blocks_;
  std::map<std::size_t, std::vector<Block*>> free_;
  std::vector<Block*> waiting_;
};

}  // namespace pinned
}  // namespace narrowgauge
