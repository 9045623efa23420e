#include "export/chosen_entries.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "base/exception_text.h"
#include "base/text.h"
#include "fsdp/error.h"

namespace fsdp::weights {
namespace {

using Indices = std::map<std::string, std::size_t>;  // of entries, by each of their names

[[noreturn]] void refuse(const WeightAdapter& adapter, const std::string& why) {
  throw Error("full_weights: merge_adapters, but parameter '" + adapter.weight + "' can't be merged with its adapter: " + why);
}

const Entry& entry_of(const WeightAdapter& adapter, const std::string& name, const Indices& indices, const std::vector<Entry>& entries) {
  const auto found = indices.find(name);
  if (found == indices.end()) refuse(adapter, "the model has no parameter '" + name + "'");
  const auto& entry = entries[found->second];
  if (entry.shape.size() != 2) refuse(adapter, "'" + name + "' is " + in_brackets(entry.shape) + ", and no matrix");
  if (!is_converted(entry.own.scalar_type()))
    refuse(adapter, "'" + name + "' has the dtype " + c10::toString(entry.own.scalar_type()) + ", which has no sums");
  if (entry.assembly != nullptr) refuse(adapter, "'" + name + "' is tensor-parallel");
  return entry;
}

void check(const WeightAdapter& adapter, const Indices& indices, const std::vector<Entry>& entries) {
  auto weight = entry_of(adapter, adapter.weight, indices, entries).shape;
  const auto& up = entry_of(adapter, adapter.up, indices, entries).shape;
  const auto& down = entry_of(adapter, adapter.down, indices, entries).shape;
  if (adapter.transposed) std::swap(weight[0], weight[1]);
  if (up[0] == weight[0] && up[1] == down[0] && down[1] == weight[1]) return;
  refuse(adapter, "up is " + in_brackets(up) + " and down is " + in_brackets(down) + ", whose product is not " + in_brackets(weight));
}

std::string renamed(const std::function<std::string(const std::string&)>& rename, const std::string& name) {
  try {
    return rename(name);
  } catch (...) {  // Another exception would leave this rank, and the others would wait.
    throw Error("full_weights: rename failed for '" + name + "': " + current_exception_text());
  }
}

}  // namespace

void choose(Request& request, const std::optional<std::vector<std::string>>& names,
            const std::function<std::string(const std::string& name)>& rename) {
  auto& entries = request.entries;
  const auto& adapters = request.options.merge_adapters;
  Indices indices;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    for (const auto& name : entries[i].names) indices[name] = i;
  }
  std::map<std::size_t, std::size_t> factors;  // by entry
  for (const auto& adapter : adapters) {
    check(adapter, indices, entries);
    for (const auto& name : {adapter.up, adapter.down}) {
      const auto i = indices.at(name);
      if (factors.emplace(i, factors.size()).second) request.factors.push_back(entries[i]);
    }
  }
  for (const auto& adapter : adapters) {
    const auto weight = indices.at(adapter.weight);
    if (factors.contains(weight)) refuse(adapter, "it is a matrix of an adapter itself");
    entries[weight].added.push_back({.up = factors.at(indices.at(adapter.up)),
                                     .down = factors.at(indices.at(adapter.down)),
                                     .scale = adapter.scale,
                                     .transposed = adapter.transposed});
  }
  std::optional<std::set<std::string>> wanted;
  if (names) wanted.emplace(names->begin(), names->end());
  for (const auto& name : names.value_or(std::vector<std::string>())) {
    const auto found = indices.find(name);
    if (found == indices.end()) throw Error("full_weights: the model has no parameter or buffer '" + name + "'");
    if (factors.contains(found->second)) throw Error("full_weights: '" + name + "' is not sent: merge_adapters leaves adapters out");
  }
  std::map<std::string, std::string> first;  // own names, by the receiver's
  std::vector<Entry> chosen;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (factors.contains(i)) continue;
    auto& own = entries[i].names;
    if (wanted) std::erase_if(own, [&](const std::string& name) { return !wanted->contains(name); });
    for (auto& name : own) {
      auto as = rename ? renamed(rename, name) : name;
      if (const auto [same, is_new] = first.emplace(as, name); !is_new) {
        throw Error("full_weights: '" + same->second + "' and '" + name + "' would both be named '" + as + "'");
      }
      name = std::move(as);
    }
    if (!own.empty()) chosen.push_back(std::move(entries[i]));
  }
  entries = std::move(chosen);
}

}  // namespace fsdp::weights
