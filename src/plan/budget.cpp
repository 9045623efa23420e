#include "plan/budget.h"

#include <algorithm>
#include <utility>

#include "base/text.h"
#include "fsdp/error.h"

namespace fsdp::planning {
namespace {

/// Plans made to find what stays. Where units have a few sizes, the first or second one fits.
constexpr int kMostPlans = 32;

std::string options_text(const Budget& budget, const Choice& choice) {
  return "prefetch_depth " + std::to_string(choice.prefetch_depth) +
         (std::ranges::count(choice.recomputed, true) > 0 ? ", all recomputed that may be" : "") +
         (choice.offloads_optimizer_state ? " and " + budget.offload_option : "");
}

/// The options without kept or recomputed units, the least costly first.
std::vector<Choice> choices_of(const Budget& budget) {
  std::vector<Choice> choices;
  for (const bool offloads : {false, true}) {
    if (offloads && !budget.may_offload) continue;
    for (int depth = budget.given.prefetch_depth; depth >= 0; --depth) {
      choices.push_back({.prefetch_depth = depth, .offloads_optimizer_state = offloads || budget.given.offloads_optimizer_state});
    }
  }
  return choices;
}

/// Plans, with the numbers of the ranks that need most.
Observed observe(const Budget& budget, const Choice& choice) {
  auto observed = budget.observe(choice);
  if (!budget.largest) return observed;
  std::vector<std::int64_t*> numbers{&observed.most};
  for (auto* stays : {&observed.parameters, &observed.activations}) {
    for (auto& load : stays->loads) numbers.push_back(&load);
    for (auto& unit : stays->units) numbers.insert(numbers.end(), {&unit.bytes, &unit.saved});
  }
  std::vector<std::int64_t> values;
  for (const auto* number : numbers) values.push_back(*number);
  values = budget.largest(std::move(values));
  for (std::size_t i = 0; i < numbers.size(); ++i) *numbers[i] = values[i];
  return observed;
}

/// A choice, and what its steps have shown.
struct PlannedChoice {
  Choice choice;
  Observed observed;
  std::int64_t saved = 0;  ///< By what stays.
};

/// Goes through the sets that save most under smaller and smaller peaks, until a plan shows that one fits; otherwise nothing stays. The
/// sets are the same for all budgets, so a smaller budget stops at the same one, or later. `with` makes the choice that has a set.
PlannedChoice choose_what_stays(const Budget& budget, const MayStay& may_stay, PlannedChoice without,
                                const std::function<Choice(const std::vector<bool>& stays)>& with) {
  auto limit = budget.bytes;
  for (int k = 0; k < kMostPlans; ++k) {
    const auto found = choose_kept(may_stay.loads, may_stay.units, limit);
    if (found.saved == 0) break;
    auto choice = with(found.kept);
    auto observed = observe(budget, choice);
    if (observed.most <= budget.bytes) return {.choice = std::move(choice), .observed = std::move(observed), .saved = found.saved};
    limit = found.peak - 1;
  }
  return without;
}

/// The fewest units recompute with which this choice fits; all that may, if it does not fit.
PlannedChoice recompute(const Budget& budget, Choice choice) {
  choice.recomputed = budget.recomputable;
  PlannedChoice all{.choice = choice, .observed = observe(budget, choice)};
  for (std::size_t k = 0; k < choice.recomputed.size(); ++k) {
    // It would free nothing.
    if (all.observed.activations.units[k].bytes == 0) all.choice.recomputed[k] = choice.recomputed[k] = false;
  }
  if (all.observed.most > budget.bytes) return all;
  const auto may_stay = all.observed.activations;
  return choose_what_stays(budget, may_stay, std::move(all), [&](const std::vector<bool>& stays) {
    auto with = choice;
    for (std::size_t k = 0; k < stays.size(); ++k) with.recomputed[k] = with.recomputed[k] && !stays[k];
    return with;
  });
}

/// The units are kept that save most.
PlannedChoice keep(const Budget& budget, PlannedChoice without) {
  const auto may_stay = without.observed.parameters;
  const auto choice = without.choice;
  return choose_what_stays(budget, may_stay, std::move(without), [&](const std::vector<bool>& stays) {
    auto with = choice;
    with.kept = stays;
    return with;
  });
}

std::string names_of(const std::vector<bool>& kept, const Observed& observed) {
  constexpr std::size_t kMostNames = 8;
  std::vector<std::string> names;
  for (std::size_t k = 0; k < kept.size(); ++k) {
    if (kept[k]) names.push_back(in_quotes(observed.plan.units[k].name));
  }
  return first_names(names, kMostNames);
}

/// `tried`: the choices before this one, with what they need. `unless_recomputed`: what this one needs if nothing is recomputed.
std::string explanation(const Budget& budget, const PlannedChoice& planned, std::int64_t unless_recomputed,
                        const std::vector<std::pair<Choice, std::int64_t>>& tried) {
  const auto& [choice, observed, saved] = planned;
  const auto& units = choice.kept;
  std::string text = "memory_budget: " + bytes_text(budget.bytes) + ", of which a step needs at most " + bytes_text(observed.most) +
                     ", in " + observed.plan.moment + "\n";
  text += "prefetch_depth: " + std::to_string(choice.prefetch_depth);
  text += choice.prefetch_depth == budget.given.prefetch_depth
              ? ", as given\n"
              : ", because " + options_text(budget, tried[0].first) + " needs " + bytes_text(tried[0].second) + "\n";
  if (!budget.accumulation.empty()) text += "gradients: " + budget.accumulation + "\n";
  if (choice.offloads_optimizer_state && !budget.given.offloads_optimizer_state) {
    const auto& [before, bytes] = tried[static_cast<std::size_t>(budget.given.prefetch_depth)];  // the last one without offload
    text += "optimizer state: offloaded, because without it " + options_text(budget, before) + " needs " + bytes_text(bytes) + "\n";
  } else {
    text += std::string("optimizer state: ") + (choice.offloads_optimizer_state ? "offloaded already\n" : "on the device, where it fits\n");
  }
  const auto may_recompute = std::ranges::count(budget.recomputable, true);
  if (const auto recomputed = std::ranges::count(choice.recomputed, true); recomputed > 0) {
    text += "recomputed in backward: " + names_of(choice.recomputed, observed) + " (" + std::to_string(recomputed) + " of " +
            std::to_string(may_recompute) + " that may be), because without it prefetch_depth " + std::to_string(choice.prefetch_depth) +
            " needs " + bytes_text(unless_recomputed) + "\n";
  } else if (may_recompute > 0) {
    text += "recomputed in backward: no unit, because all activations fit\n";
  }
  const auto count = std::ranges::count(units, true);
  const auto can = std::ranges::count_if(observed.parameters.units, [](const Keepable& unit) { return unit.saved > 0; }) + count;
  if (count == 0) {
    text += "kept from forward into backward: no unit" + std::string(can == 0 ? ", because none is gathered twice" : ", because none fits");
  } else {
    text += "kept from forward into backward: " + names_of(units, observed) + " (" + std::to_string(count) + " of " + std::to_string(can) +
            " that are gathered twice), which saves " + bytes_text(saved) + " of all-gathers in each backward";
  }
  return text + "\n";
}

}  // namespace

std::string accumulation_text(const Microbatches& microbatches, bool reduced) {
  if (microbatches.count == 1) return "";
  return std::string("those of several backwards add up") + (reduced ? "" : ", unreduced until the last one");
}

Chosen choose(const Budget& budget) {
  std::vector<std::pair<Choice, std::int64_t>> tried;
  Chosen least;
  const bool may_recompute = std::ranges::count(budget.recomputable, true) > 0;
  for (const auto& choice : choices_of(budget)) {
    PlannedChoice planned{.choice = choice, .observed = observe(budget, choice)};
    const auto unless_recomputed = planned.observed.most;
    if (unless_recomputed > budget.bytes && may_recompute) planned = recompute(budget, choice);
    const auto needed = planned.observed.most;
    if (needed <= budget.bytes) {
      planned = keep(budget, std::move(planned));
      return {.choice = planned.choice,
              .fits = true,
              .bytes = planned.observed.most,
              .moment = planned.observed.plan.moment,
              .explanation = explanation(budget, planned, unless_recomputed, tried)};
    }
    if (tried.empty() || needed < least.bytes) {
      least = {.choice = planned.choice, .fits = false, .bytes = needed, .moment = planned.observed.plan.moment, .explanation = {}};
    }
    tried.emplace_back(planned.choice, needed);
  }
  return least;
}

std::string too_small(const Budget& budget, const Chosen& least, const std::vector<Remedy>& remedies) {
  auto text = "memory_budget " + bytes_text(budget.bytes) + " is too small by " + bytes_text(least.bytes - budget.bytes) + ": even with " +
              options_text(budget, least.choice) + " and no unit kept, a rank needs " + bytes_text(least.bytes) + ", in " + least.moment;
  if (!budget.accumulation.empty()) text += "; of gradients, " + budget.accumulation;
  std::string best;
  auto fewest = least.bytes;
  for (const auto& [option, bytes_with] : remedies) {
    std::int64_t bytes = 0;
    try {
      bytes = bytes_with();
    } catch (const Error&) {
      continue;  // It can't be had: a parameter, for example, does not divide by so many ranks.
    }
    if (bytes <= budget.bytes) return text + "; it fits with " + option + ", which needs " + bytes_text(bytes);
    if (bytes >= fewest) continue;
    fewest = bytes;
    best = option;
  }
  if (best.empty()) return text + "; make smaller units, or give " + bytes_text(least.bytes);
  return text + "; " + best + " helps most, but needs " + bytes_text(fewest) + ": combine it with more ranks or smaller units";
}

}  // namespace fsdp::planning
