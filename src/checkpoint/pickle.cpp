#include "checkpoint/pickle.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "fsdp/error.h"

namespace fsdp::ckpt {

using ValueKind = PickleValue::Kind;

std::string PickleValue::description() const {
  constexpr std::size_t kShown = 60;
  const auto quoted = [this] { return std::string("'").append(text_.substr(0, kShown)).append(text_.size() > kShown ? "...'" : "'"); };
  switch (kind_) {
    case ValueKind::none:
      return "None";
    case ValueKind::boolean:
      return number_.boolean ? "True" : "False";
    case ValueKind::integer:
      return "the integer " + std::to_string(number_.integer);
    case ValueKind::big_integer:
      return "an integer of " + std::to_string(text_.size()) + " bytes";
    case ValueKind::real:
      return "the number " + std::to_string(number_.real);
    case ValueKind::string:
      return "the string " + quoted();
    case ValueKind::bytes:
      return std::to_string(text_.size()) + " bytes";
    case ValueKind::tuple:
      return "a tuple of " + std::to_string(items_.size());
    case ValueKind::list:
      return "a list of " + std::to_string(items_.size());
    case ValueKind::dict:
      return "a dict of " + std::to_string(items_.size() / 2);
    case ValueKind::set:
      return "a set of " + std::to_string(items_.size());
    case ValueKind::global:
      return "the global " + quoted();
    case ValueKind::object:
      return items_[0]->is(ValueKind::global) ? "an object of '" + std::string(items_[0]->text_.substr(0, kShown)) + "'" : "an object";
    case ValueKind::persistent:
      return "a persistent id";
  }
  return "nothing";
}

void PickleValue::throw_unexpected(const std::string& expected) const {
  throw Error(owner_->file() + ", byte " + std::to_string(position_) + ": expected " + expected + ", found " + description());
}

void PickleValue::expect(ValueKind kind, const char* expected) const {
  if (kind_ != kind) throw_unexpected(expected);
}

bool PickleValue::boolean() const {
  expect(ValueKind::boolean, "True or False");
  return number_.boolean;
}

std::int64_t PickleValue::integer() const {
  expect(ValueKind::integer, "an integer");
  return number_.integer;
}

double PickleValue::real() const {
  expect(ValueKind::real, "a floating-point number");
  return number_.real;
}

std::string_view PickleValue::string() const {
  expect(ValueKind::string, "a string");
  return text_;
}

std::string_view PickleValue::bytes() const {
  expect(ValueKind::bytes, "bytes");
  return text_;
}

std::span<const PickleValue* const> PickleValue::items() const {
  if (kind_ == ValueKind::object) return std::span(items_).subspan(3);
  if (kind_ != ValueKind::tuple && kind_ != ValueKind::list && kind_ != ValueKind::set) throw_unexpected("a tuple, a list or a set");
  return items_;
}

std::span<const PickleValue* const> PickleValue::entries() const {
  if (kind_ == ValueKind::object) {
    if (items_.size() % 2 == 0) throw_unexpected("an object with keys and values");
    return std::span(items_).subspan(3);
  }
  expect(ValueKind::dict, "a dict");
  return items_;
}

const PickleValue* PickleValue::find(std::string_view key) const {
  const std::span<const PickleValue* const> all = entries();
  for (std::size_t i = all.size(); i > 0; i -= 2) {
    if (all[i - 2]->is(ValueKind::string) && all[i - 2]->text_ == key) return all[i - 1];
  }
  return nullptr;
}

const PickleValue& PickleValue::at(std::string_view key) const {
  const PickleValue* value = find(key);
  if (value == nullptr) throw_unexpected("a dict with the key '" + std::string(key) + "'");
  return *value;
}

std::string_view PickleValue::global() const {
  expect(ValueKind::global, "a global");
  return text_;
}

bool PickleValue::is_object_of(std::string_view global) const {
  return kind_ == ValueKind::object && items_[0]->is(ValueKind::global) && items_[0]->text_ == global;
}

const PickleValue& PickleValue::callable() const {
  expect(ValueKind::object, "an object");
  return *items_[0];
}

const PickleValue& PickleValue::arguments() const {
  expect(ValueKind::object, "an object");
  return *items_[1];
}

const PickleValue* PickleValue::state() const {
  expect(ValueKind::object, "an object");
  return items_[2];
}

const PickleValue& PickleValue::persistent_id() const {
  expect(ValueKind::persistent, "a persistent id");
  return *items_[0];
}

/// The stack machine. Every byte of the input adds at most one node and one entry of the stack, of the memo or of a container.
class PickleReader {
 public:
  PickleReader(Pickle& pickle, std::string_view data, std::span<const std::string_view> allowed)
      : pickle_(pickle), data_(data), allowed_(allowed) {}

