// Device code on the CPU: a block's threads are contexts that take turns, one block after the other
// (or one cluster of blocks), and change places at barriers and warp-wide instructions. What the instructions do is written from
// their specification (PTX ISA: ldmatrix, mma.m16n8k32, dp4a, cp.async), not from the kernels. An
// asynchronous copy happens when it is waited for, as late as it may. One launch at a time.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "cuda_runtime_api.h"

#define NARROWGAUGE_EMULATED_THREADS
#define __device__
#define __global__
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(bytes) alignas(bytes)

static dim3 threadIdx;
static dim3 blockIdx;
static dim3 blockDim;
static dim3 gridDim;

namespace emulated {

// Threads wait at one for the others; each passing makes the next generation.
struct Barrier {
  int expected = 0;
  int arrived = 0;
  int generation = 0;
};

struct Copy {
  void* to;
  const void* from;
  std::size_t bytes;
};

struct Thread {
  ucontext_t start;
  jmp_buf place;  // swapcontext would make a system call each time
  bool started = false;
  std::vector<char> stack;
  bool done = false;
  const Barrier* waits = nullptr;
  int generation = 0;
  std::vector<std::vector<Copy>> groups;
  std::vector<Copy> copies;
  // What a lane shows to its warp.
  const void* row = nullptr;
  std::uint32_t words[6] = {};
};

constexpr std::size_t kStackBytes = 128 * 1024;

static std::vector<Thread> threads;
static std::size_t block_threads;      // of one block; threads of a cluster's blocks follow
static std::vector<Barrier> barriers;  // the cluster's, then the blocks', then the warps'
static dim3 first_block;               // of the cluster, whose others are further on in y
static jmp_buf scheduler;
static std::size_t running;
static std::function<void()> body;
static std::vector<std::vector<std::uint64_t>> shared;  // of each block of the cluster

inline Thread& self() { return threads[running]; }
inline Thread& lane(std::size_t number) { return threads[running / 32 * 32 + number]; }

inline void leave() {
  if (_setjmp(self().place) == 0) {
    _longjmp(scheduler, 1);
  }
}

// Until the thread leaves again.
inline void resume(Thread& thread) {
  if (_setjmp(scheduler) == 0) {
    if (thread.started) {
      _longjmp(thread.place, 1);
    }
    thread.started = true;
    setcontext(&thread.start);
  }
}

inline void wait_at(Barrier& barrier) {
  if (++barrier.arrived == barrier.expected) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  self().waits = &barrier;
  self().generation = barrier.generation;
  leave();
}

inline std::size_t blocks() { return threads.size() / block_threads; }
inline std::size_t block() { return running / block_threads; }
inline unsigned char* memory_of(std::size_t number) {
  return reinterpret_cast<unsigned char*>(shared[number].data());
}

inline void wait_for_cluster() { wait_at(barriers[0]); }
inline void wait_for_block() { wait_at(barriers[1 + block()]); }
inline void wait_for_warp() { wait_at(barriers[1 + blocks() + running / 32]); }

inline void entry() {
  body();
  self().done = true;
  leave();
}

// Shared memory holds neither zeros nor what the last block left.
inline void prepare(std::size_t count, std::size_t shared_bytes, const dim3& at,
                    std::size_t clustered = 1) {
  block_threads = count;
  first_block = at;
  shared.assign(clustered,
                std::vector<std::uint64_t>(shared_bytes / 8 + 2, 0xA5C3A5C3A5C3A5C3u));
  threads.resize(count * clustered);
  barriers.assign(1 + clustered + count * clustered / 32, Barrier());
  for (std::size_t i = 0; i < barriers.size(); ++i) {
    barriers[i].expected = static_cast<int>(i == 0 ? count * clustered : i <= clustered ? count : 32);
  }
  for (Thread& thread : threads) {
    thread.stack.resize(kStackBytes);
    thread.done = false;
    thread.started = false;
    thread.waits = nullptr;
    thread.groups.clear();
    thread.copies.clear();
    getcontext(&thread.start);
    thread.start.uc_stack.ss_sp = thread.stack.data();
    thread.start.uc_stack.ss_size = kStackBytes;
    thread.start.uc_link = nullptr;
    makecontext(&thread.start, entry, 0);
  }
}

inline void run_blocks() {
  std::size_t left = threads.size();
  while (left > 0) {
    const std::size_t before = left;
    bool moved = false;
    for (running = 0; running < threads.size(); ++running) {
      Thread& thread = threads[running];
      if (thread.done || (thread.waits && thread.waits->generation == thread.generation)) {
        continue;
      }
      thread.waits = nullptr;
      threadIdx = dim3(static_cast<unsigned int>(running % block_threads), 0, 0);
      blockIdx = first_block;
      blockIdx.y += static_cast<unsigned int>(block());
      resume(thread);
      left -= thread.done ? 1 : 0;
      moved = true;
    }
    if (!moved && left == before) {
      std::abort();  // all wait: a barrier that not all threads reach
    }
  }
}

inline void perform(const std::vector<Copy>& copies) {
  for (const Copy& copy : copies) {
    std::memcpy(copy.to, copy.from, copy.bytes);
  }
}

inline int byte_of(std::uint32_t word, int index, bool is_signed) {
  const int byte = static_cast<int>(word >> (8 * index) & 255u);
  return is_signed && byte > 127 ? byte - 256 : byte;
}

}  // namespace emulated

