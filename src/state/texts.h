#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fsdp::state {

/// Names in a message, a line each.
inline std::string lines(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += "\n    " + name;
  return text;
}

/// Fields of a text, each with '\0' behind it: so ranks tell each other of several things.
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