  const PickleValue* run() {
    const auto protocol = take(2);
    if (protocol[0] != '\x80' || protocol[1] < 2 || protocol[1] > 5) {
      at_ = 0;
      fail("not a pickle of protocol 2 to 5");
    }
    while (step()) {
    }
    return stack_.front();
  }

 private:
  [[noreturn]] void fail(const std::string& what) const { throw Error(pickle_.file() + ", byte " + std::to_string(at_) + ": " + what); }

  std::string_view take(std::size_t count) {
    if (count > data_.size() - next_) {
      fail("the pickle ends early: " + std::to_string(count) + " bytes wanted, " + std::to_string(data_.size() - next_) + " left");
    }
    const std::string_view taken = data_.substr(next_, count);
    next_ += count;
    return taken;
  }

  /// A little-endian number of `width` bytes.
  std::uint64_t number(std::size_t width) {
    std::uint64_t value = 0;
    const std::string_view bytes = take(width);
    for (std::size_t i = 0; i < width; ++i) value |= std::uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
    return value;
  }

  std::string_view line() {
    const std::size_t end = data_.find('\n', next_);
    if (end == std::string_view::npos) fail("the pickle ends early: a line without an end");
    const std::string_view text = take(end - next_);
    ++next_;
    return text;
  }

  PickleValue* add(ValueKind kind) {
    pickle_.values_.push_back(PickleValue(pickle_, kind, at_, &pickle_.memory_));
    return &pickle_.values_.back();
  }

  PickleValue* push(ValueKind kind) {
    PickleValue* value = add(kind);
    stack_.push_back(value);
    return value;
  }

  void push_text(ValueKind kind, std::size_t length) { push(kind)->text_ = take(length); }
  void push_integer(std::int64_t value) { push(ValueKind::integer)->number_.integer = value; }

  void push_long(std::uint64_t length) {
    if (length > 8) return push_text(ValueKind::big_integer, length);
    const std::uint64_t bits = number(length);
    const int unused = 64 - 8 * static_cast<int>(length);
    push_integer(length == 0 ? 0 : static_cast<std::int64_t>(bits << unused) >> unused);
  }

  void push_real() {
    std::uint64_t bits = 0;
    for (const char byte : take(8)) bits = bits << 8 | static_cast<unsigned char>(byte);  // big-endian
    push(ValueKind::real)->number_.real = std::bit_cast<double>(bits);
  }

  /// Entries of the stack above the last mark.
  std::size_t available() const { return stack_.size() - (marks_.empty() ? 0 : marks_.back()); }

  void need(std::size_t count) const {
    if (available() < count) fail("the stack holds too few values for this operation");
  }

  PickleValue* pop() {
    need(1);
    PickleValue* value = stack_.back();
    stack_.pop_back();
    return value;
  }

  PickleValue* top() const {
    need(1);
    return stack_.back();
  }

  std::size_t pop_mark() {
    if (marks_.empty()) fail("no mark on the stack");
    const std::size_t mark = marks_.back();
    marks_.pop_back();
    return mark;
  }

  /// A new container of the stack's entries from `begin`.
  void collect(ValueKind kind, std::size_t begin) {
    PickleValue* value = add(kind);
    value->items_.assign(stack_.begin() + static_cast<std::ptrdiff_t>(begin), stack_.end());
    stack_.resize(begin);
    stack_.push_back(value);
  }

