#include "plan_advice.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "base/classic_stream.h"
#include "base/text.h"

namespace fsdp::tools {
namespace {

/// Options that a user may change, and what they change.
struct Variant {
  const char* option;
  const char* why;
  std::function<bool(PlanQuestion&)> apply;  ///< False if the options are so already.
};

constexpr const char* kAllSharded = "optim_grads_params";

template <typename Value>
std::function<bool(PlanQuestion&)> set(Value PlanQuestion::*member, Value value) {
  return [member, value](PlanQuestion& options) { return std::exchange(options.*member, value) != value; };
}

std::int64_t sent_by(const Plan& plan) { return plan.wire.all_gather_bytes + plan.wire.reduce_scatter_bytes; }

}  // namespace

std::string recommendations(const PlanQuestion& question, const ModelShapes& model, const Plan& plan) {
  const auto memory = question.memory;
  const bool fits = plan.fits(memory);
  const std::vector<Variant> less_memory = {
      {"without --keep", "units are gathered once more, for backward",
       [](PlanQuestion& changed) { return std::exchange(changed.keeps, false) | (std::exchange(changed.keep_gathered, 0) != 0); }},
      {"with --split-root", "the embedding and the head are gathered when they are used", set(&PlanQuestion::splits_root, true)},
      {"with --placements optim_grads_params", "parameters are sharded, too", set<std::string>(&PlanQuestion::placements, kAllSharded)},
      {"with --param-dtype bf16", "gathered parameters take half as much", set<std::string>(&PlanQuestion::param_dtype, "bf16")},
      {"with --prefetch 0", "no unit is gathered ahead, so ranks wait for gathers", set(&PlanQuestion::prefetch, 0)},
      {"with --hfsdp", "replicas share the main parameters and the optimizer's state",
       [](PlanQuestion& changed) {
         return changed.replicas > 1 && changed.placements == kAllSharded && !std::exchange(changed.shards_over_replicas, true);
       }},
      {"with --replicas 1", "all ranks share one copy of the model",
       [](PlanQuestion& changed) {
         changed.shards_over_replicas = false;
         return std::exchange(changed.replicas, 1) != 1;
       }},
      {"with --offload state", "the optimizer's state is in host memory, and the CPU updates",
       set<std::string>(&PlanQuestion::offload, "state")},
      {"with --offload all", "main parameters and gradients are in host memory, too", set<std::string>(&PlanQuestion::offload, "all")},
  };
  const std::vector<Variant> less_sent = {
      {"with --keep", "units are gathered once in a step", set(&PlanQuestion::keeps, true)},
      {"with --offload none", "the device updates, without copies to the host", set<std::string>(&PlanQuestion::offload, "none")},
      {"with --reduce-dtype bf16", "gradients are sent in half as many bytes, and rounded",
       [](PlanQuestion& changed) {
         // What is computed in it is sent in it anyway.
         return changed.param_dtype != "bf16" && std::exchange(changed.reduce_dtype, "bf16") != "bf16";
       }},
  };
  const auto plan_of = [&](const PlanQuestion& tried) {
    return fsdp::plan(*model.module, sharding(tried, model, tried.ranks), step(tried, model));
  };
  ClassicStream<std::ostringstream> text;
  if (fits) {
    for (const auto& [option, why, apply] : less_sent) {
      auto tried = question;
      if (!apply(tried)) continue;
      const auto planned = plan_of(tried);
      if (!planned.fits(memory)) continue;
      text << "It also fits " << option << ", in " << size_text(planned.peak.device()) << ": " << why;
      if (sent_by(planned) < sent_by(plan)) text << "; a rank sends " << size_text(sent_by(plan) - sent_by(planned)) << " less";
      text << ".\n";
    }
    return text.str();
  }
  // What is not enough alone may be enough together.
  const auto with = [&](const std::vector<Variant>& variants) {
    auto tried = question;
    for (const auto& variant : variants) variant.apply(tried);
    return plan_of(tried);
  };
  std::vector<Variant> chosen;
  auto all = question;
  for (const auto& variant : less_memory) {
    if (!variant.apply(all)) continue;
    chosen.push_back(variant);
    if (!plan_of(all).fits(memory)) continue;
    for (std::size_t k = 0; k + 1 < chosen.size();) {  // Some may be needless with those after them.
      auto fewer = chosen;
      fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(k));
      if (with(fewer).fits(memory)) {
        chosen = fewer;
      } else {
        ++k;
      }
    }
    text << "It fits in " << size_text(with(chosen).peak.device());
    for (const auto& [option, why, apply] : chosen)
      text << (&option == &chosen.front().option ? " " : ", ") << option << " (" << why << ")";
    text << ".\n";
    break;
  }
  return text.str();
}

}  // namespace fsdp::tools
