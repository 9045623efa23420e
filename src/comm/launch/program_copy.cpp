#include "comm/launch/program_copy.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>

#include "base/classic_stream.h"
#include "fsdp/error.h"

extern char** environ;

namespace fsdp::comm {
namespace {

constexpr const char* kReportFd = "FSDP_LAUNCH_REPORT_FD";
constexpr const char* kEarlierResults = "FSDP_LAUNCH_EARLIER_RESULTS";  // by comma

std::vector<std::string> own_arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::vector<std::string> arguments;
  for (std::size_t begin = 0; begin < bytes.size();) {
    const std::size_t end = std::min(bytes.find('\0', begin), bytes.size());
    arguments.push_back(bytes.substr(begin, end - begin));
    begin = end + 1;
  }
  return arguments;
}

std::vector<std::string> merged_environment(const Environment& environment) {
  std::vector<std::string> merged;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const auto overridden = [&](const auto& variable) { return text.starts_with(variable.first + "="); };
    if (std::none_of(environment.begin(), environment.end(), overridden)) merged.push_back(text);
  }
  for (const auto& [name, value] : environment) merged.push_back(name + "=" + value);
  return merged;
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (std::string& text : strings) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

}  // namespace

std::optional<ProgramCopy> take_own_copy() {
  const char* fd = std::getenv(kReportFd);
  if (fd == nullptr) return std::nullopt;
  ProgramCopy copy{.report_fd = std::stoi(fd), .earlier_results = {}};
  const char* results = std::getenv(kEarlierResults);
  ClassicStream<std::istringstream> stream(results == nullptr ? "" : results);
  for (std::string result; std::getline(stream, result, ',');) copy.earlier_results.push_back(std::stoi(result));
  unsetenv(kReportFd);
  unsetenv(kEarlierResults);
  fcntl(copy.report_fd, F_SETFD, FD_CLOEXEC);
  return copy;
}

pid_t start_copy(Environment environment, const ProgramCopy& told, std::span<const int> open_fds, std::span<const PrefixedStream> output) {
  environment.emplace_back(kReportFd, std::to_string(told.report_fd));
  std::string results;
  for (const int result : told.earlier_results) {
    if (!results.empty()) results += ',';
    results += std::to_string(result);
  }
  environment.emplace_back(kEarlierResults, results);
  // Other threads may hold the allocator's locks, so everything is made ready before the fork.
  std::vector<std::string> arguments = own_arguments();
  std::vector<std::string> variables = merged_environment(environment);
  const std::vector<char*> argv = pointers(arguments);
  const std::vector<char*> envp = pointers(variables);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) throw Error(std::string("launch_local: fork: ") + std::strerror(errno));
  if (pid == 0) {
    die_with_parent(parent);
    fcntl(told.report_fd, F_SETFD, 0);
    for (const int fd : open_fds) fcntl(fd, F_SETFD, 0);
    for (const auto& stream : output) stream.become_target();
    execve("/proc/self/exe", argv.data(), envp.data());
    constexpr char kText[] = "Fcan't run the program again";
    static_assert(kText[0] == kFailed);
    [[maybe_unused]] const ssize_t written = write(told.report_fd, kText, sizeof(kText) - 1);
    _exit(127);
  }
  return pid;
}

void die_with_parent(pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);  // It ended before the request above.
}

}  // namespace fsdp::comm
