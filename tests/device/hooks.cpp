#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/util/Backtrace.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>
#include <string>
#include <utility>

#include "generator.h"
#include "host_clock.h"
#include "memory.h"
#include "pinned.h"
#include "streams.h"

namespace sim {

Generator::Generator(c10::DeviceIndex device, at::Generator on_cpu)
    : GeneratorImpl(c10::Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), on_cpu_(std::move(on_cpu)) {}

Generator* Generator::clone_impl() const { return new Generator(device().index(), on_cpu_.clone()); }

at::Generator& default_generator(int device) {
  static auto* const generators = new std::array<at::Generator, kDevices>;
  const Lock lock;
  at::Generator& generator = generators->at(static_cast<std::size_t>(device));
  if (!generator.defined()) {
    generator = at::make_generator<Generator>(static_cast<c10::DeviceIndex>(device), at::make_generator<at::CPUGeneratorImpl>());
  }
  return generator;
}

namespace {

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return static_cast<c10::DeviceIndex>(exchange_device(device)); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  bool isPinnedPtr(const void* data) const override {
    const Lock lock;
    return pinned_memory().contains(data);
  }
  at::Device getDeviceFromPtr(void* data) const override { return device(device_of(data)); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? getCurrentDevice() : device, at::make_generator<at::CPUGeneratorImpl>());
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    c10::StorageImpl& impl = *storage.unsafeGetStorageImpl();
    auto memory = allocator().allocate_on(storage.device().index(), bytes);
    const auto kept = std::min(bytes, impl.nbytes());
    if (kept > 0) allocator().copy_data(memory.get(), impl.data(), kept);
    impl.set_data_ptr_noswap(std::move(memory));
    impl.set_nbytes(bytes);
  }
};

struct sigaction before;  // who handled faults

void say(const std::string& text) { [[maybe_unused]] const auto written = write(STDERR_FILENO, text.data(), text.size()); }

/// Says what a fault at a device's address is, and from where, before it ends the program.
void on_fault(int signal, siginfo_t* info, void* context) {
  if (device_of(info->si_addr) >= 0) say("sim: the host touched memory of the device\n" + c10::get_backtrace(1));
  sigaction(SIGSEGV, &before, nullptr);  // The instruction runs again, and faults again.
}

[[maybe_unused]] const bool registered = [] {
  c10::register_privateuse1_backend("sim");
  c10::SetAllocator(kType, &allocator());
  at::setHostAllocator(kType, &pinned_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  struct sigaction action = {};
  action.sa_sigaction = &on_fault;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, &before);
  return true;
}();

}  // namespace
}  // namespace sim
