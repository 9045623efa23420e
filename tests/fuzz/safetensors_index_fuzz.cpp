#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>

#include "checkpoint/safetensors.h"
#include "fsdp/error.h"
#include "input.h"

/// An index leads to files of its own folder only, and gives each name to one of them.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::map<std::string, std::set<std::string>> files;
  try {
    files = fsdp::ckpt::read_safetensors_index(fsdp::testing::text_of(data, size), "input");
  } catch (const fsdp::Error&) {
    return 0;
  }
  fsdp::testing::reader_is_done();
  std::set<std::string> seen;
  for (const auto& [file, names] : files) {
    fsdp::testing::require(file.find_first_of(std::string("/\\\0", 3)) == std::string::npos, "no path");
    fsdp::testing::require(!file.empty() && file != "." && file != "..", "the name of a file");
    fsdp::testing::require(!names.empty(), "each file has a tensor");
    for (const auto& name : names) fsdp::testing::require(seen.insert(name).second, "each tensor is in one file");
  }
  return 0;
}
