#pragma once

#include <cstdint>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "base/classic_stream.h"

namespace fsdp::events {

/// The fields of /proc/PROCESS/stat behind the program's name: the process's state first (proc(5) counts it as the third). Empty if there
/// is no such process.
inline std::vector<std::string> process_stat(std::int64_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  // The name of the program, in parentheses, may have spaces.
  const auto behind_name = text.rfind(')');
  if (behind_name == std::string::npos) return {};
  ClassicStream<std::istringstream> fields(text.substr(behind_name + 1));
  return {std::istream_iterator<std::string>(fields), {}};
}

}  // namespace fsdp::events
