#include "state/scalar_type.h"

#include <array>
#include <utility>

#include "fsdp/error.h"

namespace fsdp::state {
namespace {

using ckpt::Dtype;

constexpr std::array<std::pair<at::ScalarType, Dtype>, 21> kTypes = {{{at::kFloat, Dtype::float32},
                                                                      {at::kDouble, Dtype::float64},
                                                                      {at::kHalf, Dtype::float16},
                                                                      {at::kBFloat16, Dtype::bfloat16},
                                                                      {at::kLong, Dtype::int64},
                                                                      {at::kInt, Dtype::int32},
                                                                      {at::kShort, Dtype::int16},
                                                                      {at::kChar, Dtype::int8},
                                                                      {at::kByte, Dtype::uint8},
                                                                      {at::kBool, Dtype::boolean},
                                                                      {at::kFloat8_e4m3fn, Dtype::float8_e4m3fn},
                                                                      {at::kFloat8_e5m2, Dtype::float8_e5m2},
                                                                      {at::kUInt16, Dtype::uint16},
                                                                      {at::kUInt32, Dtype::uint32},
                                                                      {at::kUInt64, Dtype::uint64},
                                                                      {at::kComplexFloat, Dtype::complex64},
                                                                      {at::kComplexDouble, Dtype::complex128},
                                                                      {at::kFloat8_e4m3fnuz, Dtype::float8_e4m3fnuz},
                                                                      {at::kFloat8_e5m2fnuz, Dtype::float8_e5m2fnuz},
                                                                      {at::kFloat8_e8m0fnu, Dtype::float8_e8m0fnu},
                                                                      {at::kFloat4_e2m1fn_x2, Dtype::float4_e2m1fn_x2}}};

}  // namespace

Dtype dtype_of(at::ScalarType type, const std::string& what) {
  for (const auto& [scalar, dtype] : kTypes) {
    if (scalar == type) return dtype;
  }
  throw Error("'" + what + "' has dtype " + c10::toString(type) + ", which checkpoints do not have; convert it first");
}

at::ScalarType scalar_type_of(Dtype dtype, const std::string& what) {
  for (const auto& [scalar, found] : kTypes) {
    if (found == dtype) return scalar;
  }
  throw Error("'" + what + "' has dtype " + std::string(ckpt::names_of(dtype).name) + " in the checkpoint, which is not supported");
}

bool is_convertible(at::ScalarType type) { return at::isFloatingType(type) && type != at::kFloat4_e2m1fn_x2; }

}  // namespace fsdp::state
