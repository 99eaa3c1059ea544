// The device code of the manual layers on emulated threads: each thread of a block is a coroutine that
// runs to the next barrier. What a GPU would punish at random is punished here, too: threads take turns
// in an order that changes, an asynchronous copy arrives at once or when it is waited for, by chance,
// and reads outside the operands are counted.
// C interface for ctypes; a convolution and a plan are rows of numbers in the order of their fields.
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <vector>

namespace emulated {

struct Index {
  unsigned int x;
};

struct float4_ {
  float x, y, z, w;
} __attribute__((aligned(16)));

struct Copy {
  float* target;
  const float* source;
  int count;
  bool inside;
};

struct Range {
  const char* first;
  const char* last;
};

struct Thread {
  ucontext_t context;
  std::vector<char> stack;
  std::deque<std::vector<Copy>> groups;
  std::vector<Copy> open;
  bool done;
};

Index thread_index, block_index, grid_size;
std::vector<Range> readable;
std::vector<std::unique_ptr<Thread>> threads;
Thread* current = nullptr;
ucontext_t scheduler;
std::function<void()> body;
std::mt19937 chance(20221122);
int faults = 0;
bool vote = false;     // of the threads that have come to the next barrier
bool outcome = false;  // of all, at the last one

bool may_read(const float* source, int count) {
  const char* const first = reinterpret_cast<const char*>(source);
  const char* const last = first + count * sizeof(float);
  return std::any_of(readable.begin(), readable.end(), [&](const Range& range) {
    return first >= range.first && last <= range.last;
  });
}

void barrier() { swapcontext(&current->context, &scheduler); }

int barrier_or(int own) {
  vote = vote || own != 0;
  barrier();
  return outcome;
}

void arrive(const Copy& copy) {
  if (reinterpret_cast<std::uintptr_t>(copy.source) % (copy.count * sizeof(float)) != 0) {
    faults += copy.inside ? 1 : 0;
  }
  if (copy.inside && !may_read(copy.source, copy.count)) {
    ++faults;
    return;
  }
  for (int i = 0; i < copy.count; ++i) {
    copy.target[i] = copy.inside ? copy.source[i] : 0.0f;
  }
}

void enter() {
  body();
  current->done = true;
  swapcontext(&current->context, &scheduler);
}

void ready(Thread& thread) {
  thread.stack.resize(64 * 1024);
  thread.done = false;
  thread.groups.clear();
  thread.open.clear();
  getcontext(&thread.context);
  thread.context.uc_stack.ss_sp = thread.stack.data();
  thread.context.uc_stack.ss_size = thread.stack.size();
  thread.context.uc_link = nullptr;
  makecontext(&thread.context, enter, 0);
}

// One block. A barrier is passed when every thread has come to it; one that ended early while others
// wait is a fault, because a GPU's barrier would wait for it.
void run_block(int count) {
  std::vector<unsigned int> order;
  for (int i = 0; i < count; ++i) {
    if (i == static_cast<int>(threads.size())) {
      threads.emplace_back(new Thread());
    }
    ready(*threads[i]);
    order.push_back(static_cast<unsigned int>(i));
  }
  for (int left = count; left > 0;) {
    outcome = vote;
    vote = false;
    std::shuffle(order.begin(), order.end(), chance);
    for (const unsigned int index : order) {
      current = threads[index].get();
      if (current->done) {
        continue;
      }
      thread_index.x = index;
      swapcontext(&scheduler, &current->context);
      left -= current->done ? 1 : 0;
    }
    if (left != 0 && left != count) {
      ++faults;
      return;
    }
  }
}

}  // namespace emulated

#define MANUAL_FLOAT_EMULATED
#define __device__
#define __global__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ static
#define __syncthreads emulated::barrier
#define __syncthreads_or emulated::barrier_or
#define threadIdx emulated::thread_index
#define blockIdx emulated::block_index
#define gridDim emulated::grid_size
using float4 = emulated::float4_;

namespace narrowgauge {
namespace manual_float {

template <int Bytes>
void copy_async(float* target, const float* source, bool inside) {
  const emulated::Copy copy = {target, source, Bytes / 4, inside};
  if (emulated::chance() % 2 == 0) {
    emulated::arrive(copy);
  } else {
    emulated::current->open.push_back(copy);
  }
}

void commit_copies() {
  emulated::current->groups.push_back(emulated::current->open);
  emulated::current->open.clear();
}

template <int Pending>
void wait_copies() {
  auto& groups = emulated::current->groups;
  while (static_cast<int>(groups.size()) > Pending) {
    std::for_each(groups.front().begin(), groups.front().end(), emulated::arrive);
    groups.pop_front();
  }
}

}  // namespace manual_float
}  // namespace narrowgauge

#include "manual_float/cuda/manual_float.cuh"
#include "manual_float/cuda/manual_float_plan.h"

