#include "plan/planned_step.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "comm/null_communicator.h"
#include "engine/gradient_accumulator.h"
#include "engine/wire_stats.h"
#include "memory/accounting.h"

namespace fsdp::planning {
namespace {

using engine::Pass;
using engine::Unit;
using What = Visit::What;

/// From the fourth step on, slots follow the plan that two equal steps make. The next one has all of the plan's blocks.
constexpr int kStepsUntilAlike = 5;

PlanBytes bytes_of(const memory::Accounting& accounting) {
  const auto stats = accounting.stats();
  return {.main_parameters = stats.main_parameters.live,
          .main_gradients = stats.main_gradients.live,
          .optimizer_state = stats.optimizer_state.live,
          .gathered_parameters = stats.gathered_parameters.live,
          .unreduced_gradients = stats.unreduced_gradients.live,
          .communication = stats.communication.live,
          .unused_slots = accounting.held() - stats.total.live,
          .activations = 0,
          .host = stats.host.live};
}

PlanBytes sum(PlanBytes a, const PlanBytes& b) {
  a.main_gradients += b.main_gradients;
  a.optimizer_state += b.optimizer_state;
  a.activations += b.activations;
  a.host += b.host;
  return a;
}

std::string quoted(const Unit& unit) { return "'" + unit.name + "'"; }

PlannedUnit describe(Unit& unit, std::int64_t activations) {
  PlannedUnit planned{.name = unit.name, .activations = activations};
  for (const auto& position : unit.layout.positions()) {
    const auto itemsize = static_cast<std::int64_t>(c10::elementSize(unit.formats[position.sub_buffer].compute));
    planned.elements += position.numel;
    planned.padding -= position.numel * itemsize;
  }
  for (std::size_t i = 0; i < unit.parameters.size(); ++i) {
    const auto own = unit.slice(i, unit.own_pieces());
    planned.checkpoint += own.numel * static_cast<std::int64_t>(c10::elementSize(unit.formats[own.sub_buffer].main));
  }
  const engine::GradientAccumulator gradients(unit);  // Of its own, as the reducer's is the reducer's; it takes no memory.
  for (const auto& part : unit.main.parts) planned.main_parameters += static_cast<std::int64_t>(part.nbytes());
  for (const auto& part : unit.main_gradient.parts) planned.main_gradients += static_cast<std::int64_t>(part.nbytes());
  planned.gathered = unit.whole.buffer.bytes;
  planned.padding += unit.whole.buffer.bytes;
  planned.unreduced = gradients.computed ? gradients.computed->bytes : gradients.wire.bytes;
  planned.communication = gradients.computed ? gradients.computed_staging.bytes : gradients.staging.bytes;
  return planned;
}

}  // namespace

std::int64_t part_in_checkpoint(const Unit& unit, std::int64_t bytes) {
  std::int64_t own = 0, all = 0;
  for (std::size_t i = 0; i < unit.parameters.size(); ++i) {
    own += unit.slice(i, unit.own_pieces()).numel;
    all += unit.main_slice(i).numel;
  }
  return all == 0 ? 0 : bytes / all * own + bytes % all * own / all;
}

namespace {

comm::NullCommunicator& null(comm::Communicator& communicator) {
  return dynamic_cast<comm::NullCommunicator&>(communicator);  // A planned mesh has no others.
}

const comm::NullCommunicator& null(const comm::Communicator& communicator) {
  return dynamic_cast<const comm::NullCommunicator&>(communicator);
}

/// The name of the dimension along which a communicator of a unit's connects ranks.
std::string name_of(const comm::Communicator* communicator, const Unit& unit, const DeviceMesh& mesh) {
  const auto& [gather, reduce, outer, neighbours] = unit.communicators;
  const auto& inner = mesh.dims().back().name;
  if (gather != mesh.communicator(inner)) return "(the unit's own mesh)";
  if (communicator == outer.get()) return mesh.dims().front().name;
  return communicator == neighbours.get() ? inner + " (neighbours)" : inner;
}

/// The dimensions over which units communicate. A row that has several communicators counts once.
std::vector<PlannedLink> links_of(const engine::Engine& engine, std::map<const comm::Communicator*, std::size_t>& link_of) {
  std::vector<PlannedLink> links;
  for (const auto& unit : engine.units()) {
    const auto& [gather, reduce, outer, neighbours] = unit->communicators;
    for (const auto* communicator : {outer.get(), gather.get(), reduce.get(), neighbours.get()}) {
      if (communicator == nullptr || link_of.contains(communicator)) continue;
      const auto dim = name_of(communicator, *unit, engine.options().mesh);
      const PlannedLink link{.dim = dim, .ranks = communicator->size(), .stride = null(*communicator).stride(), .sent = {}};
      auto place = std::ranges::find_if(
          links, [&](const auto& other) { return other.dim == link.dim && other.ranks == link.ranks && other.stride == link.stride; });
      if (place == links.end()) place = links.insert(place, link);
      link_of[communicator] = static_cast<std::size_t>(place - links.begin());
    }
  }
  return links;
}

}  // namespace

std::vector<UnitActivations> unit_activations(const std::vector<std::int64_t>& activations,
                                              const std::vector<std::int64_t>& kept_if_recomputed, const std::vector<bool>& recomputed) {
  std::vector<UnitActivations> units;
  for (std::size_t k = 0; k < activations.size(); ++k) {
    const auto kept = recomputed.empty() || !recomputed[k] ? activations[k] : std::min(activations[k], kept_if_recomputed[k]);
    units.push_back({.from_forward = kept, .recomputed = activations[k] - kept});
  }
  return units;
}

std::vector<Visit> reversed(const std::vector<Visit>& forward) {
  std::vector<Visit> backward(forward.rbegin(), forward.rend());
  for (auto& visit : backward) {
    std::ranges::reverse(visit.gradients);
    if (visit.what != What::kUse) visit.what = visit.what == What::kBegin ? What::kEnd : What::kBegin;
  }
  return backward;
}

Highest::Highest(memory::Accounting& accounting) : accounting_(accounting) {
  accounting_.watch([this] { look(); });
}

Highest::~Highest() { accounting_.watch({}); }

void Highest::at(const std::string& what) {
  if (moments_.empty() || moments_.back().what != what) moments_.push_back({what, sum(bytes_of(accounting_), outside)});
}

void Highest::look() {
  const auto bytes = sum(bytes_of(accounting_), outside);
  const auto slots = accounting_.stats().slots.live;
  load_.slots = std::max(load_.slots, slots - bytes.unused_slots);
  load_.rest = std::max(load_.rest, bytes.device() - slots);
  load_.both = std::max(load_.both, bytes.device() - bytes.unused_slots);
  ever_ = std::max(ever_, bytes.device());
  if (moments_.empty()) return;
  auto& most = moments_.back().most;
  if (bytes.device() > most.device()) most = bytes;
}

const PlannedMoment& Highest::highest() const {
  return *std::ranges::max_element(moments_, {}, [](const auto& moment) { return moment.most.device(); });
}

Highest::Load Highest::take_load() {
  look();
  return std::exchange(load_, {});
}

PlannedSteps::PlannedSteps(std::shared_ptr<engine::Engine> engine, Passes passes, Trigger trigger, std::function<void(Highest&)> update)
    : engine_(std::move(engine)),
      passes_(std::move(passes)),
      trigger_(trigger),
      update_(std::move(update)),
      activations_(engine_->units().size()),
      highest_(engine_->accounting()),
      has_taken_(engine_->units().size()) {
  for (const auto& unit : engine_->units()) given_.push_back(unit->options);
}

Plan PlannedSteps::run() {
  for (int k = 0; k < kStepsUntilAlike; ++k) step();
  auto& accounting = engine_->accounting();
  accounting.reset_peaks();
  const auto communicators = engine::communicators_of(engine_->units());
  std::map<const comm::Communicator*, std::size_t> link_of;
  Plan plan;
  plan.ranks = engine_->options().mesh.size();
  plan.links = links_of(*engine_, link_of);
  StepRecorder recorder(engine_->units(), link_of);
  for (auto* communicator : communicators) {
    communicator->reset_stats();
    null(*communicator).tell(&recorder);
  }
  recorder_ = &recorder;
  highest_.reset();
  highest_.at("the beginning of a step");
  step();
  recorder_ = nullptr;
  for (auto* communicator : communicators) null(*communicator).tell(nullptr);

  for (const auto& [communicator, link] : link_of) engine::add(plan.links[link].sent, engine::stats_of(communicator->stats()));
  for (const auto& link : plan.links) engine::add(plan.wire, link.sent);
  plan.memory = accounting.stats();
  plan.peak = highest_.highest().most;
  plan.moment = highest_.highest().what;
  plan.moments = highest_.moments();
  plan.actions = recorder.take();
  for (const auto& unit : engine_->units()) {
    const auto& [from_forward, recomputed] = activations_[unit->place.index];
    plan.units.push_back(describe(*unit, from_forward + recomputed));
    plan.elements += plan.units.back().elements;
  }
  return plan;
}

Observed PlannedSteps::observe() {
  observes_ = true;
  Observed observed{.plan = run(),
                    .most = highest_.ever(),
                    .parameters = {.loads = loads_of_parameters(), .units = {}},
                    .activations = {.loads = loads_of_activations(), .units = {}}};
  for (const auto& unit : engine_->units()) {
    observed.parameters.units.push_back(parameters_of(*unit));
    observed.activations.units.push_back(activations_of(observed.plan.units[unit->place.index], unit->place.index));
  }
  return observed;
}

void PlannedSteps::note_moment() {
  if (!observes_) return;
  const auto& units = engine_->units();
  if (moment_ == moments_.size()) moments_.push_back({.load = {}, .present = std::vector<bool>(units.size())});
  auto& moment = moments_[moment_++];
  const auto load = highest_.take_load();
  moment.load.slots = std::max(moment.load.slots, load.slots);
  moment.load.rest = std::max(moment.load.rest, load.rest);
  moment.load.both = std::max(moment.load.both, load.both);
  for (std::size_t k = 0; k < units.size(); ++k) {
    if (units[k]->state() != engine::ParameterState::kSharded) moment.present[k] = true;
  }
}

/// Blocks of slots stay on a CPU. So what slots hold at one moment is beside all that is elsewhere at any.
std::vector<std::int64_t> PlannedSteps::loads_of_parameters() const {
  std::int64_t rest = 0;
  for (const auto& moment : moments_) rest = std::max(rest, moment.load.rest);
  std::vector<std::int64_t> loads;
  for (const auto& [load, present] : moments_) loads.push_back(engine_->options().on_cpu() ? load.slots + rest : load.both);
  return loads;
}

/// The other way round: activations lie beside the blocks that slots hold already.
std::vector<std::int64_t> PlannedSteps::loads_of_activations() const {
  std::int64_t most = 0;
  for (const auto& moment : moments_) most = std::max(most, moment.load.slots);
  std::vector<std::int64_t> loads;
  for (const auto& [load, present] : moments_) loads.push_back(engine_->options().on_cpu() ? load.rest + most : load.both);
  return loads;
}

Keepable PlannedSteps::activations_of(const PlannedUnit& unit, std::size_t index) const {
  const auto recomputed = activations_[index].recomputed;
  const auto is_of_unit = [index](const Visit& visit) { return visit.unit == index; };
  const auto last = std::ranges::find_if(passes_.forward.rbegin(), passes_.forward.rend(), is_of_unit);
  const auto first = std::ranges::find_if(passes_.backward, is_of_unit);
  if (recomputed == 0 || last == passes_.forward.rend() || first == passes_.backward.end()) return {};
  return {.begin = static_cast<std::size_t>(passes_.forward.rend() - last) - 1,
          .end = first_of_backward_ + static_cast<std::size_t>(first - passes_.backward.begin()),
          .bytes = recomputed,
          .saved = unit.elements};
}

Keepable PlannedSteps::parameters_of(const Unit& unit) const {
  if (unit.replicated_parameters() || !unit.options.reshards_after_forward()) return {};
  std::vector<std::size_t> present;
  for (std::size_t t = 0; t < moments_.size(); ++t) {
    if (moments_[t].present[unit.place.index]) present.push_back(t);
  }
  // Backward does not enter a unit of which it needs no value.
  if (present.empty() || present.front() >= first_of_backward_ || present.back() < first_of_backward_) return {};
  Keepable found{.bytes = unit.whole.buffer.bytes};
  std::int64_t gathers = 0;
  for (std::size_t i = 1; i < present.size(); ++i) {
    if (present[i] == present[i - 1] + 1) continue;
    if (gathers++ == 0) found.begin = present[i - 1] + 1;
    found.end = present[i];
  }
  const auto& neighbours = unit.communicators.post_forward;
  const std::int64_t ranks = neighbours ? neighbours->size() : unit.communicators.gather->size();
  std::int64_t sent = 0;
  for (std::size_t k = 0; k < unit.formats.size(); ++k) {
    const auto itemsize = neighbours || !unit.formats[k].gather ? static_cast<std::int64_t>(c10::elementSize(unit.formats[k].compute)) : 1;
    const auto numel = neighbours ? unit.layout.sub_buffers()[k].shard_numel : unit.travelling_numel(k);
    sent += numel * unit.layout.world_size() * itemsize / ranks * (ranks - 1);
  }
  found.saved = gathers * sent;
  return found;
}

void PlannedSteps::step() {
  moments_.clear();
  for (std::int64_t k = 0; k < microbatches_.count; ++k) {
    begin_microbatch(k);
    forward();
    backward(/*ends_step=*/k + 1 == microbatches_.count);
  }
  highest_.at("the update");
  if (recorder_ != nullptr) recorder_->update();
  update_(highest_);
  drop_gradients();
  note_moment();
}

void PlannedSteps::begin_microbatch(std::int64_t number) {
  moment_ = 0;
  const bool last = number + 1 == microbatches_.count;
  for (const auto& unit : engine_->units()) {
    const auto& given = given_[unit->place.index];
    unit->options.requires_gradient_sync = last || given.requires_gradient_sync;
    unit->options.requires_all_reduce = last || given.requires_all_reduce;
  }
  engine_->set({.is_last_backward = last || !microbatches_.leaves_reductions, .manual_finalization = microbatches_.manual_finalization});
  if (trigger_ != Trigger::kHooks) return;
  highest_.at("the beginning of forward");
  // An optimizer has stepped, and its hooks have notified the engine.
  const bool updated = number == 0 && std::exchange(has_stepped_, true);
  if (updated) engine_->main().changed(/*forward_begins=*/true);
  engine_->begin_forward(/*kept_is_outdated=*/number == 0);
}

void PlannedSteps::enter(const Visit& visit, Pass pass) {
  const std::array<Unit*, 1> units{engine_->units()[visit.unit].get()};
  if (!units[0]->whole.in_use(pass)) engine_->enter(units, pass);
}

void PlannedSteps::compute(const Visit& visit, Pass pass) {
  if (recorder_ != nullptr) recorder_->compute(visit.unit, pass);
}

void PlannedSteps::forward() {
  std::vector<std::size_t> last(activations_.size());  // the last visit of each unit
  for (std::size_t k = 0; k < passes_.forward.size(); ++k) last[passes_.forward[k].unit] = k;
  for (std::size_t k = 0; k < passes_.forward.size(); ++k) {
    const auto& visit = passes_.forward[k];
    auto& unit = *engine_->units()[visit.unit];
    highest_.at("forward of " + quoted(unit));
    if (visit.what == What::kBegin) engine_->begin_unit_forward(unit);
    if (visit.what != What::kEnd) {
      enter(visit, Pass::kForward);
      compute(visit, Pass::kForward);
    }
    if (last[visit.unit] == k) {
      highest_.outside.activations += activations_[visit.unit].from_forward;
      highest_.look();
    }
    if (visit.what == What::kEnd) {
      engine_->end_unit_forward(unit);
      if (unit.communicators.post_forward != nullptr && unit.options.reshards_after_forward()) engine_->leave_now(unit);
    }
    note_moment();
  }
  first_of_backward_ = moment_;
  if (trigger_ == Trigger::kHooks) engine_->end_forward();
}

void PlannedSteps::backward(bool ends_step) {
  const auto alive = std::make_shared<char>();
  highest_.at("the beginning of backward");
  engine_->begin_backward(alive, engine::BackwardOf::kAllLeaves);
  std::vector<std::size_t> first(activations_.size());
  std::vector<std::size_t> last(activations_.size());
  for (std::size_t k = 0; k < passes_.backward.size(); ++k) last[passes_.backward[k].unit] = k;
  for (std::size_t k = passes_.backward.size(); k-- > 0;) first[passes_.backward[k].unit] = k;
  for (std::size_t k = 0; k < passes_.backward.size(); ++k) {
    const auto& visit = passes_.backward[k];
    auto& unit = *engine_->units()[visit.unit];
    const auto& [from_forward, recomputed] = activations_[visit.unit];
    highest_.at("backward of " + quoted(unit));
    const auto enters_at = trigger_ == Trigger::kHooks ? What::kBegin : What::kUse;
    const bool recomputes = first[visit.unit] == k && recomputed > 0;
    if (visit.what == enters_at && (visit.enters || recomputes)) enter(visit, Pass::kBackward);
    if (recomputes) {
      highest_.outside.activations += recomputed;
      highest_.look();
    }
    if (visit.what != What::kEnd) compute(visit, Pass::kBackward);
    for (const auto i : visit.gradients) {
      const auto compute = unit.formats[unit.layout.positions()[i].sub_buffer].compute;
      engine_->gradient(unit, i, at::empty(unit.parameters[i].shape, at::device(at::kMeta).dtype(compute)));
    }
    note_moment();
    if (last[visit.unit] == k) highest_.outside.activations -= from_forward + recomputed;
  }
  highest_.at("the end of backward");
  engine_->end_backward();
  if (ends_step && microbatches_.manual_finalization) engine_->finalize_backward(/*wait=*/true);
  const bool delivers = ends_step || !(microbatches_.leaves_reductions || microbatches_.manual_finalization);
  if (trigger_ == Trigger::kHooks && delivers) take_gradients();
  note_moment();
}

/// The hooks' users own the gradients. What comes later is added to those that they have.
void PlannedSteps::take_gradients() {
  for (const auto& unit : engine_->units()) {
    if (engine_->main().take_gradients(*unit).empty() || has_taken_[unit->place.index]) continue;
    has_taken_[unit->place.index] = true;
    (unit->offloaded() ? highest_.outside.host : highest_.outside.main_gradients) += unit->main_gradient.buffer.bytes;
  }
  highest_.look();
}

void PlannedSteps::drop_gradients() {
  engine_->main().zero_grad();
  highest_.outside.main_gradients = 0;
  for (const auto& unit : engine_->units()) {
    const bool taken = has_taken_[unit->place.index];
    has_taken_[unit->place.index] = false;
    if (taken && unit->offloaded()) highest_.outside.host -= unit->main_gradient.buffer.bytes;
  }
}

}  // namespace fsdp::planning
