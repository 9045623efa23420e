#include "train_gpt/log.h"

#include <filesystem>
#include <stdexcept>

namespace {

void append(std::ofstream& file, const nlohmann::json& row) {
  file << row.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << std::endl;
}

}  // namespace

std::vector<nlohmann::json> read_log(const std::string& path) {
  std::vector<nlohmann::json> rows;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    auto row = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!row.is_object()) break;
    rows.push_back(std::move(row));
  }
  return rows;
}

Log::Log(const std::string& path, std::optional<std::int64_t> keep_until) {
  if (keep_until) {
    // Beside it first, so that a program that is ended here loses nothing. A link stays a link.
    const auto place = std::filesystem::weakly_canonical(path).string();
    std::ofstream kept(place + ".new");
    for (const auto& row : read_log(path)) {
      if (row.value("step", std::int64_t{0}) <= *keep_until) append(kept, row);
    }
    std::filesystem::rename(place + ".new", place);
  }
  file_.open(path, keep_until ? std::ios::app : std::ios::trunc);
  if (!file_) throw std::runtime_error("cannot write " + path);
}

void Log::write(const nlohmann::json& row) { append(file_, row); }
