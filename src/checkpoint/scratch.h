#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <span>

namespace fsdp::ckpt {

/// Memory into which data are read to be checked. It begins at a page, as the blocks of a file in the page cache do. On some processors,
/// copies to an address at another offset within its page, such as malloc returns, are slower.
class Scratch {
 public:
  explicit Scratch(std::size_t size) : bytes_(static_cast<char*>(::operator new(size, kPage))), size_(size) {}
  std::span<char> bytes() { return {bytes_.get(), size_}; }

 private:
  static constexpr std::align_val_t kPage{4096};
  struct Free {
    void operator()(char* bytes) const { ::operator delete(bytes, kPage); }
  };

  std::unique_ptr<char, Free> bytes_;
  std::size_t size_;
};

}  // namespace fsdp::ckpt
