#include "state/diff.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <set>

#include "base/classic_stream.h"
#include "base/text.h"
#include "fsdp/error.h"
#include "state/source.h"

namespace fsdp::state {
namespace {

/// The number of elements that are compared at once.
constexpr std::int64_t kComparedAtOnce = std::int64_t{1} << 20;

std::string text_of(const Source::Tensor& tensor) {
  return std::string(ckpt::names_of(tensor.dtype).name) + " " + in_brackets(tensor.shape);
}

/// Returns the values, or, if a byte holds two numbers, one element for each number.
at::Tensor unpacked(const at::Tensor& values) {
  if (values.scalar_type() != at::kFloat4_e2m1fn_x2) return values;
  const auto numbers = at::tensor({0., .5, 1., 1.5, 2., 3., 4., 6., -0., -.5, -1., -1.5, -2., -3., -4., -6.}, at::kFloat);
  const auto bytes = values.view(at::kByte);
  return at::stack({numbers.index({(bytes % 16).to(at::kLong)}), numbers.index({bytes.div(16, "floor").to(at::kLong)})}, -1).flatten();
}

/// Converts values to a dtype in which they can be subtracted.
at::Tensor as_numbers(const at::Tensor& values) { return values.to(values.is_complex() ? at::kComplexDouble : at::kDouble); }

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

/// How the values of two tensors of one shape differ; empty if their bytes are equal.
std::string difference_of_values(Source& a, Source& b, const std::string& name, const ckpt::Shape& shape) {
  const auto whole = ckpt::whole(shape);
  const auto numel = ckpt::numel(shape);
  std::int64_t compared = 0;
  std::int64_t differ = 0;
  std::int64_t not_finite = 0;
  double largest = 0;
  bool same_type = true;
  for (std::int64_t begin = 0; begin < numel; begin += kComparedAtOnce) {
    const auto count = std::min(kComparedAtOnce, numel - begin);
    const auto of_a = unpacked(a.read(name, whole, begin, count));
    const auto of_b = unpacked(b.read(name, whole, begin, count));
    compared += of_a.numel();
    same_type = of_a.scalar_type() == of_b.scalar_type();
    if (same_bytes(of_a, of_b)) continue;
    // If the dtypes are equal, bits are compared: zeros of different signs differ, and a NaN equals itself.
    const auto width = of_a.element_size();
    const auto bytes = [&](const at::Tensor& values) { return values.view(at::kByte).view({-1, width}); };
    const auto differs = same_type ? bytes(of_a).ne(bytes(of_b)).any(1) : as_numbers(of_a).ne(as_numbers(of_b));
    const auto distance = (as_numbers(of_a.masked_select(differs)) - as_numbers(of_b.masked_select(differs))).abs();
    const auto finite = distance.masked_select(distance.isfinite());
    differ += distance.numel();
    not_finite += distance.numel() - finite.numel();
    if (finite.numel() > 0) largest = std::max(largest, finite.max().item<double>());
  }
  if (differ == 0) return "";
  ClassicStream<std::ostringstream> text;
  text << differ << " of " << compared << " elements differ, by " << largest << " at most";
  return text.str() + (not_finite == 0 ? std::string() : ", but for " + std::to_string(not_finite) + " that are not finite");
}

std::string difference_of(Source& a, Source& b, const std::string& name) {
  for (const auto* source : {&a, &b}) {
    if (const auto why = source->unreadable(name); !why.empty()) return "cannot be read in " + source->path() + ": " + why;
  }
  const auto of_a = a.find(name);
  const auto of_b = b.find(name);
  if (of_a.has_value() != of_b.has_value()) return "a tensor in " + (of_a ? a : b).path() + ", another value in " + (of_a ? b : a).path();
  if (!of_a) {
    const auto value_a = a.read_object(name);
    const auto value_b = b.read_object(name);
    return value_a == value_b ? "" : ckpt::repr(value_a) + " | " + ckpt::repr(value_b);
  }
  const bool is_packed = of_a->dtype == ckpt::Dtype::float4_e2m1fn_x2 || of_b->dtype == ckpt::Dtype::float4_e2m1fn_x2;
  if (of_a->shape != of_b->shape || (is_packed && of_a->dtype != of_b->dtype)) return text_of(*of_a) + " | " + text_of(*of_b);
  const auto values = difference_of_values(a, b, name, of_a->shape);
  if (of_a->dtype == of_b->dtype) return values;
  return text_of(*of_a) + " | " + text_of(*of_b) + ", " + (values.empty() ? "equal values" : values);
}

}  // namespace

Difference diff(const std::string& a, const std::string& b, const DiffOptions& options) {
  const at::NoGradGuard no_grad;
  const auto source_a = open_source(a);
  const auto source_b = open_source(b);
  std::set<std::string> names(source_a->names().begin(), source_a->names().end());
  names.insert(source_b->names().begin(), source_b->names().end());
  Difference result;
  for (const auto& name : names) {
    if (std::any_of(options.ignored.begin(), options.ignored.end(), [&](const std::string& prefix) { return name.starts_with(prefix); })) {
      ++result.ignored;
    } else if (!source_a->has(name) || !source_b->has(name)) {
      result.lines.push_back(name + ": only in " + (source_a->has(name) ? a : b));
    } else if (const auto difference = difference_of(*source_a, *source_b, name); !difference.empty()) {
      result.lines.push_back(name + ": " + difference);
    } else {
      ++result.same;
    }
  }
  return result;
}

}  // namespace fsdp::state