  void collect_last(std::size_t count) {
    need(count);
    collect(ValueKind::tuple, stack_.size() - count);
  }

  /// Moves the stack's entries from `begin` into the container below them.
  void extend(ValueKind kind, std::size_t begin) {
    const std::size_t floor = marks_.empty() ? 0 : marks_.back();
    if (begin <= floor) fail("nothing on the stack to add to");
    PickleValue* container = stack_[begin - 1];
    if (!container->is(kind) && !container->is(ValueKind::object)) fail("cannot add elements to " + container->description());
    if (kind == ValueKind::dict && (stack_.size() - begin) % 2 != 0) fail("a dict with a key that has no value");
    container->items_.insert(container->items_.end(), stack_.begin() + static_cast<std::ptrdiff_t>(begin), stack_.end());
    stack_.resize(begin);
  }

  void push_global(std::string_view module, std::string_view name) {
    // The parts of the name are looked up separately, so that the text of a forbidden global, which may be long, is not copied.
    constexpr std::size_t kShown = 100;
    for (const std::string_view known : allowed_) {
      if (known.size() == module.size() + 1 + name.size() && known.starts_with(module) && known[module.size()] == '.' &&
          known.ends_with(name)) {
        return push_known_global(known);
      }
      const bool is_pattern = known == "*" || (known.size() == module.size() + 2 && known.starts_with(module) && known.ends_with(".*"));
      if (is_pattern && module.size() <= kShown && name.size() <= kShown) {
        return push_known_global(*pickle_.names_.insert(std::string(module).append(".").append(name)).first);
      }
    }
    fail("the global '" + std::string(module.substr(0, kShown)) + "." + std::string(name.substr(0, kShown)) +
         "' has no business in this file; it was not made by torch.save or torch.distributed.checkpoint alone, or was tampered with");
  }

  void push_known_global(std::string_view text) {
    push(ValueKind::global)->text_ = text;
    if (met_.insert(text).second) pickle_.globals_.push_back(text);
  }

  void push_object(PickleValue* arguments, PickleValue* callable) {
    // An object: what a function returned, such as a method.
    if (!callable->is(ValueKind::global) && !callable->is(ValueKind::object)) fail("a call of " + callable->description());
    if (!arguments->is(ValueKind::tuple)) fail("a call with " + arguments->description() + " as arguments");
    push(ValueKind::object)->items_ = {callable, arguments, nullptr};
  }

  void memoize(std::uint64_t index) {
    // A pickler numbers what it writes, so an honest index is less than the number of bytes.
    if (index > data_.size()) fail("a memo index of " + std::to_string(index) + " in " + std::to_string(data_.size()) + " bytes");
    PickleValue* value = top();
    if (index >= memo_.size()) memo_.resize(index + 1);
    memo_[index] = value;
  }

  void recall(std::uint64_t index) {
    if (index >= memo_.size() || memo_[index] == nullptr) fail("no value " + std::to_string(index) + " in the memo");
    stack_.push_back(memo_[index]);
  }

  /// One operation; false after the last one.
  bool step();

