#include "memory/pinned_memory.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>

#include <exception>
#include <memory>
#include <string>
#include <string_view>

#include "base/exception_text.h"

namespace fsdp::memory {
namespace {

constexpr unsigned kPortable = 1;  // cudaHostRegisterPortable: pinned for all GPUs of the process.

/// Functions of the CUDA runtime that this process has loaded. They are looked up and not linked, so that a build without CUDA also works
/// with a CUDA build of torch.
struct Runtime {
  int (*pin)(void*, std::size_t, unsigned) = nullptr;
  int (*unpin)(void*) = nullptr;
  int (*last_error)() = nullptr;

  bool complete() const { return pin != nullptr && unpin != nullptr && last_error != nullptr; }
};

int find_runtime(dl_phdr_info* library, std::size_t, void* found) {
  const std::string_view path = library->dlpi_name;
  if (path.substr(path.rfind('/') + 1).starts_with("libcudart.so")) *static_cast<std::string*>(found) = path;
  return 0;
}

template <typename Function>
void look_up(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
}

const Runtime& runtime() {
  static const Runtime loaded = [] {
    Runtime found;
    std::string path;
    dl_iterate_phdr(&find_runtime, &path);
    if (path.empty()) return found;
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) return found;
    look_up(library, "cudaHostRegister", found.pin);
    look_up(library, "cudaHostUnregister", found.unpin);
    look_up(library, "cudaGetLastError", found.last_error);
    return found;
  }();
  return loaded;
}

struct Pinned {
  void* data;
  std::size_t bytes;
  c10::Device device;
};

void release(void* context) {
  const std::unique_ptr<Pinned> pinned(static_cast<Pinned*>(context));
  try {
    c10::impl::VirtualGuardImpl(pinned->device.type()).synchronizeDevice(pinned->device.index());
  } catch (const std::exception&) {  // The device has failed, or the process ends, so nothing copies any more.
    TORCH_WARN_ONCE("libfsdp could not wait for ", pinned->device,
                    " before it freed memory that this copies from: ", current_exception_text());
  }
  runtime().unpin(pinned->data);
  munmap(pinned->data, pinned->bytes);
}

}  // namespace

c10::DataPtr allocate_pinned(c10::Device device, std::int64_t bytes) {
  if (!device.is_cuda() || !runtime().complete()) return {};
  const auto length = static_cast<std::size_t>(bytes);
  void* data = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return {};
  madvise(data, length, MADV_HUGEPAGE);  // The call may fail: the memory also works without huge pages.
  if (runtime().pin(data, length, kPortable) != 0) {
    runtime().last_error();  // Clears the error, which torch's next check would report otherwise.
    munmap(data, length);
    return {};
  }
  return {data, new Pinned{data, length, device}, &release, at::kCPU};
}

}  // namespace fsdp::memory
