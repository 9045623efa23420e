#include "plan/fsdp2_memory.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

namespace fsdp::planning {
namespace {

using engine::Unit;

/// True if FSDP2 has options to train the unit in this way.
bool has_counterpart(const Unit& unit) {
  const auto& options = unit.options;
  if (options.placements != Placements::optim_grads_params() || options.outer_sharded_optimizer) return false;
  if (options.offload == Offload::kOptimizerState || options.kept_by_budget) return false;
  if (!options.reshards_after_forward() && unit.place.index != 0) return false;  // How long FSDP2 then has its buffers is not known here.
  return std::ranges::all_of(unit.formats, [](const engine::SubBufferFormat& format) {
    return format.gather == nullptr && !format.extended && format.main_gradient == format.main;
  });
}

/// The bytes of a unit's tensors in FSDP2.
struct FSDP2Bytes {
  std::int64_t main = 0;             // the padded shards
  std::int64_t optimizer_state = 0;  // of the rows that this rank has
  std::int64_t gather_input = 0;     // this rank's part of a gather, if it has to be copied for it
  std::int64_t whole = 0;            // padded, as a gather fills it, and as parameters
  std::int64_t unordered = 0;        // what a gather of other dimensions than the first is rearranged from
  std::int64_t reduce_input = 0;     // padded, in the dtype that gradients travel in
  std::int64_t reduce_output = 0;    // this rank's part of it
  std::int64_t gradient = 0;         // the same in the dtype of the shards
  bool casts_gradient = false;
};

std::int64_t itemsize(at::ScalarType dtype) { return static_cast<std::int64_t>(c10::elementSize(dtype)); }

FSDP2Bytes sizes_of(const FSDP2Model& model, const Unit& unit) {
  const std::int64_t ranks = unit.communicators.gather->size();
  const std::int64_t rank = unit.communicators.gather->rank();
  const bool on_cpu = model.engine.options().mesh.device_type() == c10::kCPU;
  FSDP2Bytes sizes;
  for (std::size_t i = 0; i < unit.parameters.size(); ++i) {
    const auto& parameter = unit.parameters[i];
    const auto& position = unit.layout.positions()[i];
    const auto& format = unit.formats[position.sub_buffer];
    const auto dim = model.shard_dim ? model.shard_dim(unit.place.index, i) : 0;
    const std::int64_t rows = parameter.shape.empty() ? 1 : parameter.shape[static_cast<std::size_t>(dim)];
    if (rows == 0 || position.numel == 0) continue;
    const std::int64_t row = position.numel / rows;
    const std::int64_t chunk = (rows + ranks - 1) / ranks;  // as torch.chunk cuts
    const std::int64_t piece = chunk * row;
    sizes.main += piece * itemsize(format.main);
    if (format.compute != format.main || (unit.offloaded() && !on_cpu)) sizes.gather_input += piece * itemsize(format.compute);
    sizes.whole += piece * ranks * itemsize(format.compute);
    if (dim != 0) sizes.unordered += piece * ranks * itemsize(format.compute);
    if (!parameter.trainable) continue;
    const auto own = std::clamp<std::int64_t>(rows - rank * chunk, 0, chunk) * row;
    sizes.optimizer_state += model.optimizer_values * own * itemsize(format.main);
    sizes.reduce_input += piece * ranks * itemsize(format.wire_gradient);
    sizes.reduce_output += piece * itemsize(format.wire_gradient);
    sizes.gradient += piece * itemsize(format.main);
    sizes.casts_gradient = sizes.casts_gradient || format.wire_gradient != format.main;
  }
  return sizes;
}

/// What is there now, and when there was most.
class FSDP2Step {
 public:
  explicit FSDP2Step(const FSDP2Model& model) : model_(model), state_(model.engine.units().size()) {
    for (const auto& unit : units()) {
      auto& state = state_[unit->place.index];
      state.sizes = sizes_of(model, *unit);
      (unit->offloaded() ? now_.host : now_.main_parameters) += state.sizes.main;
      (unit->offloaded() ? now_.host : now_.optimizer_state) += state.sizes.optimizer_state;
    }
    found_ = {.peak = now_, .moment = "the beginning of a step"};
  }

