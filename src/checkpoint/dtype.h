#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace fsdp::ckpt {

enum class Dtype : std::uint8_t {
  float32,
  float64,
  float16,
  bfloat16,
  int64,
  int32,
  int16,
  int8,
  uint8,
  boolean,
  float8_e4m3fn,
  float8_e5m2,
  uint16,
  uint32,
  uint64,
  complex64,
  complex128,
  float8_e4m3fnuz,
  float8_e5m2fnuz,
  float8_e8m0fnu,
  float4_e2m1fn_x2,  ///< An element is a byte with two numbers.
};

/// What the formats call a dtype.
struct DtypeNames {
  Dtype dtype;
  std::int64_t itemsize;  ///< Bytes of an element.
  std::string_view name;  ///< torch's name, such as "float32".
  std::string_view
      storage;  ///< The name of torch's class of typed storage; empty for the newer dtypes, which torch.save writes without such a class.
  std::string_view safetensors;  ///< The name in safetensors files; empty if that format has no such dtype.
};

std::span<const DtypeNames> dtypes();
const DtypeNames& names_of(Dtype dtype);
inline std::int64_t itemsize(Dtype dtype) { return names_of(dtype).itemsize; }

std::optional<Dtype> dtype_of_name(std::string_view name);
std::optional<Dtype> dtype_of_storage(std::string_view storage);
std::optional<Dtype> dtype_of_safetensors(std::string_view name);

}  // namespace fsdp::ckpt
