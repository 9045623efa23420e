#include "paging/operator_arguments.h"

#include <algorithm>
#include <initializer_list>
#include <string>
#include <string_view>
#include <unordered_map>

#include "fsdp/error.h"

namespace fsdp::paging {
namespace {

bool is_one_of(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// True for operators that do not read the values of their first argument. (Ordinary views are not among them: their kernels check the
/// storage's size.)
bool takes_shape_of_first(std::string_view name) {
  return is_one_of(name, {"zeros_like",
                          "ones_like",
                          "full_like",
                          "empty_like",
                          "rand_like",
                          "randn_like",
                          "randint_like",
                          "new_zeros",
                          "new_ones",
                          "new_full",
                          "new_empty",
                          "new_empty_strided",
                          "size",
                          "stride",
                          "sym_size",
                          "sym_stride",
                          "sym_numel",
                          "sym_storage_offset",
                          "is_same_size",
                          "result_type",
                          "is_complex",
                          "is_floating_point",
                          "is_signed",
                          "is_conj",
                          "is_neg",
                          "is_inference",
                          "is_leaf",
                          "_shape_as_tensor",
                          "detach",
                          "alias",
                          "detach_",
                          "requires_grad_",
                          "retain_grad",
                          "retains_grad",
                          "_version",
                          "output_nr",
                          "_has_compatible_shallow_copy_type"});
}

/// True for operators that do not read the values of their second argument either.
bool takes_shape_of_second(std::string_view name, std::string_view overload) {
  return is_one_of(name,
                   {"is_same_size", "result_type", "view_as", "reshape_as", "expand_as", "type_as", "_has_compatible_shallow_copy_type"}) ||
         (name == "to" && overload == "other");
}

/// True for operators that update running statistics in training, although their schemas do not declare it. (Those of
/// `_native_batch_norm_legit` and `_batch_norm_with_update` do.)
bool updates_statistics(std::string_view name) {
  return is_one_of(name, {"batch_norm", "_batch_norm_impl_index", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm",
                          "instance_norm", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts", "batch_norm_update_stats"});
}

}  // namespace

const OperatorArguments& OperatorArguments::of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<c10::OperatorHandle, OperatorArguments> known;
  const auto found = known.find(op);
  if (found != known.end()) return found->second;
  return known.emplace(op, OperatorArguments(op.schema())).first->second;
}

OperatorArguments::OperatorArguments(const c10::FunctionSchema& schema) {
  constexpr std::string_view kAten = "aten::";
  const std::string_view full_name = schema.name();
  const auto name = full_name.starts_with(kAten) ? full_name.substr(kAten.size()) : std::string_view();
  const auto& arguments = schema.arguments();
  gives_memory_ = is_one_of(name, {"_has_compatible_shallow_copy_type", "set_"});
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    uses_.push_back(alias != nullptr && alias->isWrite() ? Use::kWritten : Use::kRead);
    const std::string_view argument = arguments[i].name();
    if (updates_statistics(name)) {
      if (is_one_of(argument, {"running_mean", "running_var"})) statistics_.push_back(i);
      if (is_one_of(argument, {"training", "use_input_stats"})) training_ = i;
    }
    if (name.starts_with("as_strided") && argument == "storage_offset") storage_offset_ = i;
  }
  if (takes_shape_of_first(name) && !uses_.empty()) uses_[0] = Use::kShape;
  if (takes_shape_of_second(name, schema.overload_name()) && uses_.size() > 1) uses_[1] = Use::kShape;
}

bool OperatorArguments::updates(std::size_t argument, at::ArrayRef<c10::IValue> values) const {
  const bool is_statistic = std::find(statistics_.begin(), statistics_.end(), argument) != statistics_.end();
  return is_statistic && (!training_ || values[*training_].toBool());
}

void OperatorArguments::place_in_parameter(const engine::Unit& unit, c10::IValue* values) const {
  const auto& self = values[0].toTensor();
  // All numbers are in elements of `self`, which may be a view in another dtype.
  const auto itemsize = static_cast<std::int64_t>(self.element_size());
  const auto position = self.storage_offset();
  std::int64_t begin = 0;
  std::int64_t end = 0;
  const engine::UnitParameter* parameter = nullptr;
  for (std::size_t i = 0; i < unit.parameters.size(); ++i) {
    const auto& its = unit.layout.positions()[i];
    const auto& part = unit.whole.buffer.parts[its.sub_buffer];
    const auto own = static_cast<std::int64_t>(part.element_size());
    begin = (part.storage_offset() + its.offset) * own / itemsize;
    end = begin + its.numel * own / itemsize;
    if (position < begin || position > end || (position == end && self.numel() > 0)) continue;
    parameter = &unit.parameters[i];
    break;
  }
  if (parameter == nullptr) return;  // an empty view behind the last parameter

  std::int64_t last = 0;
  bool has_elements = true;
  const auto sizes = values[*storage_offset_ - 2].toSymIntVector();
  const auto strides = values[*storage_offset_ - 1].toSymIntVector();
  for (std::size_t dim = 0; dim < std::min(sizes.size(), strides.size()); ++dim) {
    has_elements = has_elements && sizes[dim] != 0;
    last += (sizes[dim].expect_int() - 1) * strides[dim].expect_int();
  }
  const auto fits = [&](std::int64_t offset) { return !has_elements || (offset >= begin && offset + last < end); };
  const auto fail = [&](const std::string& what) {
    throw Error("as_strided of parameter '" + parameter->name + "' of unit '" + unit.name + "' " + what);
  };
  auto& offset = values[*storage_offset_];
  const bool given = !offset.isNone();
  const auto in_unit = given ? offset.toSymInt().expect_int() : position;
  const auto in_parameter = given ? begin + in_unit : position;
  if (in_unit != in_parameter && has_elements && fits(in_unit) && fits(in_parameter)) {
    fail("with offset " + std::to_string(in_unit) +
         " may mean the parameter's own element or that of its unit, which storage_offset() counts: take the view by narrow, select or "
         "view, or of the parameter's clone()");
  }
  if (!fits(in_unit) && !fits(in_parameter)) {
    fail("leaves the parameter's " + std::to_string(end - begin) +
         " elements; what lies behind them belongs to others. Offsets count from the parameter's first element");
  }
  offset = fits(in_parameter) ? in_parameter : in_unit;
}

}  // namespace fsdp::paging
