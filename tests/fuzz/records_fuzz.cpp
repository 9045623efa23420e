#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

#include "checkpoint/records.h"
#include "fsdp/error.h"
#include "input.h"

/// Nothing outside of the record is read, and a tensor's data lie in it.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  // Somewhere in a file.
  constexpr std::int64_t kBegin = 1000;
  const auto length = static_cast<std::int64_t>(size);
  const std::string_view input = fsdp::testing::text_of(data, size);
  const fsdp::ckpt::ReadAt read = [&](std::int64_t offset, std::span<char> to) {
    const auto count = static_cast<std::int64_t>(to.size());
    fsdp::testing::require(offset >= kBegin && count <= length && offset - kBegin <= length - count, "only the record is read");
    if (count > 0) std::memcpy(to.data(), input.data() + (offset - kBegin), to.size());
  };
  const fsdp::ckpt::RecordLocation record{"input", kBegin, length};
  try {
    const fsdp::ckpt::TensorData found = locate_tensor(read, record, "w");
    fsdp::testing::require(
        found.offset >= kBegin && found.length >= 0 && found.length <= length && found.offset - kBegin <= length - found.length,
        "a tensor lies in its record");
  } catch (const fsdp::Error&) {
  }
  try {
    fsdp::ckpt::read_object(read, record, "o");
  } catch (const fsdp::Error&) {
  }
  return 0;
}
