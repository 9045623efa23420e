#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory_resource>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace fsdp::ckpt {

class Pickle;

/// A node of what a pickle describes. Its accessors throw Error, which names the file, the position and what is there instead.
///
/// The nodes of a malicious pickle may form cycles, or a graph of exponentially many paths: follow them to a fixed depth, or count.
class PickleValue {
 public:
  enum class Kind : std::uint8_t {
    none,
    boolean,
    integer,
    big_integer,
    real,
    string,
    bytes,
    tuple,
    list,
    dict,
    set,
    global,
    object,
    persistent
  };

  Kind kind() const { return kind_; }
  bool is(Kind kind) const { return kind_ == kind; }

  bool boolean() const;
  std::int64_t integer() const;
  double real() const;
  /// UTF-8, as Python wrote it. This and bytes() are views into the pickle's data.
  std::string_view string() const;
  std::string_view bytes() const;
  /// Of a tuple, a list or a set; of an object, what was appended to it.
  std::span<const PickleValue* const> items() const;
  /// Of a dict, key and value alternate; of an object (OrderedDict), what was assigned to its keys.
  std::span<const PickleValue* const> entries() const;
  /// The value of a string key of a dict; null if there is none. The last one, as in Python, where a key is there twice.
  const PickleValue* find(std::string_view key) const;
  const PickleValue& at(std::string_view key) const;

  /// "module.name" of a global.
  std::string_view global() const;
  /// An object is what `callable(*arguments)` would return, with `state` assigned. Nothing is called here.
  bool is_object_of(std::string_view global) const;
  const PickleValue& callable() const;
  const PickleValue& arguments() const;
  /// Null for an object without one.
  const PickleValue* state() const;
  /// What a persistent id stands for is the caller's business; here it is the id.
  const PickleValue& persistent_id() const;

  /// An Error of this place: "<file>, byte <position>: expected <expected>, found <this>".
  [[noreturn]] void throw_unexpected(const std::string& expected) const;
  /// For messages: "a list of 3", "the string 'x'".
  std::string description() const;

 private:
  friend class Pickle;
  friend class PickleReader;

  PickleValue(const Pickle& owner, Kind kind, std::size_t position, std::pmr::memory_resource* memory)
      : owner_(&owner), position_(position), items_(memory), kind_(kind) {}
  void expect(Kind kind, const char* expected) const;

  const Pickle* owner_;
  std::size_t position_;
  std::string_view text_;
  // The elements of containers. An object's first three are callable, arguments and state (or null).
  std::pmr::vector<const PickleValue*> items_;
  union {
    bool boolean;
    std::int64_t integer;
    double real;
  } number_{.integer = 0};
  Kind kind_;
};

/// A pickle of protocol 2 to 5, read without running anything. A few nodes' worth of memory per byte of the input at most, and no
/// recursion.
class Pickle {
 public:
  /// `data` must outlive this object. `file` is for messages only. `allowed` lists the globals ("module.name") that may occur; "module.*"
  /// stands for all of a module, "*" for all. Throws Error for any other one, and for whatever is malformed or of no use in checkpoints
  /// (extension codes, out-of-band buffers, protocols 0 and 1).
  Pickle(std::string_view data, std::string file, std::span<const std::string_view> allowed);
  Pickle(const Pickle&) = delete;
  Pickle& operator=(const Pickle&) = delete;

  const PickleValue& root() const { return *root_; }
  /// The globals that occur, as they are first met.
  const std::vector<std::string_view>& globals() const { return globals_; }
  const std::string& file() const { return file_; }
  /// Of the input, in bytes.
  std::size_t size() const { return size_; }

 private:
  friend class PickleReader;

  std::string file_;
  std::size_t size_;
  // All nodes go together, with millions of small arrays.
  std::pmr::monotonic_buffer_resource memory_;
  // A deque: nodes point to each other. They are destroyed one by one, cycles or not.
  std::pmr::deque<PickleValue> values_{&memory_};
  std::set<std::string, std::less<>> names_;  // of globals that `allowed` has by a pattern
  std::vector<std::string_view> globals_;
  const PickleValue* root_ = nullptr;
};

/// Writes a pickle of protocol 2, which torch.load's restricted unpickler and any Python 3 read. Each call appends a value, in the order in
/// which Python's stack machine wants them; between begin_x() and end_x() stand the elements.
class PickleWriter {
 public:
  PickleWriter();

  void none() { op('N'); }
  void boolean(bool value) { op(value ? '\x88' : '\x89'); }
  void integer(std::int64_t value);
  void real(double value);
  /// UTF-8. Short strings that are equal are written once.
  void string(std::string_view value);
  /// As Python writes bytes in this protocol: a call of _codecs.encode.
  void bytes(std::string_view value);
  void begin_tuple() { op('('); }
  void end_tuple() { op('t'); }
  void begin_list() { text_ += "]("; }
  void end_list() { op('e'); }
  void begin_dict() { text_ += "}("; }
  /// Keys and values alternate.
  void end_dict() { op('u'); }
  void global(std::string_view module, std::string_view name);
  /// After a callable and a tuple of arguments.
  void reduce() { op('R'); }
  /// After a class and a tuple of arguments for its __new__.
  void new_object() { op('\x81'); }
  /// After an object and its state.
  void build() { op('b'); }
  /// After the id.
  void persistent_id() { op('Q'); }
  /// An instance of a class without arguments, to be built.
  void instance(std::string_view module, std::string_view name);

  /// The whole pickle; nothing can be added after.
  std::string finish();

 private:
  void op(char code) { text_ += code; }
  /// True if `key` was written before: then it is fetched. Otherwise the caller writes it and calls remember().
  bool recall(const std::string& key);
  void remember(std::string key);

  std::string text_;
  std::unordered_map<std::string, std::uint32_t> memo_;
};

}  // namespace fsdp::ckpt
