#include "state/ranks.h"

#include <torch/torch.h>

#include <algorithm>
#include <cstring>

#include "fsdp/error.h"

namespace fsdp::state {
namespace {

/// Every rank's tensor, stacked by index.
at::Tensor exchange(const std::vector<std::shared_ptr<comm::Communicator>>& communicators, const at::Tensor& mine, const char* operation) {
  const comm::Label label{.operation = operation, .unit = "(checkpoint)"};
  auto all = mine;
  for (auto communicator = communicators.rbegin(); communicator != communicators.rend(); ++communicator) {
    all = (*communicator)->exchange(all.reshape({-1}), label);
  }
  return all.reshape({-1, mine.numel()});
}

std::string text_of(const std::exception_ptr& failure) {
  if (!failure) return {};
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return *error.what() == '\0' ? "unknown error" : error.what();
  } catch (...) {
    return "unknown error";
  }
}

}  // namespace

Ranks::Ranks(const engine::Engine& engine, Groups groups) {
  for (const auto& mesh : {engine.tensor_parallel(), engine.mesh()}) {
    if (!mesh.defined()) continue;
    for (const auto& dim : mesh.dims()) {
      communicators_.push_back(groups == Groups::kOwn ? mesh.new_communicator(dim.name) : mesh.communicator(dim.name));
      index_ = index_ * dim.size + mesh.coordinate(dim.name);
    }
    size_ *= mesh.size();
  }
}

std::vector<std::string> Ranks::gather(const std::string& mine, const char* operation) const {
  const auto lengths = exchange(communicators_, at::full({1}, static_cast<std::int64_t>(mine.size()), at::kLong), operation);
  const auto longest = lengths.max().item<std::int64_t>();
  std::vector<std::string> all(static_cast<std::size_t>(size_));
  if (longest == 0) return all;
  const auto padded = at::zeros({longest}, at::kByte);
  std::memcpy(padded.data_ptr(), mine.data(), mine.size());
  const auto texts = exchange(communicators_, padded, operation);
  for (std::int64_t rank = 0; rank < size_; ++rank) {
    all[static_cast<std::size_t>(rank)].assign(reinterpret_cast<const char*>(texts.const_data_ptr<std::uint8_t>()) + rank * longest,
                                               static_cast<std::size_t>(lengths.const_data_ptr<std::int64_t>()[rank]));
  }
  return all;
}

void Ranks::agree(const std::exception_ptr& failure, const std::string& what) const {
  const auto failures = gather(text_of(failure), "checkpoint: did all ranks succeed");
  std::string text;
  for (std::size_t rank = 0; rank < failures.size(); ++rank) {
    if (failures[rank].empty()) continue;
    // What all see alike, the first one tells.
    if (std::find(failures.begin(), failures.begin() + static_cast<std::ptrdiff_t>(rank), failures[rank]) !=
        failures.begin() + static_cast<std::ptrdiff_t>(rank)) {
      continue;
    }
    text += "\n  rank " + std::to_string(rank) + ": " + failures[rank];
  }
  if (!text.empty()) throw Error(what + text);
}

}  // namespace fsdp::state
