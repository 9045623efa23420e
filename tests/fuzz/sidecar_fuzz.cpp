#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "checkpoint/checksum.h"
#include "checkpoint/commit.h"
#include "fsdp/error.h"
#include "input.h"

namespace {

/// Nothing outside of the sidecar is read, its files' checksums fill it to the end, and no name leads out of the folder.
void read(std::string_view input) {
  const auto length = static_cast<std::int64_t>(input.size());
  const fsdp::ckpt::ReadAt read = [&](std::int64_t offset, std::span<char> to) {
    const auto count = static_cast<std::int64_t>(to.size());
    fsdp::testing::require(offset >= 0 && count <= length && offset <= length - count, "only the file is read");
    if (count > 0) std::memcpy(to.data(), input.data() + offset, to.size());
  };
  fsdp::ckpt::Sidecar sidecar;
  try {
    sidecar = fsdp::ckpt::read_sidecar(read, length, "input");
  } catch (const fsdp::Error&) {
    return;
  }
  fsdp::testing::require(sidecar.saved >= 0, "the number of a save is not negative");
  std::int64_t end = sidecar.files.empty() ? length : sidecar.files.front().sums_begin;
  for (const fsdp::ckpt::SidecarEntry& entry : sidecar.files) {
    fsdp::testing::require(!entry.name.empty() && entry.name.find('/') == std::string::npos, "names are of files in the folder");
    fsdp::testing::require(entry.size >= 0 && entry.sums_begin == end, "checksums follow each other");
    end += 4 * fsdp::ckpt::blocks_of(entry.size);
  }
  fsdp::testing::require(end == length, "checksums end where the sidecar does");
}

}  // namespace

/// The input as it is; and as the lines of a head whose length and checksum are right, which nobody finds by chance. Then the input's last
/// byte says how many checksums follow.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view input = fsdp::testing::text_of(data, size);
  read(input);
  if (input.empty()) return 0;
  const std::string_view lines = input.substr(0, input.size() - 1);
  constexpr std::size_t kAround = 30 + 13;
  char first[31];
  std::snprintf(first, sizeof(first), "fsdp-checksums 3 %012zu\n", lines.size() + kAround);
  std::string whole = first;
  whole += lines;
  char last[14];
  std::snprintf(last, sizeof(last), "end %08x\n", fsdp::ckpt::crc32(0, whole));
  whole += last;
  whole.append(std::size_t{4} * static_cast<unsigned char>(input.back()), 'x');
  read(whole);
  return 0;
}
