// Runs a fuzz target on the files of folders, once as they are and once cut off at each of some places, and watches what it allocates.
// Without libFuzzer, for any compiler.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <new>
#include <string>

#include "input.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

std::atomic<std::size_t> live = 0;
std::atomic<std::size_t> peak = 0;
std::atomic<bool> is_watching = false;

// Where a block's size is kept: before it, without disturbing its alignment.
constexpr std::size_t kPrefix = alignof(std::max_align_t);

void* allocate(std::size_t size) {
  auto* block = static_cast<std::byte*>(std::malloc(size + kPrefix));
  if (block == nullptr) throw std::bad_alloc();
  *reinterpret_cast<std::size_t*>(block) = size;
  const std::size_t now = live += size;
  if (!is_watching) return block + kPrefix;
  std::size_t before = peak;
  while (before < now && !peak.compare_exchange_weak(before, now)) {
  }
  return block + kPrefix;
}

void release(void* pointer) {
  if (pointer == nullptr) return;
  auto* block = static_cast<std::byte*>(pointer) - kPrefix;
  live -= *reinterpret_cast<std::size_t*>(block);
  std::free(block);
}

/// The readers promise memory in proportion to the input: at most so many bytes per byte, and a little for small ones.
constexpr std::size_t kMostPerByte = 256;
constexpr std::size_t kMostAnyway = 64 << 10;

void run(const std::string& name, const std::string& input) {
  const std::size_t before = live;
  peak = before;
  is_watching = true;
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(input.data()), input.size());
  is_watching = false;
  const std::size_t used = peak - before;
  if (used > kMostPerByte * input.size() + kMostAnyway) {
    std::fprintf(stderr, "%s: %zu bytes of input took %zu bytes of memory\n", name.c_str(), input.size(), used);
    std::abort();
  }
}

}  // namespace

namespace fsdp::testing {
void stop_watching_memory() { is_watching = false; }
}  // namespace fsdp::testing

void* operator new(std::size_t size) { return allocate(size); }
void* operator new[](std::size_t size) { return allocate(size); }
void operator delete(void* pointer) noexcept { release(pointer); }
void operator delete[](void* pointer) noexcept { release(pointer); }
void operator delete(void* pointer, std::size_t) noexcept { release(pointer); }
void operator delete[](void* pointer, std::size_t) noexcept { release(pointer); }

int main(int argc, char** argv) {
  int count = 0;
  for (int i = 1; i < argc; ++i) {
    for (const auto& entry : std::filesystem::directory_iterator(argv[i])) {
      std::ifstream file(entry.path(), std::ios::binary);
      const std::string input{std::istreambuf_iterator<char>(file), {}};
      run(entry.path().string(), input);
      const std::size_t stride = std::max<std::size_t>(input.size() / 64, 1);
      for (std::size_t length = 0; length < input.size(); length += stride) run(entry.path().string(), input.substr(0, length));
      ++count;
    }
  }
  std::printf("%d inputs\n", count);
  return count > 0 ? 0 : 1;
}
