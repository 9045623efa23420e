#include "checkpoint/json_events.h"

#include <algorithm>
#include <utility>

#include "fsdp/error.h"

namespace fsdp::ckpt {

void JsonEvents::parse(std::string_view text) { Json::sax_parse(text.begin(), text.end(), static_cast<nlohmann::json_sax<Json>*>(this)); }

const std::string& JsonEvents::key_in(std::size_t level) const {
  static const std::string none;
  const auto& keys = levels_[level - 1];
  return keys.empty() ? none : keys.back();
}

void JsonEvents::fail(const std::string& why) const { throw Error(file_ + ": " + why); }

bool JsonEvents::null() { return on_value(nullptr), true; }
bool JsonEvents::boolean(bool value) { return on_value(value), true; }
bool JsonEvents::number_integer(number_integer_t value) { return on_value(value), true; }
bool JsonEvents::number_unsigned(number_unsigned_t value) { return on_value(value), true; }
bool JsonEvents::number_float(number_float_t value, const string_t& /*text*/) { return on_value(value), true; }
bool JsonEvents::string(string_t& value) { return on_value(std::move(value)), true; }
bool JsonEvents::binary(binary_t& /*value*/) { fail("not JSON, but a binary form of it"); }

bool JsonEvents::start_object(std::size_t /*size*/) { return begin(true); }
bool JsonEvents::start_array(std::size_t /*size*/) { return begin(false); }
bool JsonEvents::end_object() { return end(); }
bool JsonEvents::end_array() { return end(); }

bool JsonEvents::key(string_t& value) {
  levels_.back().push_back(std::move(value));
  return true;
}

bool JsonEvents::parse_error(std::size_t /*position*/, const std::string& /*token*/, const nlohmann::detail::exception& error) {
  fail("not valid JSON: " + std::string(error.what()).substr(0, 200));
}

bool JsonEvents::begin(bool is_object) {
  if (levels_.size() >= deepest_) fail("the JSON is nested deeper than this format is");
  levels_.emplace_back();
  on_begin(is_object);
  return true;
}

bool JsonEvents::end() {
  on_end();
  auto& keys = levels_.back();
  // Not by a hash table: a malicious file could have keys that all collide.
  std::sort(keys.begin(), keys.end());
  const auto twice = std::adjacent_find(keys.begin(), keys.end());
  if (twice != keys.end()) fail("the key '" + shown(*twice) + "' is there twice");
  levels_.pop_back();
  return true;
}

std::string shown(std::string_view text) {
  constexpr std::size_t kMost = 200;
  if (text.size() <= kMost) return std::string(text);
  auto end = kMost;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;  // not within a character
  return std::string(text.substr(0, end)) + "...";
}

}  // namespace fsdp::ckpt
