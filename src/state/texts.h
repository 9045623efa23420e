#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fsdp::state {

/// Lists names for a message, one per line.
inline std::string lines(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += "\n    " + name;
  return text;
}

/// A text of several fields, each followed by '\0', in which ranks send each other several values.
class Fields {
 public:
  explicit Fields(std::string_view text) : rest_(text) {}
  bool at_end() const { return rest_.empty(); }
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
