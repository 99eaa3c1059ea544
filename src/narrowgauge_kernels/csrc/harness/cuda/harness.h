// The launchers of harness.cu for a host compiler: raw pointers and a stream, no torch header.
#pragma once

#include <cuda_runtime_api.h>

namespace narrowgauge {
namespace harness {

// Holds streams of one device, one hold at a time. The words are page-locked and mapped, never
// managed: a managed word would migrate back and forth while both sides watch it.
class StreamGate {
 public:
  // For the current device. Its memory stays until the process ends: a kernel may still look.
  static cudaError_t make(StreamGate* gate);

  // Queues a kernel that ends at the next `release`, or after `limit_s` seconds.
  cudaError_t hold(cudaStream_t stream, double limit_s);
  void release();
  // Waits until the last hold on `stream` has ended. Call it after `release`.
  cudaError_t wait(cudaStream_t stream) const;
  // How many holds have been queued; each has this as its number.
  unsigned int holds() const { return holds_; }
  // The number of the last hold that ended because of its limit; 0: none did.
  unsigned int given_up() const;

 private:
  volatile unsigned int* released_ = nullptr;
  volatile unsigned int* ended_ = nullptr;
  volatile unsigned int* given_up_ = nullptr;
  void* on_device_ = nullptr;
  unsigned int holds_ = 0;
};

// kNothing: an empty kernel. kCopy and kAdd: the second half of the buffer becomes (or has added)
// the first, `repeats` times. kMultiplyAdd: `repeats` dependent steps on every multiprocessor.
enum class Calibration { kNothing, kCopy, kAdd, kMultiplyAdd };

struct CalibrationTask {
  Calibration kind;
  void* buffer;
  long long bytes;
  long long repeats;
  int blocks;  // set by prepare
};

// The least buffer of a kind on the current device, in bytes.
cudaError_t calibration_bytes(Calibration kind, long long* bytes);
// Chooses the grid for the current device.
cudaError_t prepare(CalibrationTask* task);
cudaError_t launch(const CalibrationTask& task, cudaStream_t stream);

}  // namespace harness
}  // namespace narrowgauge
