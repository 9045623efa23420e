#include "report/native_stack.h"

#include <cxxabi.h>
#include <elf.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <string_view>

#include "base/classic_stream.h"
#include "base/program_output.h"
#include "events/program_stack.h"

namespace fsdp::report {
namespace {

using Address = std::uint64_t;

/// One line of backtrace_symbols_fd(): "/home/me/train(_Z4hangv+0x1f) [0x55d0]".
struct Frame {
  std::string module;
  std::string place;  ///< "_Z4hangv+0x1f", or "+0x11f9": an offset in the module.
  Address address = 0;
};

std::optional<Address> number_in(std::string_view text) {
  if (text.starts_with("0x")) text.remove_prefix(2);
  Address number = 0;
  const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), number, 16);
  if (failed != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

std::optional<Frame> frame_of(const std::string& line) {
  const auto open = line.rfind('(');
  const auto close = line.rfind(')');
  const auto address = line.rfind('[');
  if (open == std::string::npos || close == std::string::npos || address == std::string::npos || !(open < close && close < address))
    return std::nullopt;
  const auto number = number_in(std::string_view(line).substr(address + 1, line.find(']', address) - address - 1));
  if (!number) return std::nullopt;
  return Frame{.module = line.substr(0, open), .place = line.substr(open + 1, close - open - 1), .address = *number};
}

/// The frames of the last stack, the innermost first, without those of the signal that has asked.
std::vector<Frame> frames_in(const std::string& text) {
  std::vector<Frame> frames;
  const auto begin = text.rfind(events::kNativeStack);
  if (begin == std::string::npos) return frames;
  ClassicStream<std::istringstream> lines(text.substr(begin));
  for (std::string line; std::getline(lines, line) && line != events::kEndOfStack;) {
    if (auto frame = frame_of(line)) frames.push_back(std::move(*frame));
  }
  // The handler, and what the system has put on the stack for it, which may have no name.
  const auto kHandlersFrames = std::min<std::size_t>(2, frames.size());
  frames.erase(frames.begin(), frames.begin() + static_cast<std::ptrdiff_t>(kHandlersFrames));
  return frames;
}

/// Where the files of a process lie in its memory.
class Modules {
 public:
  explicit Modules(std::int64_t process) {
    std::ifstream file("/proc/" + std::to_string(process) + "/maps");
    for (std::string line; std::getline(file, line);) {
      ClassicStream<std::istringstream> fields(line);
      std::string range;
      std::string skipped;
      std::string path;
      fields >> range >> skipped >> skipped >> skipped >> skipped;
      std::getline(fields >> std::ws, path);
      const auto dash = range.find('-');
      if (!path.starts_with('/') || dash == std::string::npos) continue;
      const auto begin = number_in(std::string_view(range).substr(0, dash));
      const auto end = number_in(std::string_view(range).substr(dash + 1));
      if (!begin || !end) continue;
      bases_.try_emplace(path, *begin);  // The beginning of a file is mapped first.
      mappings_.push_back({.begin = *begin, .end = *end, .path = path});
    }
  }

  struct Place {
    std::string path;
    Address offset = 0;  ///< As the file counts its addresses.
  };
  std::optional<Place> find(Address address) const {
    for (const auto& mapping : mappings_) {
      if (address < mapping.begin || address >= mapping.end) continue;
      return Place{.path = mapping.path, .offset = is_position_independent(mapping.path) ? address - bases_.at(mapping.path) : address};
    }
    return std::nullopt;
  }

 private:
  struct Mapping {
    Address begin;
    Address end;
    std::string path;
  };

  static bool is_position_independent(const std::string& path) {
    Elf64_Ehdr head = {};
    std::ifstream(path, std::ios::binary).read(reinterpret_cast<char*>(&head), sizeof(head));
    return head.e_type != ET_EXEC;
  }

  std::vector<Mapping> mappings_;
  std::map<std::string, Address> bases_;
};

std::string demangled(const std::string& name) {
  int failed = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &failed), &std::free);
  return failed == 0 && text != nullptr ? text.get() : name;
}

