#include <cstddef>
#include <cstdint>
#include <string>

#include "checkpoint/pickle.h"
#include "checkpoint/python_value.h"
#include "fsdp/error.h"
#include "input.h"

namespace {

std::string written(const fsdp::ckpt::PythonValue& value) {
  fsdp::ckpt::PickleWriter writer;
  write(writer, value);
  return writer.finish();
}

fsdp::ckpt::PythonValue read(std::string_view text) {
  const fsdp::ckpt::Pickle pickle(text, "input", fsdp::ckpt::kPlainGlobals);
  return python_value(pickle.root(), text.size());
}

}  // namespace

/// Whatever is read is written such that it is read again.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fsdp::ckpt::PythonValue value;
  try {
    value = read(fsdp::testing::text_of(data, size));
  } catch (const fsdp::Error&) {
    return 0;
  }
  fsdp::testing::reader_is_done();
  const std::string text = written(value);
  // By their pickles: a NaN is not equal to itself.
  fsdp::testing::require(written(read(text)) == text, "a value is read as it was written");
  return 0;
}
