#include "comm/collectives/store_progress.h"

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "base/classic_stream.h"
#include "base/process.h"
#include "events/event_ring.h"

namespace fsdp::comm {

using std::chrono::milliseconds;

namespace {

// Keys. A rank that answers for the first time adds its number to the list, and from then on replaces its answer.
const std::string kQuestions = "questions";
const std::string kWhoAnswered = "who";

std::string key_of(std::int64_t rank) { return "rank" + std::to_string(rank); }

/// Lines: the number of the question; the activity; and for each row its last number, a blank and its name.
std::string text_of(std::int64_t question, const RankProgress& progress) {
  std::string text = std::to_string(question) + "\n" + progress.activity + "\n";
  for (const auto& [row, number] : progress.last_numbers) text += std::to_string(number) + " " + row + "\n";
  return text;
}

RankProgress parse(std::istream& text) {
  RankProgress progress;
  std::getline(text, progress.activity);
  std::uint64_t number = 0;
  for (std::string row; text >> number && text.get() && std::getline(text, row);) progress.last_numbers[row] = number;
  return progress;
}

std::vector<std::uint8_t> to_bytes(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

RankProgress progress_of(const events::RankReplay& rank, const events::TextOf& text_of, const std::map<std::uint32_t, std::string>& rows) {
  RankProgress progress{.last_numbers = {},
                        .waits = !rank.open_waits.empty(),
                        .activity = events::position_text(rank.position.kind, text_of(rank.position.unit))};
  for (const auto& [source, row] : rows) {
    if (const auto number = rank.last_call(source); number != 0) progress.last_numbers[row] = number;
  }
  return progress;
}

/// The thread of this process that looks for questions, in all stores in which it may answer.
class StoreProgress::Thread {
 public:
  void add(const std::shared_ptr<StoreProgress>& progress) {
    const std::lock_guard<std::mutex> lock(mutex_);
    all_.push_back(progress);
    interval_ = std::min(interval_, progress->interval_);
    if (!std::exchange(runs_, true)) std::thread(&Thread::run, this).detach();
  }

 private:
  [[noreturn]] void run() {
    for (;;) {
      milliseconds interval{};
      std::vector<std::shared_ptr<StoreProgress>> answering;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        std::erase_if(all_, [](const auto& progress) { return progress.expired(); });
        for (const auto& progress : all_) answering.push_back(progress.lock());
        interval = interval_;
      }
      // The store may not answer for a long time, and other threads need not wait for it.
      for (auto& progress : answering) {
        if (progress != nullptr) progress->look();
        progress.reset();
      }
      std::this_thread::sleep_for(interval);
    }
  }

  std::mutex mutex_;
  std::vector<std::weak_ptr<StoreProgress>> all_;
  milliseconds interval_ = std::chrono::seconds(5);
  bool runs_ = false;
};

StoreProgress::Thread& StoreProgress::thread() { return of_this_process<Thread>(); }

StoreProgress::StoreProgress(c10::intrusive_ptr<c10d::Store> store, std::int64_t rank, milliseconds interval)
    : store_(std::move(store)), rank_(rank), interval_(interval), is_usable_(store_ != nullptr && store_->hasExtendedApi()) {}

void StoreProgress::answer(std::uint32_t source, std::function<bool()> is_whole) {
  bool is_first = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_first = rows_.empty();
    rows_[source] = std::move(is_whole);
  }
  if (is_first && is_usable_) thread().add(shared_from_this());
}

void StoreProgress::stop_answering(std::uint32_t source) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  rows_.erase(source);
}

void StoreProgress::look() noexcept {
  try {
    const auto answers = [&] {
      const std::lock_guard<std::mutex> lock(mutex_);
      return !rows_.empty() && std::all_of(rows_.begin(), rows_.end(), [](const auto& row) { return row.second(); });
    };
    if (!is_usable_ || !answers()) return;
    const auto questions = store_->add(kQuestions, 0);
    if (questions == answered_) return;
    auto rows = events::described_sources();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      std::erase_if(rows, [&](const auto& row) { return !rows_.contains(row.first); });
    }
    const auto progress = progress_of(events::RankReplay(events::recorded()), events::text_of, rows);
    if (progress.waits) return;
    store_->set(key_of(rank_), text_of(questions, progress));
    if (!std::exchange(has_answered_, true)) store_->append(kWhoAnswered, to_bytes(std::to_string(rank_) + "\n"));
    answered_ = questions;
  } catch (...) {  // The rank that has served the store has ended.
    is_usable_ = false;
  }
}

std::map<std::int64_t, RankProgress> StoreProgress::ask() noexcept {
  std::map<std::int64_t, RankProgress> answers;
  if (!is_usable_) return answers;
  try {
    const auto question = store_->add(kQuestions, 1);
    std::this_thread::sleep_for(2 * interval_);
    if (!store_->check({kWhoAnswered})) return answers;
    ClassicStream<std::istringstream> ranks(store_->get_to_str(kWhoAnswered));
    for (std::int64_t rank = 0; ranks >> rank;) {
      ClassicStream<std::istringstream> text(store_->get_to_str(key_of(rank)));
      std::int64_t answered = 0;
      // Earlier answers do not show where the rank is now.
      if (text >> answered && text.get() && answered >= question) answers.emplace(rank, parse(text));
    }
  } catch (...) {
    is_usable_ = false;
  }
  return answers;
}

}  // namespace fsdp::comm
