#pragma once

#include <cstddef>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/text.h"

namespace fsdp::state {

/// Lists names for a message, one per line.
inline std::string lines(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += "\n    " + name;
  return text;
}

/// Returns the text before `text` in the names that end in it, or, if it ends in a dot, in those that contain it: the prefixes that a
/// checkpoint uses for a name of the model ("layers.0.weight") or the state of a parameter ("state.layers.0.weight.").
inline std::set<std::string> prefixes_before(const std::vector<std::string>& names, std::string_view text) {
  std::set<std::string> prefixes;
  for (const auto& name : names) {
    const auto at = text.ends_with('.') ? name.find(text) : name.ends_with(text) ? name.size() - text.size() : name.npos;
    if (at != name.npos && (at == 0 || name[at - 1] == '.')) prefixes.insert(name.substr(0, at));
  }
  return prefixes;
}

/// "; it has them below 'm.'": the prefixes under which a checkpoint has the missing names, and the option that takes one. Empty if there
/// are none, or so many that the name is not specific.
inline std::string advice_on_prefixes(const std::set<std::string>& prefixes, std::string_view option) {
  constexpr std::size_t kMost = 5;
  if (prefixes.size() > kMost) return "";
  const auto text = joined(prefixes, ", ", in_quotes);
  return text.empty() ? text : "; it has this below " + text + ": pass " + std::string(option) + " with that prefix";
}

/// A text of several fields, each followed by '\0', by which ranks exchange several values.
inline std::string fields_of(const std::vector<std::string>& fields) {
  std::string text;
  for (const auto& field : fields) text += field + '\0';
  return text;
}

/// Reads such a text.
class Fields {
 public:
  explicit Fields(std::string_view text) : rest_(text) {}
  bool at_end() const { return rest_.empty(); }
  std::string_view rest() const { return rest_; }
  std::string next() {
    const auto end = rest_.find('\0');
    std::string field(rest_.substr(0, end));
    rest_.remove_prefix(end + 1);
    return field;
  }

 private:
  std::string_view rest_;
};

}  // namespace fsdp::state
