#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <variant>

#include "checkpoint/dcp_metadata.h"
#include "fsdp/error.h"
#include "input.h"

namespace {

bool has_unreadable_items(const fsdp::ckpt::DcpMetadata& metadata) {
  return std::any_of(metadata.items.begin(), metadata.items.end(),
                     [](const auto& item) { return std::holds_alternative<fsdp::ckpt::DcpUnreadable>(item.content); });
}

}  // namespace

/// Whatever is read is written such that the same is read again, or refused where an item could not be read.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fsdp::ckpt::DcpMetadata metadata;
  try {
    metadata = fsdp::ckpt::read_dcp_metadata(fsdp::testing::text_of(data, size), "input");
  } catch (const fsdp::Error&) {
    return 0;
  }
  fsdp::testing::reader_is_done();
  std::string text;
  try {
    text = write_dcp_metadata(metadata);
  } catch (const fsdp::Error&) {
    fsdp::testing::require(has_unreadable_items(metadata), "what could be read can be written");
    return 0;
  }
  fsdp::testing::require(!has_unreadable_items(metadata), "what could not be read is not written");
  fsdp::testing::require(fsdp::ckpt::read_dcp_metadata(text, "written") == metadata, "metadata are read as they were written");
  return 0;
}
