#include "events/event_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace fsdp::events {
namespace {

class OpenFile {
 public:
  explicit OpenFile(const std::filesystem::path& path) : path_(path), file_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (file_ < 0) fail(std::strerror(errno));
  }
  ~OpenFile() { close(file_); }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  [[noreturn]] void fail(const std::string& text) const { throw std::runtime_error(path_.string() + ": " + text); }

  std::int64_t size() const {
    struct stat status = {};
    if (fstat(file_, &status) != 0) fail(std::strerror(errno));
    return status.st_size;
  }

  /// Returns how many bytes there were.
  std::size_t read(void* into, std::size_t begin, std::size_t bytes) const {
    std::size_t have = 0;
    while (have < bytes) {
      const auto got = pread(file_, static_cast<char*>(into) + have, bytes - have, static_cast<off_t>(begin + have));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) fail(std::strerror(errno));
      if (got == 0) break;
      have += static_cast<std::size_t>(got);
    }
    return have;
  }

  std::uint64_t written() const {
    std::uint64_t count = 0;
    read(&count, EventMemory::places().written, sizeof(count));
    return count;
  }

 private:
  const std::filesystem::path path_;
  const int file_;
};

}  // namespace

void read_file(const std::filesystem::path& path, EventMemory& into, std::size_t most_events) {
  const OpenFile file(path);
  const auto places = EventMemory::places();
  const auto read = [&](std::size_t begin, std::size_t end) {
    return file.read(reinterpret_cast<char*>(&into) + begin, begin, end - begin);
  };
  const auto have = read(0, places.entries);
  const auto& writer = into.writer();
  if (have < sizeof(EventWriter) || writer.format != EventWriter::kFormat) file.fail("no file of events");
  if (writer.version != EventWriter::kVersion) {
    file.fail("a file of events of version " + std::to_string(writer.version) + ", and this program reads version " +
              std::to_string(EventWriter::kVersion) + ": use the `fsdp` of the library that the ranks ran with");
  }
  if (file.size() != static_cast<std::int64_t>(sizeof(EventMemory)))
    file.fail("a file of events that is cut off, or longer than it should be");
  // The last events, which may lie at the end of the ring and at its beginning.
  constexpr auto kEvents = EventMemory::kEvents;
  const auto written = into.written();
  const auto count = std::min<std::uint64_t>({written, most_events, kEvents});
  const auto first = static_cast<std::size_t>((written - count) % kEvents);
  const auto place_of = [&](std::size_t entry) { return places.entries + entry * places.entry_bytes; };
  const auto until_end = std::min<std::size_t>(count, kEvents - first);
  read(place_of(first), place_of(first + until_end));
  read(place_of(0), place_of(count - until_end));
  read(places.behind_entries, places.texts);
  read(places.texts, places.texts + into.text_bytes());
  // Entries that were overwritten meanwhile may be mixed.
  const auto now = file.written();
  into.forget_until(std::max(written - count, now > kEvents ? now - kEvents : 0));
}

std::uint64_t written_to(const std::filesystem::path& path) noexcept {
  try {
    return OpenFile(path).written();
  } catch (const std::exception&) {
    return 0;
  }
}

}  // namespace fsdp::events
