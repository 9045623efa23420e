#include "checkpoint/python_value.h"

#include <charconv>
#include <cstdio>
#include <type_traits>
#include <utility>

#include "base/text.h"
#include "fsdp/error.h"

namespace fsdp::ckpt {
namespace {

constexpr int kDeepestValue = 100;

/// The limit for bytes of memory per byte of the pickle. Pickles of PickleWriter need less, because two bytes stand for a string of at most
/// 64 bytes.
constexpr std::size_t kMostPerByte = 64;
constexpr std::size_t kMostAnyway = 4096;
static_assert(sizeof(PythonValue) + 64 <= 2 * kMostPerByte);

/// What _codecs.encode(text, "latin1") returns.
std::string encode_latin1(const PickleValue& value) {
  const auto arguments = value.arguments().items();
  if (arguments.size() != 2 || (arguments[1]->string() != "latin1" && arguments[1]->string() != "latin-1")) {
    value.throw_unexpected("bytes");
  }
  std::string bytes;
  const std::string_view text = arguments[0]->string();
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto first = static_cast<unsigned char>(text[i]);
    if (first < 0x80) {
      bytes += text[i];
    } else if ((first == 0xC2 || first == 0xC3) && i + 1 < text.size()) {
      bytes += static_cast<char>(first << 6 | (static_cast<unsigned char>(text[++i]) & 0x3F));
    } else {
      value.throw_unexpected("text of Latin-1 characters");
    }
  }
  return bytes;
}

class Converter {
 public:
  explicit Converter(std::size_t pickle_size) : budget_(kMostPerByte * pickle_size + kMostAnyway) {}

  PythonValue convert(const PickleValue& value, int depth) {
    if (depth > kDeepestValue) value.throw_unexpected("values nested no deeper than " + std::to_string(kDeepestValue));
    spend(value, sizeof(PythonValue));
    using Kind = PickleValue::Kind;
    switch (value.kind()) {
      case Kind::none:
        return {};
      case Kind::boolean:
        return {value.boolean()};
      case Kind::integer:
        return {value.integer()};
      case Kind::real:
        return {value.real()};
      case Kind::string:
        spend(value, value.string().size());
        return {std::string(value.string())};
      case Kind::bytes:
        spend(value, value.bytes().size());
        return {PythonValue::Bytes{std::string(value.bytes())}};
      case Kind::tuple:
        return {PythonValue::Tuple{convert_items(value, depth)}};
      case Kind::list:
        return {PythonValue::List{convert_items(value, depth)}};
      case Kind::dict:
        return {convert_entries(value, depth)};
      case Kind::object:
        if (value.is_object_of("_codecs.encode")) {
          std::string bytes = encode_latin1(value);
          spend(value, bytes.size());
          return {PythonValue::Bytes{std::move(bytes)}};
        }
        if (value.is_object_of("collections.OrderedDict") && value.arguments().items().empty()) return {convert_entries(value, depth)};
        break;
      default:
        break;
    }
    value.throw_unexpected("None, bool, int, float, str, bytes, tuple, list or dict");
  }

 private:
  void spend(const PickleValue& value, std::size_t bytes) {
    if (bytes > budget_) value.throw_unexpected("values that share less: this pickle would take far more memory than its size");
    budget_ -= bytes;
  }

  std::vector<PythonValue> convert_items(const PickleValue& value, int depth) {
    std::vector<PythonValue> items;
    for (const PickleValue* item : value.items()) items.push_back(convert(*item, depth + 1));
    return items;
  }

  PythonValue::Dict convert_entries(const PickleValue& value, int depth) {
    PythonValue::Dict dict;
    const auto entries = value.entries();
    for (std::size_t i = 0; i < entries.size(); i += 2) {
      PythonValue key = convert(*entries[i], depth + 1);
      dict.items.push_back({std::move(key), convert(*entries[i + 1], depth + 1)});
    }
    return dict;
  }

