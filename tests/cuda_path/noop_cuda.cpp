// A CUDA backend that does nothing, for a CPU or a CUDA build of torch: a device guard, the hooks that libtorch asks for, and which
// kernel attention is given to.
//
// With it, tensors of FakeTensorMode on "cuda" reach the parts of libtorch that want a device guard (autograd's engine,
// indexing, streams) or the hooks (pinned memory). There are no kernels: only fake tensors can be "on" such a device.
// It is preloaded (LD_PRELOAD): libtorch looks for it once.
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {
using at::Tensor;
using c10::Device, c10::DeviceType, c10::Stream;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device here() { return Device(DeviceType::CUDA, 0); }
  static Stream stream() { return Stream(Stream::DEFAULT, here()); }
  Device exchangeDevice(Device) const override { return here(); }
  Device getDevice() const override { return here(); }
  Stream getStream(Device) const noexcept override { return stream(); }
  Stream getDefaultStream(Device) const override { return stream(); }
  Stream getNewStream(Device, int) const override { return stream(); }
  Stream exchangeStream(Stream) const noexcept override { return stream(); }
  void record(void**, const Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};

// Attention as a GPU takes it in the common case: flash in half precision, memory-efficient in fp32. Without an answer
// torch would write out every score.
int64_t attention(const Tensor& query, const Tensor&, const Tensor&, const std::optional<Tensor>& mask, double, bool,
                  std::optional<double>, bool gqa) {
  const bool half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  if (half && !mask) return static_cast<int64_t>(sdp::SDPBackend::flash_attention);
  return static_cast<int64_t>(gqa ? sdp::SDPBackend::math : sdp::SDPBackend::efficient_attention);
}

// Only that it is there: without a kernel of its own torch would run the operators that it is made of.
Tensor silu_backward(const Tensor&, const Tensor&) { TORCH_CHECK(false, "a device of nothing has no kernels"); }

const c10::impl::DeviceGuardImplRegistrar registrar(DeviceType::CUDA, new Guard());
}  // namespace

// A CUDA build of torch registers its own guard when it is loaded, after this library: call this after `import torch`.
extern "C" void replace_cuda_guard() { c10::impl::DeviceGuardImplRegistrar(DeviceType::CUDA, new Guard()); }

namespace {
TORCH_LIBRARY_IMPL(aten, CUDA, library) { library.impl("silu_backward", silu_backward); }
}  // namespace

namespace at {
// Preferred: a CUDA build of torch registers hooks of its own.
C10_REGISTER_TYPED_CREATOR_WITH_PRIORITY(
    CUDAHooksRegistry, "CUDAHooks", c10::REGISTRY_PREFERRED, RegistererCUDAHooksRegistry::DefaultCreator<Hooks>);

namespace native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &attention)
}
}  // namespace at
