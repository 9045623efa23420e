#include "export/meetings.h"

#include <cstddef>
#include <exception>
#include <utility>

#include "base/classic_stream.h"
#include "base/exception_text.h"
#include "fsdp/error.h"

namespace fsdp::weights {
namespace {

constexpr const char* kAllHaveCome = "all have come";

std::vector<std::uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

std::string text_of(const std::vector<std::uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

std::string key(std::int64_t number, const std::string& of) { return "libfsdp/meeting " + std::to_string(number) + "/" + of; }

/// What a rank has seen when the time is over.
std::string verdict_on(const std::vector<int>& missing, std::chrono::milliseconds timeout) {
  if (missing.empty()) return kAllHaveCome;
  ClassicStream<std::ostringstream> text;
  text << "transfer_plan: " << (missing.size() == 1 ? "rank " : "ranks ");
  for (std::size_t i = 0; i < missing.size(); ++i) text << (i == 0 ? "" : ", ") << missing[i];
  text << " of the group did not come within " << static_cast<double>(timeout.count()) / 1000 << " s";
  return text.str();
}

}  // namespace

std::vector<std::string> Meetings::meet(const std::string& said, std::chrono::milliseconds timeout) {
  const auto number = count_++;
  if (store_ == nullptr) return {said};
  try {
    return meet_at(number, said, timeout);
  } catch (const CommError&) {
    throw;
  } catch (const std::exception&) {
    throw CommError("transfer_plan: the store of the process group does not answer (" + current_exception_text() +
                    "); the rank that has it may have gone");
  }
}

std::vector<std::string> Meetings::meet_at(std::int64_t number, const std::string& said, std::chrono::milliseconds timeout) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < size_; ++rank) keys.push_back(key(number, std::to_string(rank)));
  const auto end = std::chrono::steady_clock::now() + timeout;
  const auto& own = keys[static_cast<std::size_t>(rank_)];
  store_->set(own, bytes_of(said));
  std::vector<int> missing;
  try {
    store_->wait(keys, timeout);
  } catch (const std::exception&) {
    if (std::chrono::steady_clock::now() < end) throw;
    for (int rank = 0; rank < size_; ++rank) {
      if (!store_->check({keys[static_cast<std::size_t>(rank)]})) missing.push_back(rank);
    }
  }
  const auto verdict = text_of(store_->compareSet(key(number, "verdict"), {}, bytes_of(verdict_on(missing, timeout))));
  if (verdict != kAllHaveCome) throw CommError(verdict);
  std::vector<std::string> answers;
  for (const auto& answer : store_->multiGet(keys)) answers.push_back(text_of(answer));
  if (number > 0) {  // All have left the meeting before, as they have come to this one.
    store_->deleteKey(key(number - 1, std::to_string(rank_)));
    for (const auto* of_all : {"verdict", "left", "all have left"}) {
      if (rank_ == 0) store_->deleteKey(key(number - 1, of_all));
    }
  }
  leave(number, timeout);
  return answers;
}

/// The last rank that leaves tells the first one.
void Meetings::leave(std::int64_t number, std::chrono::milliseconds timeout) {
  const auto gone = key(number, "all have left");
  if (store_->add(key(number, "left"), 1) == size_) store_->set(gone, bytes_of(kAllHaveCome));
  if (rank_ != 0) return;
  try {
    store_->wait({gone}, timeout);
  } catch (const std::exception&) {  // A rank has gone that needs nothing more.
  }
}

}  // namespace fsdp::weights
