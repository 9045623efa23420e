#include "hooks/hooked_model.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>
#include <utility>

#include "base/stream_capture.h"
#include "fsdp/error.h"
#include "trigger/autograd_pass.h"
#include "trigger/gradient_hook.h"
#include "trigger/watch_backward.h"

namespace fsdp::hooks {
namespace {

std::atomic<std::uint64_t> updates_of_optimizers{0};
std::atomic<std::uint64_t> loads_of_models{0};

/// Hands the accumulated gradient of a leaf to the engine, and keeps neither.
struct DeliverToModel {
  std::weak_ptr<HookedModel> model;
  std::weak_ptr<HookedUnit> unit;
  std::size_t index;
  std::function<at::Tensor(const at::Tensor&)> local;

  void operator()(const at::Tensor& gradient) const {
    const auto to = model.lock();
    const auto of = unit.lock();
    if (!to || !of) return;
    to->in_autograd([&] { to->gradient(*of, index, local ? local(gradient) : gradient); });
  }
};

std::string text_of(const std::vector<engine::DifferentValues>& different) { return different.empty() ? "" : different.front().text; }

}  // namespace

void HookedModel::add(const std::shared_ptr<HookedUnit>& unit, std::optional<std::size_t> parent) {
  auto& added = engine_->add(unit->release(weak_from_this()));
  if (parent) added.place.parent = engine_->units()[*parent].get();
  added.allocate_main(engine_->accounting());
  units_.push_back(unit);
}

std::string HookedModel::agree(std::vector<engine::UnitText> texts) {
  const auto& units = engine_->units();
  const bool gathers = std::any_of(units.begin(), units.end(), [](const auto& unit) { return !unit->replicated_optimizer(); });
  if (gathers) return text_of(engine::agree(units, texts, engine_->options().mesh.rank()));
  to_agree_on_ = std::move(texts);
  return "";
}

void HookedModel::dissolve() {
  auto released = engine_->release();
  for (std::size_t k = 0; k < units_.size(); ++k) {
    released[k]->place.parent = nullptr;
    released[k]->place.facts = nullptr;
    units_[k]->take_back(std::move(released[k]));
  }
  units_.clear();
  watched_.clear();
  watched_leaves_.clear();
  to_agree_on_.clear();
}

void note_update() { ++updates_of_optimizers; }

void note_load() {
  ++loads_of_models;
  note_update();
}

// [Current when forward begins] Signs of writes matter only for copies that the user keeps; other copies are freed in any case.
void HookedModel::begin_forward() {
  RECORD_USER_SCOPE("FSDP::root_pre_forward");
  if (!trigger::inside_backward()) engine_->recover();
  if (were_written()) engine_->main().changed(/*forward_begins=*/true);
  // What a graph writes when it is replayed has no sign.
  const bool captures = is_capturing_on(engine_->options().device());
  captured_ = captured_ || captures;
  if (captures) {
    for (const auto& unit : engine_->units()) {
      if (unit->whole.use == engine::UseState::kPinned) engine_->reshard(*unit);  // The graph has to gather it.
    }
  }
  const auto updates = updates_of_optimizers.load();
  const bool updated = std::exchange(updates_, updates) != updates;
  unit_forwards_.clear();
  // Between a forward and its backward, torch forbids writes. If there is no graph (a teacher with frozen parameters), it does not forbid
  // them.
  engine_->begin_forward(/*kept_is_outdated=*/updated || captured_ || last_forward_ == LastForward::kNoGraph);
  last_forward_ = at::GradMode::is_enabled() ? LastForward::kNoGraph : LastForward::kDone;
}

bool HookedModel::take_writes() {
  if (!trigger::inside_backward()) engine_->recover();
  if (!were_written()) return false;
  engine_->main().changed();
  return true;
}

void HookedModel::prepare_unshard(HookedUnit& unit) {
  if (take_writes()) return;
  const bool updated = captured_ || updates_ != updates_of_optimizers.load();
  if (updated || last_forward_ != LastForward::kGraph) engine_->refresh(unit.unit(), updated);
}

void HookedModel::parameters_changed() {
  if (!were_written()) engine_->main().send_values();
  engine_->main().changed();
}

std::int64_t HookedModel::sum_of_versions() const {
  std::int64_t versions = 0;
  for (const auto& counter : watched_) versions += static_cast<std::int64_t>(counter.current_version());
  return versions;
}

/// Returns true if there is a sign that this model's main parameters were written since the last call. All copies and graphs are then
/// stale; the caller marks them. If anything else than an optimizer's step has written them, no differences are sent [Differences need a
/// base].
bool HookedModel::were_written() {
  bool exchanged = false;
  for (const auto& unit : units_) exchanged = unit->take_exchanged_memory() || exchanged;
  std::uint64_t steps = 0;
  for (const auto& unit : units_) steps += unit->steps;
  const bool stepped = std::exchange(steps_, steps) != steps;
  const auto versions = sum_of_versions();
  const auto before = std::exchange(versions_, versions);
  const auto loads = loads_of_models.load();
  const bool loaded = std::exchange(loads_, loads) != loads;
  if (loaded || exchanged || versions != (stepped ? updated_versions_ : before)) engine_->main().send_values();
  return stepped || exchanged || versions != before;
}

void HookedModel::begin_unit_forward(HookedUnit& unit) {
  unit_forwards_.push_back({.unit = &unit, .first_operator = at::sequence_number::peek()});
  engine_->begin_unit_forward(unit.unit());
}

bool HookedModel::end_unit_forward(HookedUnit& unit) {
  const auto last = std::find_if(unit_forwards_.rbegin(), unit_forwards_.rend(), [&](const UnitForward& one) { return one.unit == &unit; });
  if (last != unit_forwards_.rend()) unit_forwards_.erase(std::next(last).base());
  return engine_->end_unit_forward(unit.unit());
}

void HookedModel::enter(HookedUnit& unit) {
  if (trigger::inside_backward()) {
    watch_backward();
    unit.entered_in_backward = true;
  }
  const auto pass = trigger::current_pass();
  RECORD_USER_SCOPE((pass == engine::Pass::kForward ? "FSDP::pre_forward (" : "FSDP::pre_backward (") + unit.unit().name + ")");
  if (unit.unit().whole.in_use(pass) && engine_->follows_current_stream() && engine_->knows_grad_mode()) return;
  const std::array<engine::Unit*, 1> units{&unit.unit()};
  engine_->enter(units, pass);
}

void HookedModel::enter_backward(HookedUnit& unit) {
  unit.entered_in_backward = true;
  if (!unit.gathered_in_backward) return watch_backward();
  enter(unit);
  unit.entered_by_backward();
}

void HookedModel::watch(HookedUnit& unit, const std::vector<at::Tensor>& outputs) {
  RECORD_USER_SCOPE("FSDP::post_forward (" + unit.unit().name + ")");
  const auto forward =
      std::find_if(unit_forwards_.rbegin(), unit_forwards_.rend(), [&](const UnitForward& one) { return one.unit == &unit; });
  const auto begin = forward == unit_forwards_.rend() ? 0 : forward->first_operator;
  for (const auto& output : outputs) {
    const auto& made_by = output.grad_fn();
    if (made_by && made_by->sequence_nr() < begin) continue;
    if (last_forward_ == LastForward::kNoGraph) last_forward_ = LastForward::kGraph;
    if (!made_by) {
      watch_leaf(unit, output);
      continue;
    }
    // The user may let go of the model before backward.
    output.register_hook([model = shared_from_this(), entered = unit.shared_from_this(), steps = unit.steps](const at::Tensor&) {
      if (entered->steps != steps) entered->stale_in_backward = true;
      model->in_autograd([&] { model->enter_backward(*entered); });
    });
  }
}

/// A leaf (a parameter, or the user's own tensor) lives longer than a forward: one hook serves all of them, and keeps nothing alive.
void HookedModel::watch_leaf(HookedUnit& unit, const at::Tensor& leaf) {
  std::erase_if(watched_leaves_, [](const auto& one) { return one.leaf.expired(); });
  for (const auto& one : watched_leaves_) {
    if (one.unit == &unit && one.leaf._unsafe_get_target() == leaf.unsafeGetTensorImpl()) return;
  }
  watched_leaves_.push_back({&unit, WeakTensor(leaf.getIntrusivePtr())});
  leaf.register_hook([model = weak_from_this(), of = unit.weak_from_this()](const at::Tensor&) {
    const auto to = model.lock();
    const auto entered = of.lock();
    if (to && entered) to->in_autograd([&] { to->enter_backward(*entered); });
  });
}

void HookedModel::collect_gradients(HookedUnit& unit, std::size_t i, const at::Tensor& leaf,
                                    std::function<at::Tensor(const at::Tensor&)> local) {
  torch::autograd::impl::set_post_acc_grad_hooks(leaf, std::make_unique<trigger::GradientHook<DeliverToModel>>(
                                                           DeliverToModel{weak_from_this(), unit.weak_from_this(), i, std::move(local)}));
}

void HookedModel::gradient(HookedUnit& unit, std::size_t i, const at::Tensor& gradient) {
  watch_backward();
  unit.got_gradient_in_backward = true;
  engine_->gradient(unit.unit(), i, unit.as_stored(i, gradient));
}

void HookedModel::watch_backward() {
  const auto begin = [&](const std::shared_ptr<char>& alive, engine::BackwardOf of) { return engine_->begin_backward(alive, of); };
  const bool announced = trigger::watch_backward(*engine_, begin, [self = shared_from_this()](engine::BackwardOf) {
    RECORD_USER_SCOPE("FSDP::root_post_backward_callback");
    self->in_autograd([&] { self->end_backward(); });
  });
  if (!announced) return;
  last_forward_ = LastForward::kDone;
  if (to_agree_on_.empty()) return;
  const auto warning = text_of(engine::agree(engine_->units(), to_agree_on_, engine_->options().mesh.rank()));
  to_agree_on_.clear();
  if (!warning.empty()) TORCH_WARN(warning);
}

void HookedModel::end_backward() {
  try {
    engine_->end_backward();
  } catch (const CommError&) {
    throw;
  } catch (...) {  // This is a report on gradients (NaN), so the user still gets them.
    if (backward_ended_) backward_ended_();
    throw;
  }
  if (backward_ended_) backward_ended_();
}

std::vector<std::size_t> HookedModel::take_missed() {
  std::vector<std::size_t> missed;
  for (std::size_t k = 0; k < units_.size(); ++k) {
    const bool entered = std::exchange(units_[k]->entered_in_backward, false);
    if (std::exchange(units_[k]->got_gradient_in_backward, false) && !entered) missed.push_back(k);
  }
  return missed;
}

std::vector<std::size_t> HookedModel::take_stale() {
  std::vector<std::size_t> stale;
  for (std::size_t k = 0; k < units_.size(); ++k) {
    if (std::exchange(units_[k]->stale_in_backward, false)) stale.push_back(k);
  }
  return stale;
}

}  // namespace fsdp::hooks