  Pickle& pickle_;
  std::string_view data_;
  std::span<const std::string_view> allowed_;
  std::size_t next_ = 0;
  std::size_t at_ = 0;  // the position of the current operation
  std::vector<PickleValue*> stack_;
  std::vector<std::size_t> marks_;
  std::vector<PickleValue*> memo_;
  std::uint64_t memoized_ = 0;
  std::set<std::string_view> met_;  // the globals that have occurred
};

bool PickleReader::step() {
  at_ = next_;
  const char code = take(1)[0];
  switch (code) {
    case 'N':
      push(ValueKind::none);
      break;
    case '\x88':
    case '\x89':
      push(ValueKind::boolean)->number_.boolean = code == '\x88';
      break;
    case 'K':
      push_integer(static_cast<std::int64_t>(number(1)));
      break;
    case 'M':
      push_integer(static_cast<std::int64_t>(number(2)));
      break;
    case 'J':
      push_integer(static_cast<std::int32_t>(number(4)));
      break;
    case '\x8a':
      push_long(number(1));
      break;
    case '\x8b':
      push_long(number(4));
      break;
    case 'G':
      push_real();
      break;
    case '\x8c':
      push_text(ValueKind::string, number(1));
      break;
    case 'X':
      push_text(ValueKind::string, number(4));
      break;
    case '\x8d':
      push_text(ValueKind::string, number(8));
      break;
    case 'U':  // Python 2's str
    case 'C':
      push_text(ValueKind::bytes, number(1));
      break;
    case 'T':
    case 'B':
      push_text(ValueKind::bytes, number(4));
      break;
    case '\x8e':
    case '\x96':  // a bytearray
      push_text(ValueKind::bytes, number(8));
      break;
    case '(':
      marks_.push_back(stack_.size());
      break;
    case ')':
      push(ValueKind::tuple);
      break;
    case '\x85':
      collect_last(1);
      break;
    case '\x86':
      collect_last(2);
      break;
    case '\x87':
      collect_last(3);
      break;
    case 't':
      collect(ValueKind::tuple, pop_mark());
      break;
    case ']':
      push(ValueKind::list);
      break;
    case 'a':
      need(2);
      extend(ValueKind::list, stack_.size() - 1);
      break;
    case 'e':
      extend(ValueKind::list, pop_mark());
      break;
    case '}':
      push(ValueKind::dict);
      break;
    case 's':
      need(3);
      extend(ValueKind::dict, stack_.size() - 2);
      break;
    case 'u':
      extend(ValueKind::dict, pop_mark());
      break;
    case '\x8f':
      push(ValueKind::set);
      break;
    case '\x90':
      extend(ValueKind::set, pop_mark());
      break;
    case '\x91':
      collect(ValueKind::set, pop_mark());
      break;
    case 'c': {
      const std::string_view module = line();
      push_global(module, line());
      break;
    }
    case '\x93': {
      need(2);
      const std::string_view name = pop()->string();
      push_global(pop()->string(), name);
      break;
    }
    case 'R':
    case '\x81': {
      need(2);
      PickleValue* arguments = pop();
      push_object(arguments, pop());
      break;
    }
    case 'b': {
      need(2);
      PickleValue* state = pop();
      if (!top()->is(ValueKind::object)) fail("a state for " + top()->description());
      top()->items_[2] = state;
      break;
    }
    case 'Q': {
      PickleValue* id = pop();
      push(ValueKind::persistent)->items_ = {id};
      break;
    }
    case '0':
      pop();
      break;
    case '1':
      stack_.resize(pop_mark());
      break;
    case '2':
      stack_.push_back(top());
      break;
    case 'q':
      memoize(number(1));
      memoized_ = std::max(memoized_, std::uint64_t{memo_.size()});
      break;
    case 'r':
      memoize(number(4));
      memoized_ = std::max(memoized_, std::uint64_t{memo_.size()});
      break;
    case '\x94':
      memoize(memoized_++);
      break;
    case 'h':
      recall(number(1));
      break;
    case 'j':
      recall(number(4));
      break;
    case '\x95':  // a frame's length; what it encloses is checked operation by operation
      number(8);
      break;
    case '.':
      if (stack_.size() != 1 || !marks_.empty()) fail("the pickle ends with " + std::to_string(stack_.size()) + " values instead of one");
      if (next_ != data_.size()) fail(std::to_string(data_.size() - next_) + " bytes follow the end of the pickle");
      return false;
    default:
      fail("the operation " + std::to_string(static_cast<unsigned char>(code)) + " has no use in checkpoints");
  }
  return true;
}

Pickle::Pickle(std::string_view data, std::string file, std::span<const std::string_view> allowed)
    : file_(std::move(file)), size_(data.size()) {
  root_ = PickleReader(*this, data, allowed).run();
}

}  // namespace fsdp::ckpt