/// "hang()+0x1f (/home/me/train)"
std::string without_line(const Frame& frame) {
  const auto plus = frame.place.rfind('+');
  const auto name = plus == std::string::npos || plus == 0 ? std::string() : demangled(frame.place.substr(0, plus));
  return name + (plus == std::string::npos ? frame.place : frame.place.substr(plus)) + " (" + frame.module + ")";
}

/// Returns addr2line's output for addresses in one file: for each of them, its lines, the innermost first. (Functions that were put into
/// others have lines of their own.) Where it knows no line, there is nothing, or the function's name alone.
std::map<Address, std::vector<std::string>> lines_in(const std::string& path, const std::vector<Address>& offsets) {
  std::vector<std::string> command = {"addr2line", "-a", "-f", "-C", "-i", "-e", path};
  for (const auto offset : offsets) {
    ClassicStream<std::ostringstream> text;
    text << "0x" << std::hex << offset;
    command.push_back(text.str());
  }
  std::map<Address, std::vector<std::string>> all;
  ClassicStream<std::istringstream> output(output_of(command));
  std::vector<std::string>* lines = nullptr;
  for (std::string function; std::getline(output, function);) {
    if (const auto address = function.starts_with("0x") ? number_in(function) : std::nullopt) {
      lines = &all[*address];
      continue;
    }
    std::string place;
    if (!std::getline(output, place) || lines == nullptr) break;
    const auto colon = place.rfind(':');
    if (colon == std::string::npos || function.starts_with('?')) continue;
    auto line = place.substr(colon + 1);
    line.resize(std::min(line.find(' '), line.size()));  // "12 (discriminator 3)"
    const bool is_known = !place.starts_with('?') && line != "0" && line != "?";
    lines->push_back(is_known ? "File \"" + place.substr(0, colon) + "\", line " + line + " in " + function : function + " (" + path + ")");
  }
  return all;
}

bool is_of_library(const std::string& path) {
  for (const char* folder : {"/lib/", "/lib64/", "/usr/lib/", "/usr/include/"}) {
    if (path.starts_with(folder)) return true;
  }
  const auto file = path.substr(path.rfind('/') + 1);
  for (const char* library : {"libtorch", "libc10", "libfsdp", "libgomp", "libmkl", "ld-linux", "linux-vdso"}) {
    if (file.starts_with(library)) return true;
  }
  return path.find("/torch/include/") != std::string::npos || path.find("/include/c++/") != std::string::npos;
}

}  // namespace

std::vector<std::string> lines_of_native_stack(const std::string& text, std::int64_t process) {
  const auto frames = frames_in(text);
  const Modules modules(process);
  std::map<std::string, std::vector<Address>> asked;  // by file
  std::vector<Modules::Place> places;
  for (std::size_t i = 0; i < frames.size(); ++i) {
    // But for the innermost one, an address is that behind a call.
    const auto call = frames[i].address - (i == 0 ? 0 : 1);
    places.push_back(modules.find(call).value_or(Modules::Place{}));
    if (!places.back().path.empty() && !is_of_library(places.back().path)) asked[places.back().path].push_back(places.back().offset);
  }
  std::map<std::string, std::map<Address, std::vector<std::string>>> known;
  for (const auto& [path, offsets] : asked) known[path] = lines_in(path, offsets);
  std::vector<std::string> lines;
  for (std::size_t i = 0; i < frames.size(); ++i) {
    const auto& of_frame = known[places[i].path][places[i].offset];
    if (of_frame.empty()) lines.push_back(without_line(frames[i]));
    lines.insert(lines.end(), of_frame.begin(), of_frame.end());
  }
  std::reverse(lines.begin(), lines.end());
  return lines;
}

bool is_of_program(const std::string& line) {
  constexpr std::string_view kFile = "File \"";
  if (line.starts_with(kFile)) return !is_of_library(line.substr(kFile.size(), line.find('"', kFile.size()) - kFile.size()));
  const auto open = line.rfind('(');
  return open == std::string::npos || !is_of_library(line.substr(open + 1, line.rfind(')') - open - 1));
}

}  // namespace fsdp::report
