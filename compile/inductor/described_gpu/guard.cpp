// A device guard for CUDA without CUDA: one device, which is always the current one. Enough for tensors without memory.
#include <c10/core/impl/DeviceGuardImplInterface.h>

struct OneDevice final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, OneDevice)
}
