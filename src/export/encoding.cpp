#include "export/encoding.h"

#include <cstddef>
#include <cstring>

#include "fsdp/error.h"

namespace fsdp::weights {
namespace {

void encode(Encoder& encoder, const ckpt::Box& box) {
  encoder.numbers(box.offsets);
  encoder.numbers(box.sizes);
}

ckpt::Box decode_box(Decoder& decoder) {
  auto offsets = decoder.numbers();
  return {.offsets = std::move(offsets), .sizes = decoder.numbers()};
}

at::ScalarType decode_dtype(Decoder& decoder) { return static_cast<at::ScalarType>(decoder.number()); }

}  // namespace

void Encoder::number(std::int64_t value) { bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value)); }

void Encoder::text(std::string_view value) {
  number(static_cast<std::int64_t>(value.size()));
  bytes_.append(value);
}

void Encoder::numbers(const std::vector<std::int64_t>& values) {
  number(static_cast<std::int64_t>(values.size()));
  for (const auto value : values) number(value);
}

std::string_view Decoder::take(std::size_t size) {
  if (size > rest_.size()) throw Error("transfer_plan: what another rank has said ends too early: do all ranks have the same libfsdp?");
  const auto taken = rest_.substr(0, size);
  rest_.remove_prefix(size);
  return taken;
}

std::int64_t Decoder::number() {
  std::int64_t value = 0;
  std::memcpy(&value, take(sizeof(value)).data(), sizeof(value));
  return value;
}

std::string Decoder::text() {
  const auto size = static_cast<std::size_t>(number());
  return std::string(take(size));
}

std::vector<std::int64_t> Decoder::numbers() {
  std::vector<std::int64_t> values;
  for (auto count = number(); count > 0; --count) values.push_back(number());
  return values;
}

void encode(Encoder& encoder, const RankBoxes& boxes) {
  encoder.number(static_cast<std::int64_t>(boxes.held.size()));
  for (const auto& held : boxes.held) {
    encoder.text(held.name);
    encoder.numbers(held.shape);
    encoder.number(static_cast<std::int64_t>(held.dtype));
    encode(encoder, held.box);
    encoder.number(held.as_is ? 1 : 0);
  }
  encoder.number(static_cast<std::int64_t>(boxes.wanted.size()));
  for (const auto& wanted : boxes.wanted) {
    encoder.text(wanted.name);
    encode(encoder, wanted.box);
    encoder.number(static_cast<std::int64_t>(wanted.dtype));
    encoder.number(wanted.is_converted ? 1 : 0);
  }
}

RankBoxes decode_boxes(Decoder& decoder) {
  RankBoxes boxes;
  for (auto count = decoder.number(); count > 0; --count) {
    HeldBox held;
    held.name = decoder.text();
    held.shape = decoder.numbers();
    held.dtype = decode_dtype(decoder);
    held.box = decode_box(decoder);
    held.as_is = decoder.number() != 0;
    boxes.held.push_back(std::move(held));
  }
  for (auto count = decoder.number(); count > 0; --count) {
    AskedBox wanted;
    wanted.name = decoder.text();
    wanted.box = decode_box(decoder);
    wanted.dtype = decode_dtype(decoder);
    wanted.is_converted = decoder.number() != 0;
    boxes.wanted.push_back(std::move(wanted));
  }
  return boxes;
}

}  // namespace fsdp::weights
