#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::ckpt {

/// Parses JSON of a known form as a stream of events, without building a tree. Time and memory grow linearly with the text, whatever it
/// contains. Keys of an object must differ, and nothing is nested deeper than the form is. Errors begin with the name of the file.
class JsonEvents : private nlohmann::json_sax<nlohmann::json> {
 public:
  using Json = nlohmann::json;

  /// Throws Error if the text is no JSON, or as the events below do.
  void parse(std::string_view text);

 protected:
  JsonEvents(std::string file, std::size_t deepest) : file_(std::move(file)), deepest_(deepest) {}
  ~JsonEvents() override = default;

  /// Called for a value that is neither an object nor an array.
  virtual void on_value(Json value) = 0;
  /// Called when an object or an array begins; depth() counts it already.
  virtual void on_begin(bool is_object) = 0;
  /// Called when it ends; depth() still counts it.
  virtual void on_end() = 0;

  /// The number of objects and arrays that have begun and not ended.
  std::size_t depth() const { return levels_.size(); }
  /// The key of the present event in the object at depth `level` (from 1); empty if there is an array at that depth.
  const std::string& key_in(std::size_t level) const;
  [[noreturn]] void fail(const std::string& why) const;

 private:
  bool null() override;
  bool boolean(bool value) override;
  bool number_integer(number_integer_t value) override;
  bool number_unsigned(number_unsigned_t value) override;
  bool number_float(number_float_t value, const string_t& text) override;
  bool string(string_t& value) override;
  bool binary(binary_t& value) override;
  bool start_object(std::size_t size) override;
  bool key(string_t& value) override;
  bool end_object() override;
  bool start_array(std::size_t size) override;
  bool end_array() override;
  bool parse_error(std::size_t position, const std::string& token, const nlohmann::detail::exception& error) override;

  bool begin(bool is_object);
  bool end();

  std::string file_;
  std::size_t deepest_;
  std::vector<std::vector<std::string>> levels_;  // for each object or array that has begun: its keys so far
};

/// Shortens a name or a value from a file to at most a line, for a message.
std::string shown(std::string_view text);

}  // namespace fsdp::ckpt
