#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "checkpoint/safetensors.h"
#include "fsdp/error.h"
#include "input.h"

/// Nothing outside of the file is read, tensors fill it without gaps, and they can be planned anew.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto length = static_cast<std::int64_t>(size);
  const std::string_view input = fsdp::testing::text_of(data, size);
  const fsdp::ckpt::ReadAt read = [&](std::int64_t offset, std::span<char> to) {
    const auto count = static_cast<std::int64_t>(to.size());
    fsdp::testing::require(offset >= 0 && count <= length && offset <= length - count, "only the file is read");
    if (count > 0) std::memcpy(to.data(), input.data() + offset, to.size());
  };
  fsdp::ckpt::SafetensorsHeader header;
  try {
    header = fsdp::ckpt::read_safetensors_header(read, length, "input");
  } catch (const fsdp::Error&) {
    return 0;
  }
  fsdp::testing::reader_is_done();
  for (const fsdp::ckpt::SafetensorsTensor& tensor : header.tensors) {
    fsdp::testing::require(tensor.offset >= 0 && tensor.length >= 0 && tensor.offset <= length - tensor.length, "tensors lie in the file");
  }
  std::erase_if(header.tensors, [](const fsdp::ckpt::SafetensorsTensor& tensor) { return !tensor.unreadable.empty(); });
  std::int64_t bytes = 0;
  for (const fsdp::ckpt::SafetensorsTensor& tensor : header.tensors) bytes += tensor.length;
  const fsdp::ckpt::SafetensorsPlan plan = fsdp::ckpt::plan_safetensors(header.tensors, {.metadata = header.metadata});
  std::int64_t planned = 0;
  for (const fsdp::ckpt::PlannedSafetensors& file : plan.files) planned += file.size - static_cast<std::int64_t>(file.head.size());
  fsdp::testing::require(planned == bytes, "a plan has all the data");
  return 0;
}
