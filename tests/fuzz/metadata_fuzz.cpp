#include <cstddef>
#include <cstdint>

#include "checkpoint/dcp_metadata.h"
#include "fsdp/error.h"
#include "input.h"

/// Whatever is read is written such that the same is read again.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fsdp::ckpt::DcpMetadata metadata;
  try {
    metadata = fsdp::ckpt::read_dcp_metadata(fsdp::testing::text_of(data, size), "input");
  } catch (const fsdp::Error&) {
    return 0;
  }
  fsdp::testing::reader_is_done();
  const std::string text = write_dcp_metadata(metadata);
  fsdp::testing::require(fsdp::ckpt::read_dcp_metadata(text, "written") == metadata, "metadata are read as they were written");
  return 0;
}
