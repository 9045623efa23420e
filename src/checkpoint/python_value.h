#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "checkpoint/pickle.h"

namespace fsdp::ckpt {

/// A value of Python's built-in types, as training scripts keep them beside tensors: None, bool, int, float, str, bytes, tuple, list, dict.
struct PythonValue {
  struct Entry;
  struct Bytes {
    std::string data;
    bool operator==(const Bytes&) const = default;
  };
  struct Tuple {
    std::vector<PythonValue> items;
    bool operator==(const Tuple&) const = default;
  };
  struct List {
    std::vector<PythonValue> items;
    bool operator==(const List&) const = default;
  };
  /// A dict, with its entries in insertion order.
  struct Dict {
    std::vector<Entry> items;
    bool operator==(const Dict&) const = default;
    /// The value of a string key; null if there is none.
    const PythonValue* find(std::string_view key) const;
  };
  std::variant<std::monostate, bool, std::int64_t, double, std::string, Bytes, Tuple, List, Dict> value;

  bool operator==(const PythonValue&) const = default;
};

/// A key and a value of a dict.
struct PythonValue::Entry {
  PythonValue key;
  PythonValue value;
  bool operator==(const Entry&) const = default;
};

/// The globals that python_value() understands: an ordered dict is read as a dict.
inline constexpr std::array<std::string_view, 2> kPlainGlobals = {"_codecs.encode", "collections.OrderedDict"};

/// Converts a node of a pickle to a plain value. Throws Error for all other types, for nesting deeper than 100, and for values that share
/// their parts so often that they would take far more memory than the pickle.
PythonValue python_value(const PickleValue& value, std::size_t pickle_size);

void write(PickleWriter& writer, const PythonValue& value);

/// Returns Python's repr() of the value, for messages. Characters that a terminal could take for commands are escaped.
std::string repr(const PythonValue& value);

}  // namespace fsdp::ckpt
