#include "state/extra.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "base/text.h"
#include "fsdp/error.h"
#include "state/snapshot.h"

namespace fsdp {
namespace state {
namespace {

using ckpt::DcpPath;
using ckpt::PythonValue;

constexpr std::size_t kDeepest = 100;  ///< The same limit as in ckpt::python_value, because code that walks over values recurses.

bool is_in_one_item(const ExtraValue& value) {
  if (std::holds_alternative<at::Tensor>(value) || std::holds_alternative<ExtraDict>(value)) return false;
  const auto* list = std::get_if<ExtraList>(&value);
  return list == nullptr || std::all_of(list->items.begin(), list->items.end(), is_in_one_item);
}

/// Returns the value that is written as one item.
PythonValue python_value(const ExtraValue& extra) {
  return std::visit(
      [](const auto& typed) -> PythonValue {
        using T = std::decay_t<decltype(typed)>;
        if constexpr (std::is_same_v<T, at::Tensor> || std::is_same_v<T, ExtraDict>) {
          return {PythonValue::Dict{}};  // an empty one
        } else if constexpr (std::is_same_v<T, ExtraBytes>) {
          return {PythonValue::Bytes{typed.data}};
        } else if constexpr (std::is_same_v<T, ExtraList>) {
          PythonValue::List list;
          for (const auto& item : typed.items) list.items.push_back(python_value(item));
          return {std::move(list)};
        } else {
          return {typed};
        }
      },
      extra);
}

using AddTensor = std::function<void(const DcpPath& path, const at::Tensor& tensor)>;
using AddValue = std::function<void(const DcpPath& path, PythonValue value)>;

void add_items(DcpPath& path, const ExtraValue& value, const AddTensor& add_tensor, const AddValue& add_value) {
  const auto below = [&](auto part, const ExtraValue& item) {
    path.emplace_back(std::move(part));
    add_items(path, item, add_tensor, add_value);
    path.pop_back();
  };
  const auto* dict = std::get_if<ExtraDict>(&value);
  if (const auto* tensor = std::get_if<at::Tensor>(&value)) {
    if (!tensor->defined()) throw Error("extra state '" + key_of(path) + "' is an undefined tensor");
    add_tensor(path, *tensor);
  } else if (is_in_one_item(value) || (dict != nullptr && dict->items.empty())) {
    add_value(path, python_value(value));
  } else if (dict != nullptr) {
    for (const auto& [name, item] : dict->items) below(name, item);
  } else {
    const auto& items = std::get<ExtraList>(value).items;
    for (std::size_t i = 0; i < items.size(); ++i) below(static_cast<std::int64_t>(i), items[i]);
  }
}

/// The key of a dictionary that Python has written; nothing for other types.
std::optional<std::string> key_text(const PythonValue& key) {
  if (const auto* text = std::get_if<std::string>(&key.value)) return *text;
  if (const auto* number = std::get_if<std::int64_t>(&key.value)) return std::to_string(*number);
  return std::nullopt;
}

/// Returns nothing for values that an ExtraState can't hold.
std::optional<ExtraValue> extra_value(const PythonValue& value) {
  return std::visit(
      [](const auto& typed) -> std::optional<ExtraValue> {
        using T = std::decay_t<decltype(typed)>;
        if constexpr (std::is_same_v<T, PythonValue::Dict>) {
          ExtraDict dict;
          for (const auto& entry : typed.items) {
            const auto key = key_text(entry.key);
            auto converted = extra_value(entry.value);
            if (!key || !converted) return std::nullopt;
            dict.items.insert_or_assign(*key, *std::move(converted));
          }
          return dict;
        } else if constexpr (std::is_same_v<T, PythonValue::Bytes>) {
          return ExtraBytes{typed.data};
        } else if constexpr (std::is_same_v<T, PythonValue::List> || std::is_same_v<T, PythonValue::Tuple>) {
          ExtraList list;
          for (const auto& item : typed.items) {
            auto converted = extra_value(item);
            if (!converted) return std::nullopt;
            list.items.push_back(*std::move(converted));
          }
          return list;
        } else {
          return typed;
        }
      },
      value.value);
}

/// Returns the path of a value below the dictionary that `prefix` stands for. If no path is known, the rest of the name is the only part.
DcpPath path_below(const Source& source, const std::string& name, const std::string& prefix) {
  const auto path = source.path_of(name);
  DcpPath front;
  for (const auto& part : path) {
    front.push_back(part);
    if (key_of(front) + "." != prefix) continue;
    DcpPath rest(path.begin() + static_cast<std::ptrdiff_t>(front.size()), path.end());
    if (rest.empty() || rest.size() > kDeepest || !std::holds_alternative<std::string>(rest.front())) break;
    return rest;
  }
  return {name.substr(prefix.size())};
}

/// Returns the value to which `path` leads, and makes dictionaries and lists on the way as needed. `room` is the number of items that all
/// lists together may still get.
ExtraValue& place_of(ExtraState& extra, std::span<const std::variant<std::string, std::int64_t>> path, std::size_t& room) {
  auto* place = &extra[std::get<std::string>(path.front())];
  for (const auto& part : path.subspan(1)) {
    if (const auto* key = std::get_if<std::string>(&part)) {
      if (!std::holds_alternative<ExtraDict>(*place)) *place = ExtraDict{};
      place = &std::get<ExtraDict>(*place).items[*key];
      continue;
    }
    if (!std::holds_alternative<ExtraList>(*place)) *place = ExtraList{};
    auto& items = std::get<ExtraList>(*place).items;
    const auto index = static_cast<std::size_t>(std::get<std::int64_t>(part));  // a negative one is too large
    if (index >= items.size()) {
      const auto more = index - items.size();
      if (more >= room) {
        throw Error("extra state '" + std::get<std::string>(path.front()) + "' is a list with more places than the checkpoint has values");
      }
      room -= more + 1;
      items.resize(index + 1, ExtraNone());
    }
    place = &items[index];
  }
  return *place;
}

}  // namespace

void for_each_item(const DcpPath& path, const ExtraState& extra, const AddTensor& add_tensor, const AddValue& add_value) {
  for (const auto& [name, value] : extra) {
    auto below = path;
    below.emplace_back(name);
    add_items(below, value, add_tensor, add_value);
  }
}

std::vector<StoredItem> items_below(Source& source, const std::string& prefix,
                                    const std::function<bool(const std::string& name)>& is_ignored) {
  std::vector<StoredItem> items;
  for (const auto& name : source.names()) {
    if (!name.starts_with(prefix) || (is_ignored && is_ignored(name))) continue;
    items.emplace_back(path_below(source, name, prefix), source.read_value(name));
  }
  return items;
}

ExtraState extra_below(Source& source, const std::string& prefix, const std::function<bool(const std::string& name)>& is_ignored) {
  ExtraState extra;
  auto room = source.names().size();
  for (const auto& [path, stored] : items_below(source, prefix, is_ignored)) {
    auto& value = place_of(extra, path, room);
    if (const auto* tensor = std::get_if<at::Tensor>(&stored)) {
      value = *tensor;
      continue;
    }
    auto converted = extra_value(std::get<PythonValue>(stored));
    if (!converted) {
      throw Error(source.path() + ": '" + prefix + key_of(path) +
                  "' has a dictionary with keys that are neither str nor int; LoadOptions::ignore leaves it out");
    }
    value = *std::move(converted);
  }
  return extra;
}

std::string rank_extra_prefix(std::int64_t rank) { return std::string(kRankExtra) + "." + std::to_string(rank) + "."; }

std::int64_t saved_ranks(Source& source) {
  if (!source.has(kRanks)) return 0;
  const auto saved = source.read_scalar(kRanks);
  const auto* ranks = saved ? std::get_if<std::int64_t>(&saved->value) : nullptr;
  if (ranks == nullptr || *ranks < 0) throw Error(source.path() + ": '" + kRanks + "' is no number of ranks");
  return *ranks;
}

}  // namespace state

namespace {

constexpr std::size_t kMostNamed = 20;

/// Returns the value of this name; null if there is none.
const ExtraValue* find(const std::map<std::string, ExtraValue>& values, const std::string& name) {
  if (const auto found = values.find(name); found != values.end()) return &found->second;
  for (auto dot = name.find('.'); dot != std::string::npos; dot = name.find('.', dot + 1)) {
    const auto found = values.find(name.substr(0, dot));
    const auto* dict = found == values.end() ? nullptr : std::get_if<ExtraDict>(&found->second);
    const auto* value = dict == nullptr ? nullptr : find(dict->items, name.substr(dot + 1));
    if (value != nullptr) return value;
  }
  return nullptr;
}

void list_names(const std::map<std::string, ExtraValue>& values, const std::string& before, std::vector<std::string>& names) {
  for (const auto& [name, value] : values) {
    const auto* dict = std::get_if<ExtraDict>(&value);
    if (dict != nullptr && !dict->items.empty()) {
      list_names(dict->items, before + name + ".", names);
    } else {
      names.push_back("'" + before + name + "'");
    }
  }
}

}  // namespace

const ExtraValue& detail::extra_named(const ExtraState& extra, const std::string& name) {
  if (const auto* value = find(extra, name)) return *value;
  std::vector<std::string> names;
  list_names(extra, "", names);
  throw Error("there is no extra state '" + name + "'" +
              (names.empty() ? ", and none at all" : "; there is " + first_names(names, kMostNamed)));
}

void detail::refuse_extra(const std::string& name, std::size_t found, std::size_t wanted) {
  constexpr std::array<const char*, std::variant_size_v<ExtraValue>> kTypes = {
      "bool", "std::int64_t", "double", "std::string", "at::Tensor", "ExtraBytes", "ExtraList", "ExtraDict", "ExtraNone"};
  throw Error("extra state '" + name + "' is of type " + kTypes[found] + ", not " + kTypes[wanted]);
}

}  // namespace fsdp
