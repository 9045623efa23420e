#pragma once

#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

/// The rows of a JSON-lines file, up to a last line that is not complete; none if there is no file.
std::vector<nlohmann::json> read_log(const std::string& path);

/// A JSON-lines file that grows by a row at a time.
class Log {
 public:
  /// Rows of steps up to `keep_until` stay, so that a run that is resumed has each step once; without it, the file begins empty. Throws
  /// std::runtime_error if it cannot be written.
  Log(const std::string& path, std::optional<std::int64_t> keep_until);

  /// Written when this returns.
  void write(const nlohmann::json& row);

 private:
  std::ofstream file_;
};
