#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::ckpt {

/// Parses JSON of a known form as it comes, without a tree of it: in time and memory that grow with the text and no faster, whatever is in
/// it. Keys of an object must differ, and nothing is nested deeper than the form is. Errors begin with the name of the file.
class JsonEvents : private nlohmann::json_sax<nlohmann::json> {
 public:
  using Json = nlohmann::json;

  /// Throws Error if the text is no JSON, or as the events below do.
  void parse(std::string_view text);

 protected:
  JsonEvents(std::string file, std::size_t deepest) : file_(std::move(file)), deepest_(deepest) {}
  ~JsonEvents() override = default;

  /// A value that is no object and no array.
  virtual void on_value(Json value) = 0;
  /// An object or an array begins, which depth() counts already.
  virtual void on_begin(bool is_object) = 0;
  /// It ends; depth() counts it still.
  virtual void on_end() = 0;

  /// Objects and arrays that have begun and not ended.
  std::size_t depth() const { return levels_.size(); }
  /// The key, in the object or array `level` (from 1), of what comes now; empty in an array.
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
  std::vector<std::vector<std::string>> levels_;  // the keys so far of what has begun
};

/// A name or a value from a file, for a message: no longer than a line.
std::string shown(std::string_view text);

}  // namespace fsdp::ckpt
