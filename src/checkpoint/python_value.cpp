#include "checkpoint/python_value.h"

#include <type_traits>
#include <utility>

#include "fsdp/error.h"

namespace fsdp::ckpt {
namespace {

constexpr int kDeepest = 100;

/// Bytes of memory per byte of the pickle. What PickleWriter writes needs less: two bytes stand for a string of 64 at most.
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
    if (depth > kDeepest) value.throw_unexpected("values nested no deeper than " + std::to_string(kDeepest));
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

  std::size_t budget_;  // bytes that may still be made
};

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

}  // namespace fsdp::ckpt
