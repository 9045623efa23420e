#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>

namespace sim {

/// Random numbers of a device: those of a generator of the CPU, which its kernels get.
class Generator final : public c10::GeneratorImpl {
 public:
  Generator(c10::DeviceIndex device, at::Generator on_cpu);

  const at::Generator& on_cpu() const { return on_cpu_; }
  void set_current_seed(std::uint64_t seed) override { on_cpu_.set_current_seed(seed); }
  void set_offset(std::uint64_t) override {}
  std::uint64_t get_offset() const override { return 0; }
  std::uint64_t current_seed() const override { return on_cpu_.current_seed(); }
  std::uint64_t seed() override { return on_cpu_.seed(); }
  void set_state(const c10::TensorImpl& state) override { on_cpu_.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return on_cpu_.unsafeGetGeneratorImpl()->get_state(); }

 private:
  Generator* clone_impl() const override;

  at::Generator on_cpu_;
};

at::Generator& default_generator(int device);

}  // namespace sim
