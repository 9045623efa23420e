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

/// A node of the graph that a pickle describes. Its accessors throw Error if the node has another type; the message names the file, the
/// position and the actual type.
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
  /// The elements of a tuple, a list or a set; for an object, the elements that were appended to it.
  std::span<const PickleValue* const> items() const;
  /// The keys and values of a dict, alternating; for an object (OrderedDict), the items that were assigned to it.
  std::span<const PickleValue* const> entries() const;
  /// The value of a string key of a dict; null if there is none. If a key occurs twice, this is the last value, as in Python.
  const PickleValue* find(std::string_view key) const;
  const PickleValue& at(std::string_view key) const;

  /// The name of a global, as "module.name".
  std::string_view global() const;
  /// True for an object of this class or callable. An object stands for the result of `callable(*arguments)` with `state` assigned; nothing
  /// is called here.
  bool is_object_of(std::string_view global) const;
  const PickleValue& callable() const;
  const PickleValue& arguments() const;
  /// The state of an object; null if it has none.
  const PickleValue* state() const;
  /// The value of a persistent id. The caller decides what it stands for.
  const PickleValue& persistent_id() const;

  /// Throws the Error "<file>, byte <position>: expected <expected>, found <this>".
  [[noreturn]] void throw_unexpected(const std::string& expected) const;
  /// A description for messages, such as "a list of 3" or "the string 'x'".
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

/// Reads a pickle of protocol 2 to 5 without running anything. It needs memory for at most a few nodes per byte of the input, and does not
/// recurse.
class Pickle {
 public:
  /// `data` must outlive this object. `file` is for messages only. `allowed` lists the globals ("module.name") that may occur; "module.*"
  /// stands for all of a module, "*" for all. Throws Error for any other one, and for whatever is malformed or of no use in checkpoints
  /// (extension codes, out-of-band buffers, protocols 0 and 1).
  Pickle(std::string_view data, std::string file, std::span<const std::string_view> allowed);
  Pickle(const Pickle&) = delete;
  Pickle& operator=(const Pickle&) = delete;

  const PickleValue& root() const { return *root_; }
  /// The globals that occur, in the order of their first occurrence.
  const std::vector<std::string_view>& globals() const { return globals_; }
  const std::string& file() const { return file_; }
  /// The size of the input, in bytes.
  std::size_t size() const { return size_; }

 private:
  friend class PickleReader;

  std::string file_;
  std::size_t size_;
  // All nodes, and millions of small arrays, are freed together.
  std::pmr::monotonic_buffer_resource memory_;
  // A deque: nodes point to each other. They are destroyed one by one, cycles or not.
  std::pmr::deque<PickleValue> values_{&memory_};
  std::set<std::string, std::less<>> names_;  // the names of globals that a pattern in `allowed` accepts
  std::vector<std::string_view> globals_;
  const PickleValue* root_ = nullptr;
};

/// Writes a pickle of protocol 2, which torch.load's restricted unpickler and any Python 3 read. Each call appends a value, in the order
/// that Python's stack machine needs. The elements of a container are written between begin_x() and end_x().
class PickleWriter {
 public:
  PickleWriter();

  void none() { op('N'); }
  void boolean(bool value) { op(value ? '\x88' : '\x89'); }
  void integer(std::int64_t value);
  void real(double value);
  /// Writes a string in UTF-8. Short strings that are equal are written once.
  void string(std::string_view value);
  /// Writes bytes as Python does in this protocol: as a call of _codecs.encode.
  void bytes(std::string_view value);
  void begin_tuple() { op('('); }
  void end_tuple() { op('t'); }
  void begin_list() { text_ += "]("; }
  void end_list() { op('e'); }
  void begin_dict() { text_ += "}("; }
  /// Ends a dict, whose keys and values were written alternately.
  void end_dict() { op('u'); }
  void global(std::string_view module, std::string_view name);
  /// Call it after a callable and a tuple of arguments.
  void reduce() { op('R'); }
  /// Call it after a class and a tuple of arguments for its __new__.
  void new_object() { op('\x81'); }
  /// Call it after an object and its state.
  void build() { op('b'); }
  /// Call it after the id.
  void persistent_id() { op('Q'); }
  /// Begins an instance of a class that takes no arguments; build() ends it.
  void instance(std::string_view module, std::string_view name);

  /// Returns the whole pickle. Nothing can be added after this call.
  std::string finish();

 private:
  void op(char code) { text_ += code; }
  /// If the value of `key` was written before, writes a reference to it and returns true. Otherwise the caller writes the value and calls
  /// remember().
  bool recall(const std::string& key);
  void remember(std::string key);

  std::string text_;
  std::unordered_map<std::string, std::uint32_t> memo_;
};

}  // namespace fsdp::ckpt