  PlannedFSDP2 run() {
    forward();
    backward();
    found_.peak.host = now_.host;  // Gradients add up until backward ends.
    return found_;
  }

 private:
  struct State {
    FSDP2Bytes sizes;
    bool gathering = false;  // its gather has begun, ahead of its use
    bool present = false;
    bool in_backward = false;          // between its entry and its reduction
    bool reduced = false;              // in this backward
    bool input_has_gradient = false;   // so that autograd notifies FSDP2 when backward has left it
    bool output_has_gradient = false;  // so that backward comes to it
    std::int64_t kept = 0;             // neighbours' copy
    std::int64_t unreduced = 0;        // gradients that autograd has made
  };

  const std::vector<std::unique_ptr<Unit>>& units() const { return model_.engine.units(); }
  State& state(const Unit& unit) { return state_[unit.place.index]; }
  bool stays(const Unit& unit) const {
    return !unit.options.reshards_after_forward() || (model_.root_stays && unit.place.index == 0 && unit.place.parent == nullptr);
  }

  void look() {
    if (now_.device() > found_.peak.device()) found_ = {.peak = now_, .moment = moment_};
  }

  void begin_gather(const Unit& unit) {
    auto& one = state(unit);
    if (one.present || one.gathering || unit.communicators.gather->size() == 1) return;
    one.gathering = true;
    now_.communication += one.sizes.gather_input + one.sizes.whole;
    look();
    now_.communication -= one.sizes.gather_input;
  }

  /// A gather in forward keeps its buffer until the next one has been copied out.
  void end_gather(const Unit& unit, bool in_forward) {
    auto& one = state(unit);
    if (one.present) return;
    if (in_forward) release_previous();
    one.present = true;
    now_.gathered_parameters += one.sizes.whole - one.kept;
    one.kept = 0;
    now_.communication += one.sizes.unordered;
    look();
    now_.communication -= one.sizes.unordered;
    if (!one.gathering) return;  // one rank alone
    one.gathering = false;
    if (in_forward) {
      previous_ = one.sizes.whole;
    } else {
      now_.communication -= one.sizes.whole;
    }
  }

  void release_previous() { now_.communication -= std::exchange(previous_, 0); }

  void free_whole(const Unit& unit) {
    if (!std::exchange(state(unit).present, false)) return;
    now_.gathered_parameters -= state(unit).sizes.whole;
  }

  void leave(const Unit& unit) {
    moment_ = "forward of '" + unit.name + "'";
    order_.push_back(&unit);
    auto& one = state(unit);
    one.output_has_gradient = has_gradient_;
    if (!stays(unit)) {
      const auto& neighbours = unit.communicators.post_forward;
      if (neighbours != nullptr && one.present) {
        one.kept = one.sizes.whole / neighbours->size();
        now_.gathered_parameters += one.kept;
        look();
      }
      free_whole(unit);
    }
    now_.activations += model_.activations[unit.place.index];
    look();
  }

  void forward() {
    std::vector<const Unit*> running;
    const auto leave_last = [&] {
      leave(*running.back());
      running.pop_back();
    };
    for (const auto& visit : model_.passes.forward) {
      const auto& unit = *units()[visit.unit];
      while (!running.empty() && !engine::encloses(*running.back(), unit)) leave_last();
      if (running.empty() || running.back() != &unit) enter(unit, running);
      has_gradient_ = has_gradient_ || !visit.gradients.empty();
      if (visit.what == Visit::What::kEnd) leave_last();
    }
    while (!running.empty()) leave_last();
    release_previous();
  }

