#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/host_device.h"

// Elements of tensors, for loops on the CPU and kernels alike.
namespace fsdp {

/// Calls fn with a value of the C++ type of a real dtype: float, double, bfloat16 or half. False if it is another one.
template <typename Fn>
bool with_real_type(c10::ScalarType dtype, const Fn& fn) {
  switch (dtype) {
    case c10::ScalarType::Float:
      fn(float{});
      return true;
    case c10::ScalarType::Double:
      fn(double{});
      return true;
    case c10::ScalarType::BFloat16:
      fn(c10::BFloat16{});
      return true;
    case c10::ScalarType::Half:
      fn(c10::Half{});
      return true;
    default:
      return false;
  }
}

FSDP_ELEMENT std::uint32_t bits_of(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
FSDP_ELEMENT float float_of(std::uint32_t bits) {
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

/// Rounded to T. Unlike c10's conversion, without a branch, so that loops vectorize.
template <typename T, typename Wide>
FSDP_ELEMENT T rounded_to(Wide value) {
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    const auto narrow = static_cast<float>(value);
    const std::uint32_t bits = bits_of(narrow);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return c10::BFloat16(static_cast<std::uint16_t>(narrow == narrow ? rounded : 0x7fc0u), c10::BFloat16::from_bits());
  } else {
    return static_cast<T>(value);
  }
}

/// Neighbouring elements that a thread reads or writes at once.
inline constexpr int kPack = 4;
template <typename T, int kCount = kPack>
struct alignas(kCount * sizeof(T)) Pack {
  T values[kCount];
};

template <typename T>
FSDP_HOST_DEVICE inline bool is_aligned(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address) % alignof(Pack<T>) == 0;
}

template <typename T>
FSDP_HOST_DEVICE inline Pack<T> read_pack(const T* from) {
  if (is_aligned<T>(from)) return *reinterpret_cast<const Pack<T>*>(from);
  Pack<T> read{};
  for (int i = 0; i < kPack; ++i) read.values[i] = from[i];
  return read;
}
template <typename T>
FSDP_HOST_DEVICE inline void write_pack(T* to, const Pack<T>& pack) {
  if (is_aligned<T>(to)) {
    *reinterpret_cast<Pack<T>*>(to) = pack;
  } else {
    for (int i = 0; i < kPack; ++i) to[i] = pack.values[i];
  }
}

}  // namespace fsdp
