#include "checkpoint/dtype.h"

#include <array>
#include <cstddef>

namespace fsdp::ckpt {
namespace {

// In the enum's order.
constexpr std::array kDtypes = {
    DtypeNames{Dtype::float32, 4, "float32", "FloatStorage", "F32"},
    DtypeNames{Dtype::float64, 8, "float64", "DoubleStorage", "F64"},
    DtypeNames{Dtype::float16, 2, "float16", "HalfStorage", "F16"},
    DtypeNames{Dtype::bfloat16, 2, "bfloat16", "BFloat16Storage", "BF16"},
    DtypeNames{Dtype::int64, 8, "int64", "LongStorage", "I64"},
    DtypeNames{Dtype::int32, 4, "int32", "IntStorage", "I32"},
    DtypeNames{Dtype::int16, 2, "int16", "ShortStorage", "I16"},
    DtypeNames{Dtype::int8, 1, "int8", "CharStorage", "I8"},
    DtypeNames{Dtype::uint8, 1, "uint8", "ByteStorage", "U8"},
    DtypeNames{Dtype::boolean, 1, "bool", "BoolStorage", "BOOL"},
    DtypeNames{Dtype::float8_e4m3fn, 1, "float8_e4m3fn", "", "F8_E4M3"},
    DtypeNames{Dtype::float8_e5m2, 1, "float8_e5m2", "", "F8_E5M2"},
    DtypeNames{Dtype::uint16, 2, "uint16", "", "U16"},
    DtypeNames{Dtype::uint32, 4, "uint32", "", "U32"},
    DtypeNames{Dtype::uint64, 8, "uint64", "", "U64"},
    DtypeNames{Dtype::complex64, 8, "complex64", "ComplexFloatStorage", "C64"},
    DtypeNames{Dtype::complex128, 16, "complex128", "ComplexDoubleStorage", ""},
    DtypeNames{Dtype::float8_e4m3fnuz, 1, "float8_e4m3fnuz", "", "F8_E4M3FNUZ"},
    DtypeNames{Dtype::float8_e5m2fnuz, 1, "float8_e5m2fnuz", "", "F8_E5M2FNUZ"},
    DtypeNames{Dtype::float8_e8m0fnu, 1, "float8_e8m0fnu", "", "F8_E8M0"},
    DtypeNames{Dtype::float4_e2m1fn_x2, 1, "float4_e2m1fn_x2", "", "F4"},
};

std::optional<Dtype> find(std::string_view DtypeNames::*member, std::string_view name) {
  if (name.empty()) return std::nullopt;
  for (const DtypeNames& names : kDtypes) {
    if (names.*member == name) return names.dtype;
  }
  return std::nullopt;
}

}  // namespace

std::span<const DtypeNames> dtypes() { return kDtypes; }
const DtypeNames& names_of(Dtype dtype) { return kDtypes[static_cast<std::size_t>(dtype)]; }

std::optional<Dtype> dtype_of_name(std::string_view name) { return find(&DtypeNames::name, name); }
std::optional<Dtype> dtype_of_storage(std::string_view storage) { return find(&DtypeNames::storage, storage); }
std::optional<Dtype> dtype_of_safetensors(std::string_view name) { return find(&DtypeNames::safetensors, name); }

}  // namespace fsdp::ckpt
