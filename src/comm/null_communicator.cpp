#include "comm/null_communicator.h"

#include <ATen/ops/clone.h>
#include <ATen/ops/unsqueeze.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "comm/parts.h"

namespace fsdp::comm {
namespace {

class Nothing final : public Pending {
 public:
  void wait() override {}
};

class ToldOf final : public Pending {
 public:
  ToldOf(CollectiveListener& listener, std::size_t number) : listener_(&listener), number_(number) {}
  void wait() override {
    if (auto* listener = std::exchange(listener_, nullptr)) listener->waited(number_);
  }

 private:
  CollectiveListener* listener_;
  const std::size_t number_;
};

}  // namespace

std::unique_ptr<Pending> NullCommunicator::post(const Sent& sent, const Label& label) {
  if (listener_ == nullptr) return std::make_unique<Nothing>();
  return std::make_unique<ToldOf>(*listener_, listener_->posted(*this, sent, label));
}

std::unique_ptr<Pending> NullCommunicator::all_gather(std::span<const GatherPart> parts, const Label& label) {
  const std::int64_t bytes = check_parts(parts, size_);
  const auto sent = traffic_.sent(bytes, bytes);
  stats_.all_gather_bytes += sent.wire + sent.shared_memory;
  stats_.shared_memory_bytes += sent.shared_memory;
  ++stats_.all_gathers;
  return post(sent, label);
}

std::unique_ptr<Pending> NullCommunicator::reduce_scatter(std::span<const ReducePart> parts, double scale, const Label& label) {
  const auto sent = sent_in_reduction(traffic_, parts, check_parts(parts, *this));
  stats_.reduce_scatter_bytes += sent.wire + sent.shared_memory;
  stats_.shared_memory_bytes += sent.shared_memory;
  ++stats_.reduce_scatters;
  return post(sent, label);
}

std::unique_ptr<Pending> NullCommunicator::gather_uneven(std::span<const UnevenPart> parts, const std::vector<bool>& receives,
                                                         const Label& label) {
  stats_.all_gather_bytes += check_parts(parts, receives, *this);
  ++stats_.all_gathers;
  return std::make_unique<Nothing>();
}

std::unique_ptr<Pending> NullCommunicator::scatter(std::span<const ScatterPart> parts, int root, const Label& label) {
  stats_.scatter_bytes += check_parts(parts, root, *this);
  ++stats_.scatters;
  return std::make_unique<Nothing>();
}

at::Tensor NullCommunicator::exchange(const at::Tensor& value, const Label& label) {
  stats_.control_bytes += (size_ - 1) * static_cast<std::int64_t>(value.nbytes());
  std::vector<std::int64_t> sizes{size_};
  sizes.insert(sizes.end(), value.sizes().begin(), value.sizes().end());
  return value.unsqueeze(0).expand(sizes).clone(at::MemoryFormat::Contiguous);
}

std::string NullCommunicator::gather(const std::string& text, const Label& label) {
  std::string all;
  for (int rank = 0; rank_ == 0 && rank < size_; ++rank) all += text;
  return all;
}

}  // namespace fsdp::comm
