#include "export/transfer_peers.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "base/exception_text.h"
#include "base/text.h"
#include "fsdp/error.h"

namespace fsdp::weights {
namespace {

constexpr const char* kAllHaveCome = "all have come";
constexpr int kTag = 0;  // The group has no other messages.

std::vector<std::uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

std::string text_of(const std::vector<std::uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

std::string key(std::int64_t number, const std::string& of) { return "libfsdp/rendezvous " + std::to_string(number) + "/" + of; }

/// What a rank has seen when the time is over.
std::string verdict_on(const std::vector<std::int64_t>& missing, std::chrono::milliseconds timeout) {
  if (missing.empty()) return kAllHaveCome;
  return "transfer_plan: " + names_of_ranks(missing) + " of the group did not arrive within " +
         shortest(static_cast<double>(timeout.count()) / 1000) + " s";
}

TransferPeers::Wait wait_for(c10::intrusive_ptr<c10d::Work> work) {
  return [work = std::move(work)](std::chrono::milliseconds timeout) {
    if (!work->wait(timeout)) throw std::runtime_error("it was aborted");
  };
}

}  // namespace

std::vector<std::string> TransferPeers::rendezvous(const std::string& text, std::chrono::milliseconds timeout) {
  const auto number = count_++;
  if (store_ == nullptr) return {text};
  try {
    return rendezvous_at(number, text, timeout);
  } catch (const CommError&) {
    throw;
  } catch (const std::exception&) {
    throw CommError("transfer_plan: the store of the process group does not answer (" + current_exception_text() +
                    "); the rank that has it may have gone");
  }
}

std::vector<std::string> TransferPeers::rendezvous_at(std::int64_t number, const std::string& text, std::chrono::milliseconds timeout) {
  std::vector<std::string> keys;
  for (int one = 0; one < size(); ++one) keys.push_back(key(number, std::to_string(one)));
  const auto end = std::chrono::steady_clock::now() + timeout;
  store_->set(keys[static_cast<std::size_t>(rank())], bytes_of(text));
  std::vector<std::int64_t> missing;
  try {
    store_->wait(keys, timeout);
  } catch (const std::exception&) {
    if (std::chrono::steady_clock::now() < end) throw;
    for (int one = 0; one < size(); ++one) {
      if (!store_->check({keys[static_cast<std::size_t>(one)]})) missing.push_back(one);
    }
  }
  const auto verdict = text_of(store_->compareSet(key(number, "verdict"), {}, bytes_of(verdict_on(missing, timeout))));
  if (verdict != kAllHaveCome) throw CommError(verdict);
  std::vector<std::string> texts;
  for (const auto& of_rank : store_->multiGet(keys)) texts.push_back(text_of(of_rank));
  if (number > 0) {  // All have left the rendezvous before, as they have come to this one.
    store_->deleteKey(key(number - 1, std::to_string(rank())));
    for (const auto* of_all : {"verdict", "left", "all have left"}) {
      if (rank() == 0) store_->deleteKey(key(number - 1, of_all));
    }
  }
  leave(number, timeout);
  return texts;
}

/// The last rank that leaves notifies the first one.
void TransferPeers::leave(std::int64_t number, std::chrono::milliseconds timeout) {
  const auto gone = key(number, "all have left");
  if (store_->add(key(number, "left"), 1) == size()) store_->set(gone, bytes_of(kAllHaveCome));
  if (rank() != 0) return;
  try {
    store_->wait({gone}, timeout);
  } catch (const std::exception&) {  // A rank has gone that needs nothing more.
  }
}

/// The tensors of all ranks, equal in size, in host memory.
std::vector<at::Tensor> TransferPeers::gather(const at::Tensor& mine) const {
  std::vector<at::Tensor> input = {mine.to(device_)};
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (int one = 0; one < size(); ++one) outputs.front().push_back(at::empty_like(input.front()));
  group_->allgather(outputs, input)->wait();
  for (auto& output : outputs.front()) output = output.cpu();
  return outputs.front();
}

std::vector<std::string> TransferPeers::exchange(const std::string& bytes) const {
  if (group_ == nullptr) return {bytes};
  const auto size = static_cast<std::int64_t>(bytes.size());
  std::vector<std::int64_t> sizes;
  for (const auto& of_rank : gather(at::full({1}, size, at::kLong))) sizes.push_back(of_rank.item<std::int64_t>());
  const auto mine = at::zeros({*std::ranges::max_element(sizes)}, at::kByte);
  std::memcpy(mine.mutable_data_ptr(), bytes.data(), bytes.size());
  std::vector<std::string> all;
  for (const auto& of_rank : gather(mine)) {
    all.emplace_back(static_cast<const char*>(of_rank.const_data_ptr()), static_cast<std::size_t>(sizes[all.size()]));
  }
  return all;
}

std::vector<TransferPeers::Wait> TransferPeers::post(const std::vector<PostedMessage>& messages) const {
  const bool coalesces = group_->getBackend(device_.type())->supportsCoalescing();
  if (coalesces) group_->startCoalescing(device_.type());
  std::vector<Wait> waits;
  for (const auto& message : messages) {
    std::vector<at::Tensor> argument = {message.bytes};
    waits.push_back(wait_for(message.sends ? group_->send(argument, message.peer, kTag) : group_->recv(argument, message.peer, kTag)));
  }
  if (coalesces) waits = {wait_for(group_->endCoalescing(device_.type()))};
  return waits;
}

}  // namespace fsdp::weights
