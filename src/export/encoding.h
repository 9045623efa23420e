#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "export/planned_messages.h"
#include "fsdp/error.h"

// Encodes messages between ranks as bytes: numbers, texts, vectors, and structs by their fields. All ranks of a group have one byte order.
namespace fsdp::weights {

/// The fields of a struct, in the order in which they lie in the bytes.
inline auto fields_of(ckpt::Box& box) { return std::tie(box.offsets, box.sizes); }
inline auto fields_of(HeldBox& held) { return std::tie(held.name, held.shape, held.dtype, held.box, held.as_is); }
inline auto fields_of(AskedBox& wanted) { return std::tie(wanted.name, wanted.box, wanted.dtype, wanted.is_converted); }
inline auto fields_of(RankBoxes& boxes) { return std::tie(boxes.held, boxes.wanted); }
template <typename First, typename Second>
auto fields_of(std::pair<First, Second>& pair) {
  return std::tie(pair.first, pair.second);
}

template <typename Value>
concept Number = std::integral<Value> || std::is_enum_v<Value>;

/// Appends a value.
template <typename Value>
void encode(std::string& bytes, Value& value) {
  if constexpr (Number<Value>) {
    const auto number = static_cast<std::int64_t>(value);
    bytes.append(reinterpret_cast<const char*>(&number), sizeof(number));
  } else if constexpr (requires { value.size(); }) {
    auto size = value.size();
    encode(bytes, size);
    if constexpr (std::same_as<Value, std::string>) {
      bytes.append(value);
    } else {
      for (auto& one : value) encode(bytes, one);
    }
  } else {
    std::apply([&](auto&... fields) { (encode(bytes, fields), ...); }, fields_of(value));
  }
}

inline std::string_view take_bytes(std::string_view& rest, std::size_t size) {
  if (size > rest.size()) throw Error("transfer_plan: what another rank has said ends too early: do all ranks have the same libfsdp?");
  const auto taken = rest.substr(0, size);
  rest.remove_prefix(size);
  return taken;
}

/// Reads a value from the bytes. Throws Error at their end.
template <typename Value>
void decode(std::string_view& rest, Value& value) {
  if constexpr (Number<Value>) {
    std::int64_t number = 0;
    std::memcpy(&number, take_bytes(rest, sizeof(number)).data(), sizeof(number));
    value = static_cast<Value>(number);
  } else if constexpr (requires { value.size(); }) {
    std::size_t size = 0;
    decode(rest, size);
    if constexpr (std::same_as<Value, std::string>) {
      value = take_bytes(rest, size);
    } else {
      for (; size > 0; --size) decode(rest, value.emplace_back());
    }
  } else {
    std::apply([&](auto&... fields) { (decode(rest, fields), ...); }, fields_of(value));
  }
}

}  // namespace fsdp::weights
