#include <cstddef>
#include <map>

// Stands in for CUDA's runtime, as far as memory/pinned_memory.cpp calls it.
// NOLINTBEGIN(readability-identifier-naming): CUDA's names
extern "C" {

std::map<void*, std::size_t> fake_pinned;
bool fake_refuses = false;
int fake_errors_read = 0;

int cudaHostRegister(void* data, std::size_t bytes, unsigned /*flags*/) {
  if (fake_refuses) return 2;
  fake_pinned[data] = bytes;
  return 0;
}

int cudaHostUnregister(void* data) { return fake_pinned.erase(data) == 1 ? 0 : 1; }

int cudaGetLastError() { return ++fake_errors_read; }
}
// NOLINTEND(readability-identifier-naming)
