#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "export/planned_messages.h"

// What ranks tell each other, as bytes. All ranks of a group have one byte order.
namespace fsdp::weights {

/// Puts numbers and texts one behind the other.
class Encoder {
 public:
  void number(std::int64_t value);
  void text(std::string_view value);
  void numbers(const std::vector<std::int64_t>& values);
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

/// Takes them out again, in their order. Its methods throw Error at the end of the bytes.
class Decoder {
 public:
  /// `bytes` must live as long as this.
  explicit Decoder(std::string_view bytes) : rest_(bytes) {}
  std::int64_t number();
  std::string text();
  std::vector<std::int64_t> numbers();

 private:
  std::string_view take(std::size_t size);
  std::string_view rest_;
};

void encode(Encoder& encoder, const RankBoxes& boxes);
RankBoxes decode_boxes(Decoder& decoder);

}  // namespace fsdp::weights