  std::size_t budget_;  // the bytes of memory that may still be used
};

/// A str (of UTF-8) or bytes: quoted; what is not printable is escaped.
std::string quoted(std::string_view text, bool is_utf8) {
  std::string result = is_utf8 ? "'" : "b'";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\'' || c == '\\') {
      result.append({'\\', c});
    } else if (byte < 0x20 || byte == 0x7F || (byte >= 0x80 && !is_utf8)) {
      char escaped[5];
      std::snprintf(escaped, sizeof(escaped), "\\x%02x", byte);
      result += escaped;
    } else {
      result += c;
    }
  }
  result += '\'';
  return result;
}

/// The shortest text that reads back as this number.
std::string repr_of(double number) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof(text), number).ptr;
  const std::string_view digits(text, static_cast<std::size_t>(end - text));
  const bool looks_integral = digits.find_first_not_of("-0123456789") == std::string_view::npos;
  return std::string(digits) + (looks_integral ? ".0" : "");
}

}  // namespace

const PythonValue* PythonValue::Dict::find(std::string_view key) const {
  for (const auto& [name, value] : items) {
    const auto* text = std::get_if<std::string>(&name.value);
    if (text != nullptr && *text == key) return &value;
  }
  return nullptr;
}

PythonValue python_value(const PickleValue& value, std::size_t pickle_size) { return Converter(pickle_size).convert(value, 0); }

void write(PickleWriter& writer, const PythonValue& value) {
  std::visit(
      [&writer](const auto& it) {
        using T = std::decay_t<decltype(it)>;
        if constexpr (std::is_same_v<T, std::monostate>) {
          writer.none();
        } else if constexpr (std::is_same_v<T, bool>) {
          writer.boolean(it);
        } else if constexpr (std::is_same_v<T, std::int64_t>) {
          writer.integer(it);
        } else if constexpr (std::is_same_v<T, double>) {
          writer.real(it);
        } else if constexpr (std::is_same_v<T, std::string>) {
          writer.string(it);
        } else if constexpr (std::is_same_v<T, PythonValue::Bytes>) {
          writer.bytes(it.data);
        } else if constexpr (std::is_same_v<T, PythonValue::Tuple>) {
          writer.begin_tuple();
          for (const PythonValue& item : it.items) write(writer, item);
          writer.end_tuple();
        } else if constexpr (std::is_same_v<T, PythonValue::List>) {
          writer.begin_list();
          for (const PythonValue& item : it.items) write(writer, item);
          writer.end_list();
        } else {
          writer.begin_dict();
          for (const auto& [key, item] : it.items) {
            write(writer, key);
            write(writer, item);
          }
          writer.end_dict();
        }
      },
      value.value);
}

std::string repr(const PythonValue& value) {
  return std::visit(
      [](const auto& it) -> std::string {
        using T = std::decay_t<decltype(it)>;
        if constexpr (std::is_same_v<T, std::monostate>) {
          return "None";
        } else if constexpr (std::is_same_v<T, bool>) {
          return it ? "True" : "False";
        } else if constexpr (std::is_same_v<T, std::int64_t>) {
          return std::to_string(it);
        } else if constexpr (std::is_same_v<T, double>) {
          return repr_of(it);
        } else if constexpr (std::is_same_v<T, std::string>) {
          return quoted(it, true);
        } else if constexpr (std::is_same_v<T, PythonValue::Bytes>) {
          return quoted(it.data, false);
        } else if constexpr (std::is_same_v<T, PythonValue::Tuple>) {
          return std::string("(").append(joined(it.items, ", ", repr)).append(it.items.size() == 1 ? ",)" : ")");
        } else if constexpr (std::is_same_v<T, PythonValue::List>) {
          return std::string("[").append(joined(it.items, ", ", repr)).append("]");
        } else {
          const auto text = [](const PythonValue::Entry& entry) { return repr(entry.key).append(": ").append(repr(entry.value)); };
          return std::string("{").append(joined(it.items, ", ", text)).append("}");
        }
      },
      value.value);
}

}  // namespace fsdp::ckpt
