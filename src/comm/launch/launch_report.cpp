#include "comm/launch/launch_report.h"

#include <algorithm>
#include <cstring>
#include <iostream>
#include <string>
#include <utility>

#include "base/text.h"
#include "comm/launch/endings.h"

namespace fsdp::comm {
namespace {

/// Returns the text that follows the rank's name.
std::string describe(const RankProcess& process) {
  if (!process.returned() && !process.report.empty()) return " failed: " + process.report.substr(1);
  if (WIFSIGNALED(process.status)) {
    const int signal = WTERMSIG(process.status);
    return " was killed by signal " + std::to_string(signal) + " (" + strsignal(signal) + ")";
  }
  const std::string code = std::to_string(WEXITSTATUS(process.status));
  if (process.returned()) return " failed: exit code " + code;
  if (process.collected_elsewhere) return " ended before its function returned";
  return " left by exit(" + code + ") before its function returned";
}

struct FailureMessage {
  std::string text;
  std::vector<std::int64_t> ranks;
};

void add_message(std::vector<FailureMessage>& messages, std::int64_t rank, std::string text) {
  const auto same = std::find_if(messages.begin(), messages.end(), [&](const FailureMessage& message) { return message.text == text; });
  // "rank 1 was ..., rank 2 was ...": only texts that read well for several ranks are joined.
  if (same != messages.end() && text.starts_with(" failed: ")) {
    same->ranks.push_back(rank);
  } else {
    messages.push_back({.text = std::move(text), .ranks = {rank}});
  }
}

}  // namespace

int report_failures(const std::vector<RankProcess>& ranks, const std::vector<RankProcess*>& failures, std::chrono::milliseconds grace) {
  const auto own = [](const RankProcess* process) { return !process->stopped_by_us && !process->noticed_a_peer(); };
  const bool any_own = std::any_of(failures.begin(), failures.end(), own);
  int result = 0;
  std::vector<FailureMessage> messages;
  bool noticed = false;
  for (const RankProcess* process : failures) {
    if (process->stopped_by_us) {
      const auto seconds = shortest(std::chrono::duration<double>(grace).count());
      add_message(messages, process->rank, " did not end within " + seconds + " s after the first failure and was stopped");
    } else if (own(process) || !any_own) {
      noticed = noticed || process->noticed_a_peer();
      add_message(messages, process->rank, describe(*process));
      const int code = WIFEXITED(process->status) ? WEXITSTATUS(process->status) : 1;
      if (result == 0 || result == 1) result = std::max(code, 1);
    }
  }
  for (const auto& [text, of] : messages) std::cerr << names_of_ranks(of) + text + "\n";
  if (noticed) {
    std::vector<std::int64_t> ended;
    for (const RankProcess& process : ranks) {
      if (!process.failed()) ended.push_back(process.rank);
    }
    if (!ended.empty()) std::cerr << describe_ended(ended) + "\n";
  }
  std::cerr.flush();
  return result;
}

}  // namespace fsdp::comm
