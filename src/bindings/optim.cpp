// Steps of libfsdp.optim's optimizers, one call each, and the arithmetic of clip_grad_norm_.

#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "base/stream_capture.h"
#include "bindings/bindings.h"
#include "optim/adamw_8bit_step.h"
#include "optim/fused.h"
#include "optim/muon_exchange.h"
#include "optim/norm.h"
#include "torch_python/optimized.h"

namespace py = pybind11;

namespace fsdp::bindings {

using torch_python::local_of;
using torch_python::optimized;
using torch_python::OptimizedGroup;

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

/// The parameters that Python has to prepare first, as (group, parameter). If there are any, no parameter has been updated.
using ToPrepare = std::vector<std::pair<std::size_t, std::size_t>>;

std::vector<OptimizedGroup> walk(const std::string& optimizer, const py::list& groups, const py::dict& state,
                                 const std::vector<std::vector<std::string>>& keys, ToPrepare& to_prepare) {
  std::vector<OptimizedGroup> walked;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    walked.push_back(optimized(optimizer, py::cast<py::dict>(groups[g]), g, state, keys[g]));
    for (const auto i : walked.back().to_prepare) to_prepare.emplace_back(g, i);
  }
  return walked;
}

optim::AdamStep adam_step(const py::dict& settings) {
  const auto number = [&](const char* name) { return py::cast<double>(settings[name]); };
  const auto [beta1, beta2] = py::cast<std::pair<double, double>>(settings["betas"]);
  return {.lr = number("lr"),
          .beta1 = beta1,
          .beta2 = beta2,
          .weight_decay = number("weight_decay"),
          .eps = number("eps"),
          .decoupled = py::cast<bool>(settings["decoupled_weight_decay"]),
          .amsgrad = py::cast<bool>(settings["amsgrad"]),
          .maximize = py::cast<bool>(settings["maximize"])};
}

/// Moves "step", which comes after the moments in the state, to the steps.
optim::StepTensors counted(OptimizedGroup& group) {
  optim::StepTensors tensors{.values = std::move(group.values),
                             .gradients = std::move(group.gradients),
                             .states = std::move(group.states),
                             .steps = {},
                             .grad_scale = {},
                             .found_inf = {}};
  tensors.steps = std::move(tensors.states.back());
  tensors.states.pop_back();
  if (!tensors.steps.empty() && tensors.steps.front().is_cpu()) {
    refuse_in_capture(tensors.values.front().device(), "a step that counts updates on the host", "give the optimizer fused=True");
  }
  return tensors;
}

ToPrepare step_adam(const std::string& optimizer, const py::list& groups, const py::dict& state,
                    const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& found_inf) {
  std::vector<optim::AdamStep> steps;
  std::vector<std::vector<std::string>> keys;
  for (const auto& given : groups) {
    const auto of_group = py::cast<py::dict>(given);
    steps.push_back(adam_step(of_group));
    keys.push_back({"exp_avg", "exp_avg_sq"});
    if (steps.back().amsgrad) keys.back().emplace_back("max_exp_avg_sq");
    keys.back().emplace_back("step");
  }
  ToPrepare to_prepare;
  auto walked = walk(optimizer, groups, state, keys, to_prepare);
  if (!to_prepare.empty()) return to_prepare;
  const py::gil_scoped_release no_gil;
  const at::NoGradGuard no_grad;
  for (std::size_t g = 0; g < walked.size(); ++g) {
    auto tensors = counted(walked[g]);
    if (grad_scale) tensors.grad_scale = *grad_scale;
    if (found_inf) tensors.found_inf = *found_inf;
    optim::count_step(tensors.steps, tensors.found_inf);
    optim::step_adam(tensors, steps[g]);
  }
  return to_prepare;
}

