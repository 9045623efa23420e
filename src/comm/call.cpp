#include "comm/call.h"

#include <span>
#include <string_view>
#include <type_traits>

#include "base/stable_hash.h"
#include "base/text.h"

namespace fsdp::comm {
namespace {

/// Returns the first setting in which a text differs from another.
std::string_view first_other(std::string_view text, std::string_view other) {
  constexpr std::string_view kBetween = ", ";
  while (true) {
    const auto end = text.find(kBetween), end_of_other = other.find(kBetween);
    const auto setting = text.substr(0, end);
    if (setting != other.substr(0, end_of_other) || end == std::string_view::npos) return setting;
    if (end_of_other == std::string_view::npos) return text.substr(end + kBetween.size());
    text.remove_prefix(end + kBetween.size());
    other.remove_prefix(end_of_other + kBetween.size());
  }
}

/// Copies as much of the text as there is room for. A hash replaces the rest, so that differences in it are noticed.
void copy_updates(std::string_view updates, std::uint64_t hash, std::span<char> into) {
  if (updates.size() < into.size()) {
    updates.copy(into.data(), into.size());
    return;
  }
  const std::string rest = std::string(", and others (hash ").append(std::to_string(hash)).append(")");
  updates.copy(into.data(), into.size() - 1 - rest.size());
  rest.copy(into.data() + into.size() - 1 - rest.size(), rest.size());
}

// Describes a call with only those details that show the difference to the other one.
std::string describe(const Call& call, const Call& other) {
  std::string text = "#";  // Not + of a temporary: GCC 12 warns of an overflow in it (its bug 105651).
  text.append(std::to_string(call.number)).append(" ").append(call.operation);
  const std::string_view unit = call.unit;
  text.append(of_unit(unit));
  if (std::string_view(call.operation) != other.operation || unit != other.unit || call.number != other.number) return text;
  if (call.model != other.model) return text + " of model " + std::to_string(call.model);
  const std::string fact = describe_difference(call.facts, other.facts);
  if (!fact.empty()) return text.append(" (").append(fact).append(")");
  const std::string_view updates = call.updates;
  if (updates.empty() && other.updates[0] != 0) return text + " before an update";
  if (updates != other.updates) return text.append(" after an update with ").append(first_other(updates, other.updates));
  if (call.bytes != other.bytes) return text + " (" + std::to_string(call.bytes) + " bytes)";
  return text + " (parts of other sizes)";
}

}  // namespace

std::string of_unit(std::string_view unit) { return fsdp::of_unit(unit, "unit "); }

Call make_call(std::uint64_t number, const Label& label, std::int64_t bytes, std::uint64_t sizes) {
  static_assert(std::has_unique_object_representations_v<Call>, "compared and sent as bytes");
  const std::string_view operation = label.operation;
  Call call;
  call.number = number;
  const std::uint64_t updates = stable_hash(label.updates);
  call.identity = stable_hash(operation);
  for (const std::uint64_t part : {stable_hash(label.unit), label.model, static_cast<std::uint64_t>(bytes), sizes, label.facts.layout,
                                   label.facts.switches, label.facts.divide_factor, updates}) {
    call.identity = mix(call.identity, part);
  }
  call.model = label.model;
  call.facts = label.facts;
  call.bytes = bytes;
  operation.copy(call.operation, sizeof(call.operation) - 1);
  label.unit.copy(call.unit, sizeof(call.unit) - 1);
  copy_updates(label.updates, updates, call.updates);
  return call;
}

std::string describe_divergence(const Call& a, int rank_a, const Call& b, int rank_b) {
  if (rank_b < rank_a) return describe_divergence(b, rank_b, a, rank_a);
  return "the ranks make different calls: rank " + std::to_string(rank_a) + ": " + describe(a, b) + "; rank " + std::to_string(rank_b) +
         ": " + describe(b, a) +
         ". All ranks must run the same steps on the same units in the same order. If a rank has nothing for a module, call "
         "attend() of the module on every rank before it is used or skipped.";
}

}  // namespace fsdp::comm