inline void __syncthreads() { emulated::wait_for_block(); }
inline void __trap() { std::abort(); }

inline int atomicAdd(int* to, int value) {
  const int before = *to;
  *to = static_cast<int>(static_cast<unsigned int>(before) + static_cast<unsigned int>(value));
  return before;
}

namespace narrowgauge {
namespace codes {

inline unsigned char* shared_memory() { return emulated::memory_of(emulated::block()); }

template <int kBytes>
inline void copy_async(void* to, const void* from) {
  if (reinterpret_cast<std::uintptr_t>(to) % kBytes != 0 ||
      reinterpret_cast<std::uintptr_t>(from) % kBytes != 0) {
    std::abort();
  }
  emulated::self().copies.push_back({to, from, kBytes});
}

inline void end_copies() {
  emulated::self().groups.push_back(emulated::self().copies);
  emulated::self().copies.clear();
}

template <int kGroups>
inline void copies_left() {
  auto& groups = emulated::self().groups;
  while (groups.size() > kGroups) {
    emulated::perform(groups.front());
    groups.erase(groups.begin());
  }
}

inline void load_matrices(unsigned int (&words)[4], const void* row) {
  emulated::self().row = row;
  emulated::wait_for_warp();
  const std::size_t own = emulated::running % 32;
  for (std::size_t matrix = 0; matrix < 4; ++matrix) {
    const void* from = emulated::lane(8 * matrix + own / 4).row;
    std::memcpy(&words[matrix], static_cast<const char*>(from) + own % 4 * 4, 4);
  }
  emulated::wait_for_warp();
}

template <bool kASigned, bool kBSigned>
inline void multiply_matrices(int (&sums)[4], const unsigned int (&a)[4], unsigned int b0,
                              unsigned int b1) {
  const std::uint32_t shown[6] = {a[0], a[1], a[2], a[3], b0, b1};
  std::memcpy(emulated::self().words, shown, sizeof shown);
  emulated::wait_for_warp();
  const std::size_t group = emulated::running % 32 / 4;
  const std::size_t place = emulated::running % 4;
  for (int i = 0; i < 4; ++i) {
    // c0, c1: row `group`; c2, c3: row group + 8; columns 2 place and 2 place + 1.
    unsigned int sum = static_cast<unsigned int>(sums[i]);
    for (int k = 0; k < 32; ++k) {
      const std::size_t holder = static_cast<std::size_t>(k % 16 / 4);
      const int a_word = (i >= 2 ? 1 : 0) + (k >= 16 ? 2 : 0);
      const std::size_t column = 2 * place + static_cast<std::size_t>(i % 2);
      const int left = emulated::byte_of(emulated::lane(4 * group + holder).words[a_word], k % 4,
                                         kASigned);
      const int right = emulated::byte_of(
          emulated::lane(4 * column + holder).words[4 + (k >= 16 ? 1 : 0)], k % 4, kBSigned);
      sum += static_cast<unsigned int>(left * right);
    }
    sums[i] = static_cast<int>(sum);
  }
  emulated::wait_for_warp();
}

template <bool kASigned, bool kBSigned>
inline int multiply_bytes(unsigned int a, unsigned int b, int sum) {
  unsigned int result = static_cast<unsigned int>(sum);
  for (int i = 0; i < 4; ++i) {
    result += static_cast<unsigned int>(emulated::byte_of(a, i, kASigned) *
                                        emulated::byte_of(b, i, kBSigned));
  }
  return static_cast<int>(result);
}

inline unsigned int low_halves(unsigned int first, unsigned int second) {
  return (first & 0xffffu) | second << 16;
}
inline unsigned int high_halves(unsigned int first, unsigned int second) {
  return first >> 16 | (second & 0xffff0000u);
}

inline unsigned int interleave_low(unsigned int first, unsigned int second) {
  return (first & 0xffu) | (second & 0xffu) << 8 | (first & 0xff00u) << 8 |
         (second & 0xff00u) << 16;
}
inline unsigned int interleave_high(unsigned int first, unsigned int second) {
  return interleave_low(first >> 16, second >> 16);
}

template <typename Kernel, typename... Arguments>
inline cudaError_t enqueue(Kernel kernel, const dim3& grid, int count, int shared_bytes,
                           cudaStream_t, const Arguments&... arguments) {
  gridDim = grid;
  blockDim = dim3(static_cast<unsigned int>(count));
  emulated::body = [&] { kernel(arguments...); };
  for (unsigned int z = 0; z < grid.z; ++z) {
    for (unsigned int y = 0; y < grid.y; ++y) {
      for (unsigned int x = 0; x < grid.x; ++x) {
        emulated::prepare(static_cast<std::size_t>(count), static_cast<std::size_t>(shared_bytes),
                          dim3(x, y, z));
        emulated::run_blocks();
      }
    }
  }
  return cudaSuccess;
}

}  // namespace codes
}  // namespace narrowgauge