namespace {

// Makes something of zeros, so that a step of the depth too many shows.
struct OneMore {
  MAC_INLINE float operator()(float a, float b) const { return a * b + 1.0f; }
};

using namespace narrowgauge;
using namespace narrowgauge::manual_float;

// Exact products of small integers. Preparing sets the lowest bit of an operand; what is prepared twice,
// or used without, is a fault.
struct Marked : mac::Plain {
  static float prepare_activation(float value, unsigned int) { return moved(value, 0u, 1u); }
  static float prepare_weight(float value, unsigned int) { return moved(value, 0u, 1u); }
  template <typename F>
  static A<F> activation(F word) {
    return {moved(word, 1u, 0u)};
  }
  template <typename F>
  static B<F> weight(F word) {
    return {moved(word, 1u, 0u)};
  }

 private:
  static float moved(float value, unsigned int from, unsigned int to) {
    const unsigned int word = mac::Ops<float>::bits(value);
    emulated::faults += (word & 1u) != from;
    return mac::Ops<float>::floats((word & ~1u) | to);
  }
};

Convolution convolution_from(const std::int64_t* n) {
  return {n[0],  n[1],  n[2],  n[3],  n[4],  n[5],  n[6],  n[7],  n[8],  n[9],  n[10], n[11],
          n[12], n[13], n[14], n[15], n[16], n[17], n[18], n[19], n[20], n[21], n[22], n[23],
          n[24] != 0};
}

Plan plan_from(const std::int64_t* n) {
  return {static_cast<TileKind>(n[0]), static_cast<Loader>(n[1]), n[2] != 0, n[3] != 0,
          static_cast<int>(n[4]), n[5], n[6]};
}

template <typename Kernel>
void run_grid(long long blocks, int count, const Kernel& kernel) {
  emulated::grid_size.x = static_cast<unsigned int>(blocks);
  emulated::body = kernel;
  for (long long block = blocks; block-- > 0;) {  // the order of blocks is not promised either
    emulated::block_index.x = static_cast<unsigned int>(block);
    emulated::run_block(count);
  }
}

template <typename Policy, int Rows, int Filters, int Own, int Unroll>
void run_tiled(const Task& task) {
  run_grid(task.plan.blocks, Rows / 8 * (Filters / Own),
           [&task] { multiply_tiled<Policy, Rows, Filters, Own, Unroll>(task); });
  if (task.plan.splits > 1) {
    run_grid(3, 64, [&task] { add_partial<64>(task); });
  }
}

template <typename Policy, int Unroll>
void run_any_tile(const Task& task) {
  switch (task.plan.tile) {
    case TileKind::k128x128:
      return run_tiled<Policy, 128, 128, 8, Unroll>(task);
    case TileKind::k128x64:
      return run_tiled<Policy, 128, 64, 8, Unroll>(task);
    case TileKind::k128x32:
      return run_tiled<Policy, 128, 32, 4, Unroll>(task);
    case TileKind::k64x64:
      return run_tiled<Policy, 64, 64, 4, Unroll>(task);
    case TileKind::kHeavy128x64:
      return run_tiled<Policy, 128, 64, 4, Unroll>(task);
    case TileKind::kHeavy64x32:
      return run_tiled<Policy, 64, 32, 4, Unroll>(task);
    case TileKind::kDirect:
      return run_grid(3, 64, [&task] { multiply_direct<Policy, 64>(task); });
  }
}

// By the numbers of POLICIES in test_manual_float_emulation.py.
void run_policy(int policy, const Task& task) {
  switch (policy) {
    case 0:
      return run_any_tile<mac::Truncated, kStep>(task);
    case 1:
      return run_any_tile<mac::AxfpmFixed, 1>(task);
    case 2:
      return run_any_tile<mac::Custom<OneMore>, 1>(task);
    case 3:
      return run_any_tile<mac::Mitchell, 1>(task);
    case 4:
      return run_any_tile<mac::Axbf16, 1>(task);
    default:
      return run_any_tile<Marked, kStep>(task);
  }
}

}  // namespace

extern "C" {

// 7 numbers: tile, loader, channels_inside, quads_out, splits, chunks, blocks.
void manual_plan(const std::int64_t* numbers, double slots, int family, int multiprocessors,
                 int aligned, std::int64_t* plan) {
  const Plan made = plan_for(convolution_from(numbers), {slots, static_cast<Family>(family)},
                             multiprocessors, aligned != 0);
  plan[0] = static_cast<int>(made.tile);
  plan[1] = static_cast<int>(made.loader);
  plan[2] = made.channels_inside;
  plan[3] = made.quads_out;
  plan[4] = made.splits;
  plan[5] = made.chunks;
  plan[6] = made.blocks;
}

// How many faults there were. `x_count`: floats from x on that may be read.
int manual_emulate(const std::int64_t* numbers, const std::int64_t* plan, int policy, const float* x,
                   std::int64_t x_count, const float* weight, std::int64_t weight_count,
                   const float* bias, float* out, float* partial, unsigned int kept, int prepares) {
  const Task task = {convolution_from(numbers), plan_from(plan), x,    weight,       bias, out,
                     partial,                   kept,            prepares != 0};
  emulated::readable = {
      {reinterpret_cast<const char*>(x), reinterpret_cast<const char*>(x + x_count)},
      {reinterpret_cast<const char*>(weight), reinterpret_cast<const char*>(weight + weight_count)}};
  emulated::faults = 0;
  run_policy(policy, task);
  return emulated::faults;
}

}  // extern "C"
