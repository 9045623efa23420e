#include "plan/budget.h"

#include <algorithm>
#include <utility>

#include "fsdp/error.h"

namespace fsdp::planning {
namespace {

/// Plans made to find a set of kept units. Where units have a few sizes, the first or second one fits.
constexpr int kMostPlans = 32;

std::string bytes_text(std::int64_t bytes) { return std::to_string(bytes) + " bytes"; }

std::string options_text(const Budget& budget, const Choice& choice) {
  return "prefetch_depth " + std::to_string(choice.prefetch_depth) +
         (choice.offloads_optimizer_state ? " and " + budget.offload_option : "");
}

/// The options without kept units, the least costly first.
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
  std::vector<std::int64_t> numbers{observed.most};
  numbers.insert(numbers.end(), observed.loads.begin(), observed.loads.end());
  for (const auto& unit : observed.units) numbers.insert(numbers.end(), {unit.bytes, unit.saved});
  numbers = budget.largest(std::move(numbers));
  auto next = numbers.begin();
  observed.most = *next++;
  for (auto& load : observed.loads) load = *next++;
  for (auto& unit : observed.units) {
    unit.bytes = *next++;
    unit.saved = *next++;
  }
  return observed;
}

struct Kept {
  std::vector<bool> units;
  std::int64_t saved = 0;
  Observed observed;
};

/// Goes through the sets that save most under smaller and smaller peaks, until a plan says that one fits. The sets are the same for all
/// budgets, so a smaller budget stops at the same one, or later.
Kept keep(const Budget& budget, const Choice& choice, const Observed& nothing_kept) {
  auto limit = budget.bytes;
  for (int k = 0; k < kMostPlans; ++k) {
    auto found = choose_kept(nothing_kept.loads, nothing_kept.units, limit);
    if (found.saved == 0) break;
    auto with = choice;
    with.kept = found.kept;
    auto observed = observe(budget, with);
    if (observed.most <= budget.bytes) return {.units = std::move(found.kept), .saved = found.saved, .observed = std::move(observed)};
    limit = found.peak - 1;
  }
  return {.units = {}, .saved = 0, .observed = nothing_kept};
}

std::string names_of(const std::vector<bool>& kept, const Observed& observed) {
  constexpr std::size_t kMostNames = 8;
  std::string names;
  std::size_t count = 0;
  for (std::size_t k = 0; k < kept.size(); ++k) {
    if (!kept[k] || ++count > kMostNames) continue;
    names += (names.empty() ? "'" : ", '") + observed.plan.units[k].name + "'";
  }
  return names + (count > kMostNames ? ", and " + std::to_string(count - kMostNames) + " more" : "");
}

/// `tried`: the choices before this one, with what they need.
std::string explanation(const Budget& budget, const Choice& choice, const Kept& kept,
                        const std::vector<std::pair<Choice, std::int64_t>>& tried) {
  const auto& [units, saved, observed] = kept;
  std::string text = "memory_budget: " + bytes_text(budget.bytes) + ", of which a step needs at most " + bytes_text(observed.most) +
                     ", in " + observed.plan.moment + "\n";
  text += "prefetch_depth: " + std::to_string(choice.prefetch_depth);
  text += choice.prefetch_depth == budget.given.prefetch_depth
              ? ", as given\n"
              : ", because " + options_text(budget, tried[0].first) + " needs " + bytes_text(tried[0].second) + "\n";
  if (choice.offloads_optimizer_state && !budget.given.offloads_optimizer_state) {
    const auto& [before, bytes] = tried[static_cast<std::size_t>(budget.given.prefetch_depth)];  // the last one without offload
    text += "optimizer state: offloaded, because without it " + options_text(budget, before) + " needs " + bytes_text(bytes) + "\n";
  } else {
    text +=
        std::string("optimizer state: ") + (choice.offloads_optimizer_state ? "offloaded, as given\n" : "on the device, where it fits\n");
  }
  const auto count = std::ranges::count(units, true);
  const auto can = std::ranges::count_if(observed.units, [](const Keepable& unit) { return unit.saved > 0; }) + count;
  if (count == 0) {
    text += "kept from forward into backward: no unit" + std::string(can == 0 ? ", because none is gathered twice" : ", because none fits");
  } else {
    text += "kept from forward into backward: " + names_of(units, observed) + " (" + std::to_string(count) + " of " + std::to_string(can) +
            " that are gathered twice), which saves " + bytes_text(saved) + " of all-gathers in each step";
  }
  return text + "\n";
}

}  // namespace

Chosen choose(const Budget& budget) {
  std::vector<std::pair<Choice, std::int64_t>> tried;
  Chosen least;
  for (auto& choice : choices_of(budget)) {
    const auto observed = observe(budget, choice);
    if (observed.most <= budget.bytes) {
      const auto kept = keep(budget, choice, observed);
      choice.kept = kept.units;
      return {.choice = choice,
              .fits = true,
              .bytes = kept.observed.most,
              .moment = kept.observed.plan.moment,
              .explanation = explanation(budget, choice, kept, tried)};
    }
    if (tried.empty() || observed.most < least.bytes) {
      least = {.choice = choice, .fits = false, .bytes = observed.most, .moment = observed.plan.moment, .explanation = {}};
    }
    tried.emplace_back(choice, observed.most);
  }
  return least;
}

std::string too_small(const Budget& budget, const Chosen& least, const std::vector<Remedy>& remedies) {
  auto text = "memory_budget " + bytes_text(budget.bytes) + " is too small by " + bytes_text(least.bytes - budget.bytes) + ": even with " +
              options_text(budget, least.choice) + " and no unit kept, a rank needs " + bytes_text(least.bytes) + ", in " + least.moment;
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