  /// With the units around it that have not begun.
  void enter(const Unit& unit, std::vector<const Unit*>& running) {
    const auto* parent = unit.place.parent;
    if (parent != nullptr && std::ranges::find(running, parent) == running.end()) enter(*parent, running);
    moment_ = "forward of '" + unit.name + "'";
    state(unit).input_has_gradient = has_gradient_;
    begin_gather(unit);
    end_gather(unit, /*in_forward=*/true);
    running.push_back(&unit);
  }

  /// Backward comes to the unit: it is gathered, and the one that forward left before it is gathered ahead.
  void enter_backward(const Unit& unit) {
    const auto place = std::find(order_.rbegin(), order_.rend(), &unit);
    if (place == order_.rend() || !state(unit).output_has_gradient) return;
    if (std::exchange(state(unit).in_backward, true)) return;
    begin_gather(unit);
    end_gather(unit, /*in_forward=*/false);
    if (std::next(place) != order_.rend()) begin_gather(**std::next(place));
    order_.erase(std::prev(place.base()));
  }

  void reduce(const Unit& unit) {
    auto& one = state(unit);
    one.reduced = true;
    one.in_backward = false;
    free_whole(unit);
    now_.communication -= std::exchange(reduced_from_, 0);
    if (one.unreduced == 0) return;
    const auto& sizes = one.sizes;
    now_.communication += sizes.reduce_input;
    look();
    now_.unreduced_gradients -= std::exchange(one.unreduced, 0);
    now_.communication += sizes.reduce_output;
    look();
    if (sizes.casts_gradient) {
      now_.main_gradients += sizes.gradient;
      look();
      // With replicas, its all-reduce may be under way, and it stays until backward ends.
      if (unit.communicators.outer == nullptr) now_.communication -= sizes.reduce_output;
    } else {
      now_.communication -= sizes.reduce_output;
      now_.main_gradients += sizes.gradient;
    }
    if (unit.offloaded()) {
      now_.main_gradients -= sizes.gradient;
      now_.host += sizes.gradient;
    }
    reduced_from_ = sizes.reduce_input;
  }

  void backward() {
    const auto& visits = model_.passes.backward;
    std::vector<std::size_t> last(state_.size());
    for (std::size_t k = 0; k < visits.size(); ++k) last[visits[k].unit] = k;
    moment_ = "the beginning of backward";
    if (!order_.empty()) enter_backward(*order_.back());
    for (std::size_t k = 0; k < visits.size(); ++k) {
      const auto& unit = *units()[visits[k].unit];
      moment_ = "backward of '" + unit.name + "'";
      enter_backward(unit);
      for (const auto i : visits[k].gradients) {
        const auto& position = unit.layout.positions()[i];
        const auto bytes = position.numel * itemsize(unit.formats[position.sub_buffer].compute);
        state(unit).unreduced += bytes;
        now_.unreduced_gradients += bytes;
      }
      look();
      if (last[visits[k].unit] != k) continue;
      if (state(unit).input_has_gradient) reduce(unit);
      now_.activations -= model_.activations[unit.place.index];
    }
    moment_ = "the end of backward";
    for (const auto& unit : units()) {
      if (!state(*unit).reduced) reduce(*unit);
    }
  }

  const FSDP2Model& model_;
  std::vector<State> state_;
  PlanBytes now_;
  PlannedFSDP2 found_;
  std::string moment_;
  bool has_gradient_ = false;       // what forward has computed so far
  std::vector<const Unit*> order_;  // in which forward has left the units
  std::int64_t previous_ = 0;       // the buffer of the last gather in forward
  std::int64_t reduced_from_ = 0;   // the buffer of the last reduction
};

}  // namespace

std::optional<PlannedFSDP2> fsdp2_memory(const FSDP2Model& model) {
  const auto& options = model.engine.options();
  if (options.keep_gathered_bytes > 0) return std::nullopt;
  if (!std::ranges::all_of(model.engine.units(), [](const auto& unit) { return has_counterpart(*unit); })) return std::nullopt;
  return FSDP2Step(model).run();
}

}  // namespace fsdp::planning
