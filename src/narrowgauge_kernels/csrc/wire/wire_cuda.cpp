// The wire operators on CUDA: from tensors to the launchers. Tensors of the CPU may stand beside those
// of a device where they are page-locked: torch's dispatcher sends such a call here, CUDA before CPU.
// c10/cuda headers only, because ATen/cuda needs the headers of cuBLAS, cuSPARSE and cuSOLVER, which
// images leave out.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <initializer_list>
#include <string>

#include "wire/cuda/wire.h"
#include "common/element_of.h"
#include "pinned_memory/pinned_memory.h"
#include "common/torch_tensor.h"
#include "wire/wire_problem.h"

namespace narrowgauge {
namespace wire {
namespace {

// One operation on one device, its current stream, and the memory of the host that it works on.
class Call {
 public:
  // The device is that of the first tensor that is on one.
  Call(const char* operation, std::initializer_list<at::Tensor> tensors)
      : operation_(operation), device_(device_of(tensors)), guard_(device_),
        stream_(c10::cuda::getCurrentCUDAStream().stream()) {}

  cudaStream_t stream() const { return stream_; }
  at::Device device() const { return device_; }

  // Where the device finds the tensor's memory.
  void* pointer(const char* name, const at::Tensor& tensor) const {
    if (tensor.is_cuda()) {
      TORCH_CHECK(tensor.device() == device_, operation_, ": ", name, " is on ", tensor.device(),
                  " and the rest on ", device_);
      return tensor.data_ptr();
    }
    TORCH_CHECK(tensor.device().is_cpu(), operation_, ": ", name, " is on ", tensor.device());
    if (tensor.numel() == 0) {
      return nullptr;
    }
    const pinned::OutsideOfCapture relaxed;
    cudaPointerAttributes attributes{};
    const cudaError_t error = cudaPointerGetAttributes(&attributes, tensor.data_ptr());
    if (error != cudaSuccess) {
      cudaGetLastError();  // CUDA 10 calls ordinary memory an error
    }
    TORCH_CHECK(error == cudaSuccess && attributes.type != cudaMemoryTypeUnregistered &&
                    attributes.devicePointer != nullptr,
                operation_, ": ", name, " is on cpu and not page-locked, so that ", device_,
                " cannot reach it; take pin_memory(), or narrowgauge_kernels.pinned");
    return attributes.devicePointer;
  }

  // Whether what is queued was accepted; and memory of the pinned pool is kept until it is done.
  void finish(cudaError_t error, std::initializer_list<at::Tensor> tensors) const {
    TORCH_CHECK(error == cudaSuccess, operation_, ": the CUDA kernel was not launched: ",
                cudaGetErrorString(error));
    for (const at::Tensor& tensor : tensors) {
      pinned::keep_until_done(tensor, stream_);
    }
  }

 private:
  static at::Device device_of(std::initializer_list<at::Tensor> tensors) {
    for (const at::Tensor& tensor : tensors) {
      if (tensor.is_cuda()) {
        return tensor.device();
      }
    }
    TORCH_CHECK(false, "no tensor is on a CUDA device");
  }

  const char* operation_;
  const at::Device device_;
  const c10::cuda::CUDAGuard guard_;
  const cudaStream_t stream_;
};

Extent extent_of(const at::Tensor& ordered) {
  const Order order = order_of(ordered);
  return {order.samples, order.channels, order.spatial, order.rows};
}

void check_isa(const std::string& isa) {
  TORCH_CHECK(isa == "auto", "isa='", isa, "' names an instruction set of the CPU; a CUDA tensor "
              "takes 'auto' only");
}

// Gathering makes ordinary memory on the CPU, which no device reaches.
at::Tensor gathered(const char* operation, const char* name, const at::Tensor& given,
                    const at::Tensor& like) {
  const at::Tensor x = ordered_as(given, like);
  TORCH_CHECK(x.is_cuda() || x.is_same(given) || x.data_ptr() == given.data_ptr(), operation, ": ",
              name, " has strides ", given.strides(), " and is mapped; it must be in the order of ",
              "what is written, which has strides ", like.strides());
  return x;
}

void pack_int8_cuda(const at::Tensor& given, c10::optional<std::int64_t> seed, std::int64_t first,
                    const at::Tensor& values, const at::Tensor& scale, std::string isa) {
  check_pack(given, first, values, scale);
  check_isa(isa);
  const Call call("pack_int8", {given, values, scale});
  if (given.numel() == 0) {
    at::Tensor(scale).fill_(1);
    return;
  }
  const at::Tensor x = gathered("pack_int8", "x", given, values);
  PackTask task{};
  task.extent = extent_of(values);
  const at::Tensor largest = at::empty({workspace_of(task.extent)},
                                       at::TensorOptions().dtype(at::kInt).device(call.device()));
  task.x = call.pointer("x", x);
  task.values = static_cast<signed char*>(call.pointer("values", values));
  task.scale = static_cast<float*>(call.pointer("scale", scale));
  task.largest = largest.data_ptr<int>();
  task.drawing = seed.has_value();
  task.seed = static_cast<unsigned long long>(seed.value_or(0));
  task.first = static_cast<unsigned long long>(first);
  const cudaError_t error = launch_pack(element_of(x.scalar_type()), task, call.stream());
  call.finish(error, {x, values, scale});
}

void unpack_int8_cuda(const at::Tensor& given, const at::Tensor& scale, const at::Tensor& out,
                      std::string isa) {
  check_unpack(given, scale, out);
  check_isa(isa);
  const Call call("unpack_int8", {given, scale, out});
  if (given.numel() == 0) {
    return;
  }
  const at::Tensor values = gathered("unpack_int8", "values", given, out);
  TORCH_CHECK(scale.is_contiguous(), "unpack_int8: scale has strides ", scale.strides(),
              "; it must be contiguous");
  const UnpackTask task{static_cast<const signed char*>(call.pointer("values", values)),
                        static_cast<const float*>(call.pointer("scale", scale)),
                        call.pointer("out", out), extent_of(out), !values.is_cuda()};
  const cudaError_t error = launch_unpack(element_of(out.scalar_type()), task, call.stream());
  call.finish(error, {values, scale, out});
}

void mapped_copy_cuda(const at::Tensor& x, const at::Tensor& out) {
  check_copy(x, out);
  const Call call("mapped_copy", {x, out});
  const void* from = call.pointer("x", x);
  void* to = call.pointer("out", out);
  const cudaError_t error =
      launch_copy(from, to, static_cast<long long>(x.nbytes()), call.stream());
  call.finish(error, {x, out});
}

}  // namespace

TORCH_LIBRARY_IMPL(narrowgauge, CUDA, m) {
  m.impl("wire_pack_int8", pack_int8_cuda);
  m.impl("wire_unpack_int8", unpack_int8_cuda);
  m.impl("mapped_copy", mapped_copy_cuda);
}

}  // namespace wire
}  // namespace narrowgauge
