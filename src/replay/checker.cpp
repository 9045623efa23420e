#include "replay/checker.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <exception>
#include <string>
#include <utility>

#include "engine/observation.h"
#include "fsdp/error.h"
#include "replay/digest.h"

namespace fsdp::replay {

using engine::Observation;
using engine::ObservationOf;

namespace {

constexpr comm::Label kPassing = {.operation = "batch for a check", .unit = {}};
constexpr std::size_t kShown = 3;  // lines of an error

/// Passes each rank's bytes on to the rank `shift` places behind it in the row. Returns those that have come to this rank.
at::Tensor pass_on(comm::Communicator& row, const at::Tensor& bytes, int shift, c10::Device device) {
  const auto sizes = row.exchange(at::full({1}, bytes.numel(), at::kLong), kPassing);
  const int size = row.size();
  const auto at_zero = at::empty({0}, at::device(device).dtype(at::kByte));
  at::Tensor received;
  // One after the other: together they would hold as many staging buffers as there are ranks.
  for (int root = 0; root < size; ++root) {
    const int target = (root + shift) % size;
    comm::ScatterPart part{.shards = {}, .into = at_zero};
    if (root == row.rank()) {
      part.shards.assign(static_cast<std::size_t>(size), at_zero);
      part.shards[static_cast<std::size_t>(target)] = bytes.to(device);
    }
    if (target == row.rank()) part.into = received = at::empty({sizes[root].item<std::int64_t>()}, at_zero.options());
    row.scatter(std::span(&part, 1), root, kPassing)->wait();
  }
  row.confirm();
  return received.cpu();
}

std::string lines_text(const std::vector<std::string>& lines) {
  std::string text;
  for (const auto& line : lines) text += line + "\n";
  return text;
}

/// The lines that any rank has, each once, on all ranks.
std::vector<std::string> united(const comm::Ranks& ranks, const std::vector<std::string>& lines) {
  constexpr comm::Label kFindings = {.operation = "findings of a check", .unit = {}};
  if (ranks.agree(lines.empty(), kFindings)) return {};
  std::vector<std::string> all;
  std::string text;
  for (const auto& of_rank : ranks.gather(lines_text(lines), kFindings)) {
    for (std::size_t at = 0; at < of_rank.size();) {
      const auto end = of_rank.find('\n', at);
      const auto line = of_rank.substr(at, end - at);
      at = end + 1;
      if (std::find(all.begin(), all.end(), line) == all.end()) all.push_back(line);
    }
  }
  text = ranks.broadcast(lines_text(all), kFindings);
  all.clear();
  for (std::size_t at = 0; at < text.size();) {
    const auto end = text.find('\n', at);
    all.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return all;
}

[[noreturn]] void refuse(const std::vector<std::string>& lines) {
  std::string text = "ReplayCheck: data were corrupted in this microbatch:";
  for (std::size_t i = 0; i < std::min(lines.size(), kShown); ++i) text += "\n  " + lines[i];
  if (lines.size() > kShown) text += "\n  and " + std::to_string(lines.size() - kShown) + " more";
  throw Error(
      text +
      "\nBuffers and generators are as before it; gradients are not to be trusted: call zero_grad() and repeat the step without the "
      "rank's device or memory, or load a checkpoint if main parameters have changed");
}

}  // namespace

std::vector<std::int64_t> Checker::main_digests() const {
  const at::NoGradGuard no_grad;
  std::vector<std::int64_t> found;
  for (const auto& unit : engine_->units()) {
    std::int64_t all = 0;
    for (std::size_t k = 0; k < unit->main.parts.size(); ++k) {
      if (!unit->formats[k].extended) all = with_digest(all, digest(unit->main.parts[k]), k);
    }
    found.push_back(all);
  }
  return found;
}

void Checker::remember_parameters() {
  engine_->main().flush_writes();
  remembered_ = main_digests();
}

/// See MainTestimony.
std::vector<std::int64_t> Checker::as_gathered(const engine::Unit& unit) const {
  const auto pieces = unit.main_pieces().count;
  std::vector<std::int64_t> all(static_cast<std::size_t>(pieces), 0);
  for (std::size_t k = 0; k < unit.main.parts.size(); ++k) {
    const auto& format = unit.formats[k];
    if (format.extended || format.gather) continue;
    const auto found = digests(unit.main.parts[k].to(engine_->options().device()).to(format.compute), pieces);
    for (std::size_t piece = 0; piece < found.size(); ++piece) all[piece] = with_digest(all[piece], found[piece], k);
  }
  return all;
}

std::vector<MainTestimony> Checker::look_at_main() const {
  const at::NoGradGuard no_grad;
  const auto now = main_digests();
  std::vector<MainTestimony> main(now.size());
  for (std::size_t k = 0; k < now.size(); ++k) {
    main[k].remembered_differs = !remembered_.empty() && remembered_[k] != now[k];
    main[k].as_gathered = as_gathered(*engine_->units()[k]);
  }
  return main;
}

/// The ranks that repeat each other's microbatches: those that have all units in common.
comm::Communicator& Checker::row() const {
  comm::Communicator* smallest = engine_->units().front()->communicators.gather.get();
  for (const auto& unit : engine_->units()) {
    if (unit->communicators.gather->size() < smallest->size()) smallest = unit->communicators.gather.get();
  }
  const auto& outer = engine_->units().front()->communicators.outer;
  return smallest->is_alone() && outer && engine_->units().front()->communicators.gather.get() == smallest ? *outer : *smallest;
}

/// A batch with what its computation depends on. Buffers travel only if they are not the same on all ranks.
at::Tensor Checker::message(const at::Tensor& batch, MicrobatchState before) const {
  std::int64_t all = 0;
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < before.buffers.size(); ++i) {
    all = with_digest(all, digest(before.buffers[i].contiguous()), i);
    bytes += static_cast<std::int64_t>(before.buffers[i].nbytes());
  }
  bool same = true;
  engine_->main().exclusively([&] {
    const auto others = row().exchange(at::tensor({all, bytes}, at::kLong), kPassing);
    // On all ranks alike: where two differ, each rank differs from one.
    same = others.select(1, 0).eq(all).all().item<bool>();
    if (!others.select(1, 1).eq(bytes).all().item<bool>()) {
      throw Error("ReplayCheck: another rank's buffers have other sizes than this rank's " + std::to_string(bytes) +
                  " bytes; the buffers of a model need the same shapes on all ranks");
    }
  });
  if (same) before.buffers.clear();
  const auto carries = at::full({1}, same ? 0 : 1, at::kByte);
  return at::cat({carries, packed(batch, before)});
}

/// Runs the microbatch of the rank `shift` places before this one, and puts the state back.
Repetition Checker::repeat(const Microbatch& run, const OwnMicrobatch& own, int shift, MicrobatchRecord& record) const {
  const auto device = engine_->options().device();
  const auto buffers = buffers_();
  const auto now = copy_state(device, buffers);
  at::Tensor theirs = own.message;
  std::int64_t origin = 0;
  engine_->main().exclusively([&] {
    const at::NoGradGuard no_grad;
    auto& ranks = row();
    const auto global = ranks.exchange(at::full({1}, engine_->options().mesh.rank(), at::kLong), kPassing);
    const int from = (ranks.rank() - shift % ranks.size() + ranks.size()) % ranks.size();
    origin = global[from].item<std::int64_t>();
    if (from != ranks.rank()) theirs = pass_on(ranks, own.message, shift, device);
  });
  auto like = now;
  if (theirs[0].item<std::uint8_t>() == 0) like.buffers.clear();
  auto [batch, before] = unpacked(theirs.narrow(0, 1, theirs.numel() - 1), like);
  if (like.buffers.empty()) before.buffers = own.before.buffers;  // The same on all ranks: they did not travel.
  try {
    put_back(before, device, buffers);
    const Observation observation(*engine_, record, ObservationOf::kRehearsal);
    run(batch);
  } catch (...) {
    try {
      put_back(now, device, buffers);
    } catch (const std::exception&) {
      // The first failure has the reason, for example a device that has failed.
    }
    throw;
  }
  put_back(now, device, buffers);
  return {.origin = origin, .record = record};
}

/// One for each set of units on the same ranks.
std::vector<RankComparison> Checker::compare(const Testimony& testimony) const {
  std::vector<std::vector<std::size_t>> neighbours;
  for (std::size_t k = 0; k < testimony.units.size(); ++k) {
    const auto& mine = testimony.units[k]->communicators;
    const auto same = std::find_if(neighbours.begin(), neighbours.end(), [&](const auto& others) {
      const auto& theirs = testimony.units[others.front()]->communicators;
      return theirs.gather == mine.gather && theirs.outer == mine.outer;
    });
    (same == neighbours.end() ? neighbours.emplace_back() : *same).push_back(k);
  }
  std::vector<RankComparison> comparisons;
  for (auto& units : neighbours) comparisons.emplace_back(testimony, std::move(units), engine_->options().mesh.rank());
  return comparisons;
}

void Checker::check(const Microbatch& run, const at::Tensor& batch) {
  auto main = engine_->main();
  main.flush_writes();
  const auto device = engine_->options().device();
  const auto buffers = buffers_();
  OwnMicrobatch microbatch{.before = copy_state(device, buffers), .message = {}};
  const std::span<const std::unique_ptr<engine::Unit>> units = engine_->units();
  auto seen = look_at_main();
  const auto main_before = main_digests();
  remembered_.clear();
  microbatch.message = message(batch, microbatch.before);

  MicrobatchRecord own(units, Reductions::kTwice);
  {
    const Observation observation(*engine_, own, ObservationOf::kTraining);
    run(batch);
    main.finish_gradient_sync();
  }
  main.flush_writes();
  const auto main_after = main_digests();
  for (std::size_t k = 0; k < seen.size(); ++k) seen[k].changed = main_after[k] != main_before[k];

  const comm::Ranks everyone(engine_->options().mesh);
  const Testimony testimony{.units = units, .main = std::move(seen), .own = own};
  MicrobatchRecord first(units, Reductions::kOnce);
  const auto repetition = repeat(run, microbatch, 1, first);
  std::vector<std::string> lines;
  std::vector<RankComparison> comparisons;
  bool disputed = false;
  main.exclusively([&] {
    comparisons = compare(testimony);
    for (auto& comparison : comparisons) {
      for (auto& line : comparison.compare_data()) lines.push_back(std::move(line));
      disputed = comparison.adds_dispute(repetition) || disputed;
    }
    lines = united(everyone, lines);
    disputed = !everyone.agree(!disputed, kPassing);
  });
  if (lines.empty() && disputed) {
    // A third rank repeats it. Where there is none, both ranks do it twice.
    const std::vector<int> shifts = row().size() >= 3 ? std::vector<int>{2} : std::vector<int>{0, 1};
    for (const int shift : shifts) {
      MicrobatchRecord record(units, Reductions::kOnce);
      const auto again = repeat(run, microbatch, shift, record);
      main.exclusively([&] {
        for (auto& comparison : comparisons) comparison.adds_dispute(again);
      });
    }
    for (const auto& comparison : comparisons) {
      if (auto line = comparison.settle_dispute()) lines.push_back(std::move(*line));
    }
    main.exclusively([&] { lines = united(everyone, lines); });
  }
  if (lines.empty()) return;
  put_back(microbatch.before, device, buffers);
  refuse(lines);
}

}  // namespace fsdp::replay