/// `first` are the parameters whose momentum has just been made.
ToPrepare step_sgd(const std::string& optimizer, const py::list& groups, const py::dict& state, const std::optional<at::Tensor>& grad_scale,
                   const std::optional<at::Tensor>& found_inf, const ToPrepare& first) {
  std::vector<optim::SGDStep> steps;
  std::vector<std::vector<std::string>> keys;
  for (const auto& given : groups) {
    const auto of_group = py::cast<py::dict>(given);
    const auto number = [&](const char* name) { return py::cast<double>(of_group[name]); };
    steps.push_back({.lr = number("lr"),
                     .momentum = number("momentum"),
                     .dampening = number("dampening"),
                     .weight_decay = number("weight_decay"),
                     .nesterov = py::cast<bool>(of_group["nesterov"]),
                     .maximize = py::cast<bool>(of_group["maximize"])});
    keys.push_back(steps.back().momentum != 0 ? std::vector<std::string>{"momentum_buffer"} : std::vector<std::string>{});
  }
  ToPrepare to_prepare;
  auto walked = walk(optimizer, groups, state, keys, to_prepare);
  if (!to_prepare.empty()) return to_prepare;
  const std::set<std::pair<std::size_t, std::size_t>> is_first(first.begin(), first.end());
  const py::gil_scoped_release no_gil;
  const at::NoGradGuard no_grad;
  for (std::size_t g = 0; g < walked.size(); ++g) {
    auto& group = walked[g];
    optim::StepTensors parts[2];
    for (std::size_t i = 0; i < group.indices.size(); ++i) {
      auto& part = parts[is_first.contains({g, group.indices[i]}) ? 1 : 0];
      part.values.push_back(group.values[i]);
      part.gradients.push_back(group.gradients[i]);
      part.states.resize(group.states.size());
      for (std::size_t k = 0; k < group.states.size(); ++k) part.states[k].push_back(group.states[k][i]);
    }
    for (const bool at_first : {false, true}) {
      auto& part = parts[at_first ? 1 : 0];
      if (grad_scale) part.grad_scale = *grad_scale;
      if (found_inf) part.found_inf = *found_inf;
      steps[g].is_first = at_first;
      optim::step_sgd(part, steps[g]);
    }
  }
  return to_prepare;
}

/// Each parameter has either 8-bit state or full state.
ToPrepare step_adamw_8bit(const std::string& optimizer, const py::list& groups, const py::dict& state) {
  std::vector<optim::AdamStep> steps;
  for (const auto& group : groups) steps.push_back(adam_step(py::cast<py::dict>(group)));
  const auto walk_for = [&](const std::vector<std::string>& keys, ToPrepare& others) {
    return walk(optimizer, groups, state, std::vector<std::vector<std::string>>(groups.size(), keys), others);
  };
  ToPrepare not_quantized, not_full, to_prepare;
  auto quantized = walk_for({"state1", "absmax1", "state2", "absmax2", "step"}, not_quantized);
  auto full = walk_for({"exp_avg", "exp_avg_sq", "step"}, not_full);
  std::set_intersection(not_quantized.begin(), not_quantized.end(), not_full.begin(), not_full.end(), std::back_inserter(to_prepare));
  if (!to_prepare.empty()) return to_prepare;
  const py::gil_scoped_release no_gil;
  const at::NoGradGuard no_grad;
  for (std::size_t g = 0; g < steps.size(); ++g) {
    const auto in_full = counted(full[g]);
    optim::count_step(in_full.steps);
    optim::step_adam(in_full, steps[g]);
    const auto tensors = counted(quantized[g]);
    for (std::size_t i = 0; i < tensors.values.size(); ++i) {
      optim::count_step({&tensors.steps[i], 1});
      if (tensors.values[i].numel() == 0) continue;
      // The step goes through memory, in the order of elements.
      optim::QuantizedPiece piece{tensors.values[i].contiguous(), tensors.gradients[i].contiguous(), {}};
      for (const auto& kind : tensors.states) piece.state.push_back(kind[i].contiguous());
      optim::step_adamw_8bit(piece, steps[g], std::llround(tensors.steps[i].item<double>()));
      if (!piece.value.is_same(tensors.values[i])) tensors.values[i].copy_(piece.value);
      for (std::size_t kind = 0; kind < piece.state.size(); ++kind) {
        if (!piece.state[kind].is_same(tensors.states[kind][i])) tensors.states[kind][i].copy_(piece.state[kind]);
      }
    }
  }
  return to_prepare;
}

/// For each index in the group: rows, columns, the dimension that is cut, and the owner.
using Matrices = std::map<std::size_t, std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>>;

