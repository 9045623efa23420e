#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "events/rank_replay.h"

namespace fsdp::comm {

/// The progress of a rank, according to its events.
struct RankProgress {
  std::map<std::string, std::uint64_t> last_numbers;  ///< Of its calls, by the name of the row.
  bool waits = false;                                 ///< For any collective.
  std::string activity;                               ///< "in backward of 'blocks.5'".
};

/// `rows`: see EventMemory::sources().
RankProgress progress_of(const events::RankReplay& rank, const events::TextOf& text_of, const std::map<std::uint32_t, std::string>& rows);

/// Exchanges the activities of ranks of different hosts through the store that all ranks share. A rank that has waited for long asks. Each
/// rank that is not waiting answers, because it may be the missing one. A thread of the process answers: it looks for questions in the
/// store every few seconds, and does nothing on the path of a step. All functions may be called by any thread.
///
/// If the store has ended, or lacks a function that is needed (append), there are no answers and no errors.
class StoreProgress : public std::enable_shared_from_this<StoreProgress> {
 public:
  /// `store` is shared by all ranks, and its keys are used only here. `rank`: global. `interval`: the time between two looks for questions.
  StoreProgress(c10::intrusive_ptr<c10d::Store> store, std::int64_t rank, std::chrono::milliseconds interval);

  /// From now on, this rank answers with its calls in the row, until stop_answering() of the same source. `source`: the row's source of
  /// events. `is_whole` returns false if a rank of the row has ended: its waits then fail, no rank asks about them, and the store may have
  /// ended with that rank.
  void answer(std::uint32_t source, std::function<bool()> is_whole);
  /// When it returns, `is_whole` is not running, and will not be called.
  void stop_answering(std::uint32_t source) noexcept;

  /// Asks, and returns the answers by global rank. Takes two intervals.
  std::map<std::int64_t, RankProgress> ask() noexcept;

 private:
  class Thread;
  static Thread& thread();

  /// Answers if a rank has asked. Called by the thread.
  void look() noexcept;

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::int64_t rank_;
  const std::chrono::milliseconds interval_;
  std::mutex mutex_;
  std::map<std::uint32_t, std::function<bool()>> rows_;  ///< is_whole, by source; under the mutex.
  std::int64_t answered_ = 0;                            ///< The number of questions at its last answer. Used by the thread only.
  bool has_answered_ = false;                            ///< Used by the thread only.
  std::atomic<bool> is_usable_;
};

}  // namespace fsdp::comm