/// One step of Muon on those matrices of a group that are cut over the same row of ranks.
class MuonStep {
 public:
  MuonStep(const std::string& optimizer, const py::dict& group, std::size_t number, const py::dict& state, const Matrices& matrices,
           std::int64_t ranks, std::int64_t rank)
      : lr_(py::cast<double>(group["lr"])), weight_decay_(py::cast<double>(group["weight_decay"])) {
    MuonOptions options;
    options.momentum = py::cast<double>(group["momentum"]);
    options.nesterov = py::cast<bool>(group["nesterov"]);
    options.ns_coefficients = py::cast<std::array<double, 3>>(py::tuple(group["ns_coefficients"]));
    options.eps = py::cast<double>(group["eps"]);
    options.ns_steps = py::cast<int>(group["ns_steps"]);
    options.ns_dtype = at::kBFloat16;  // as torch.optim.Muon
    if (!group["adjust_lr_fn"].is_none() && py::cast<std::string>(group["adjust_lr_fn"]) == "match_rms_adamw") {
      adjust_lr_ = AdjustLR::kMatchRMSAdamW;
    }
    auto found = optimized(optimizer, group, number, state, {"momentum_buffer"});
    for (const auto i : found.to_prepare) {
      if (matrices.contains(i)) to_prepare_.push_back(i);
    }
    std::vector<optim::MuonPiece> pieces;
    for (std::size_t n = 0; n < found.indices.size(); ++n) {
      const auto matrix = matrices.find(found.indices[n]);
      if (matrix == matrices.end()) continue;
      const auto [rows, columns, dim, owner] = matrix->second;
      pieces.push_back({{rows, columns, dim, owner}, found.values[n], found.gradients[n], found.states[0][n]});
    }
    is_empty_ = pieces.empty();
    exchange_.emplace(std::move(pieces), ranks, rank, options);
  }

  const std::vector<std::size_t>& to_prepare() const { return to_prepare_; }
  bool is_empty() const { return is_empty_; }
  auto numels() const { return exchange_->numels(); }
  at::Tensor directions() {
    const at::NoGradGuard no_grad;
    return exchange_->directions();
  }
  at::Tensor orthogonalize(const at::Tensor& received) const {
    const at::NoGradGuard no_grad;
    return exchange_->orthogonalize(received);
  }
  void apply(const at::Tensor& received) {
    const at::NoGradGuard no_grad;
    exchange_->apply(received, lr_, weight_decay_, adjust_lr_);
  }

 private:
  double lr_;
  double weight_decay_;
  AdjustLR adjust_lr_ = AdjustLR::kOriginal;
  std::vector<std::size_t> to_prepare_;
  bool is_empty_ = true;
  std::optional<optim::MuonExchange> exchange_;
};

/// Returns the sum of powers of gradients, from which the joint p-norm is computed.
at::Tensor power_sum(const std::vector<at::Tensor>& gradients, double p) {
  const at::NoGradGuard no_grad;
  return optim::Norm(p, "clip_grad_norm_").of_pieces(gradients);
}

double merge_power_sums(const std::vector<double>& sums, double p) {
  const optim::Norm norm(p, "clip_grad_norm_");
  double merged = 0;
  for (const double sum : sums) merged = norm.merge(merged, sum);
  return merged;
}

}  // namespace

void bind_optim(py::module_& module) {
  module.def("step_adam", &step_adam);
  module.def("step_sgd", &step_sgd);
  module.def("step_adamw_8bit", &step_adamw_8bit);
  module.def("steps_adamw_8bit_on", [](const c10::Device& device) { return optim::steps_adamw_8bit_on(device.type()); });
  py::class_<MuonStep>(module, "MuonStep", "A step of Muon, between its two exchanges.")
      .def(py::init<const std::string&, const py::dict&, std::size_t, const py::dict&, const Matrices&, std::int64_t, std::int64_t>())
      .def_property_readonly("to_prepare", &MuonStep::to_prepare)
      .def_property_readonly("is_empty", &MuonStep::is_empty)
      .def("numels", &MuonStep::numels)
      .def("directions", &MuonStep::directions, NoGil())
      .def("orthogonalize", &MuonStep::orthogonalize, NoGil())
      .def("apply", &MuonStep::apply, NoGil());
  module.def("power_sum", &power_sum, NoGil());
  module.def("merge_power_sums", &merge_power_sums);
  module.def("local_of", [](const py::object& tensor) { return local_of(tensor); });
}

}  // namespace fsdp::bindings
