#include "torch_python/python_communicator.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "comm/call.h"
#include "comm/parts.h"
#include "fsdp/error.h"

namespace py = pybind11;

namespace fsdp::torch_python {
namespace {

/// Waits for a Python work (or for nothing, if the call was complete), and then does the rest locally.
class PythonPending final : public comm::Pending {
 public:
  PythonPending(py::object work, std::function<void()> finish) : work_(std::move(work)), finish_(std::move(finish)) {}
  ~PythonPending() override {
    try {
      wait();
    } catch (...) {  // If the result matters, the caller has waited before.
    }
  }

  void wait() override {
    if (!finish_) return;
    const auto finish = std::exchange(finish_, {});
    {
      const py::gil_scoped_acquire gil;
      const auto work = std::exchange(work_, py::object());
      if (work && !work.is_none()) work.attr("wait")();
    }
    finish();
  }

 private:
  py::object work_;
  std::function<void()> finish_;
};

template <typename Parts>
bool one_dtype(const Parts& parts, at::ScalarType (*dtype_of)(const typename Parts::value_type&)) {
  for (const auto& part : parts) {
    if (dtype_of(part) != dtype_of(parts.front())) return false;
  }
  return true;
}

/// Returns the elements as a 1-D tensor, or the bytes if several dtypes are sent together.
at::Tensor flat(const at::Tensor& tensor, bool as_bytes) {
  const auto elements = comm::flat_view(tensor, 0, tensor.numel());
  return as_bytes ? elements.view(at::kByte) : elements;
}

CommError named(const comm::Label& label, const std::string& text) {
  return CommError(label.operation + comm::of_unit(label.unit) + ": " + text);
}

/// Runs a call of Python. Exceptions also name the collective.
template <typename Call>
auto call(const comm::Label& label, const Call& body) {
  const py::gil_scoped_acquire gil;
  try {
    return body();
  } catch (py::error_already_set& error) {
    throw named(label, error.what());
  }
}

}  // namespace

PythonCommunicator::PythonCommunicator(py::object collectives, int rank, int size)
    : collectives_(std::move(collectives)), rank_(rank), size_(size) {}

PythonCommunicator::~PythonCommunicator() {
  const py::gil_scoped_acquire gil;
  collectives_ = py::object();
}

comm::MemorySource PythonCommunicator::use_memory(c10::Device, comm::BufferMemory memory) {
  uses_own_memory_ = false;
  if (memory != comm::BufferMemory::kGroup) return {};
  const py::gil_scoped_acquire gil;
  uses_own_memory_ = collectives_.attr("use_memory")().cast<bool>();
  if (!uses_own_memory_) return {};
  return [self = shared_from_this()](std::int64_t bytes) { return self->allocate(bytes); };
}

c10::DataPtr PythonCommunicator::allocate(std::int64_t bytes) const {
  const py::gil_scoped_acquire gil;
  return comm::memory_of(collectives_.attr("allocate")(bytes).cast<at::Tensor>());
}

at::Tensor PythonCommunicator::empty(std::int64_t numel, const at::TensorOptions& options) const {
  if (!uses_own_memory_ || numel == 0) return at::empty({numel}, options);
  const py::gil_scoped_acquire gil;
  const auto bytes = numel * static_cast<std::int64_t>(options.dtype().itemsize());
  return collectives_.attr("allocate")(bytes).cast<at::Tensor>().view(c10::typeMetaToScalarType(options.dtype()));
}

at::Tensor PythonCommunicator::joined(const std::vector<at::Tensor>& tensors, std::int64_t dim) const {
  if (!uses_own_memory_) return at::cat(tensors, dim);
  auto shape = tensors.front().sizes().vec();
  auto& length = shape[static_cast<std::size_t>(dim)] = 0;
  for (const auto& tensor : tensors) length += tensor.size(dim);
  at::Tensor all = empty(c10::multiply_integers(shape), tensors.front().options()).view(shape);
  at::cat_out(all, tensors, dim);
  return all;
}

std::unique_ptr<comm::Pending> PythonCommunicator::all_gather(std::span<const comm::GatherPart> given, const comm::Label& label) {
  std::vector<comm::GatherPart> parts;
  for (const auto& part : given) {
    if (part.shard.numel() > 0) parts.push_back(part);
  }
  if (parts.empty() || size_ == 1) {
    for (const auto& part : parts) comm::copy_own_shard(part, rank_);
    return std::make_unique<PythonPending>(py::object(), [] {});
  }
  const bool as_bytes = !one_dtype(
      parts, +[](const comm::GatherPart& part) { return part.shard.scalar_type(); });
  std::vector<at::Tensor> shards;
  for (const auto& part : parts) shards.push_back(flat(part.shard, as_bytes));
  const at::Tensor input = shards.size() == 1 ? shards.front() : joined(shards, 0);
  const at::Tensor output = parts.size() == 1 ? flat(parts.front().full, as_bytes) : empty(size_ * input.numel(), input.options());
  stats_.all_gathers += 1;
  stats_.all_gather_bytes += (size_ - 1) * static_cast<std::int64_t>(input.nbytes());
  auto finish = [parts, input, output, as_bytes, size = size_] {
    if (parts.size() == 1) return;
    const auto rows = output.view({size, -1});
    std::int64_t offset = 0;
    for (const auto& part : parts) {
      const auto full = flat(part.full, as_bytes).view({size, -1});
      full.copy_(rows.narrow(1, offset, full.size(1)));
      offset += full.size(1);
    }
  };
  return call(label, [&] { return std::make_unique<PythonPending>(collectives_.attr("all_gather")(output, input), std::move(finish)); });
}

std::unique_ptr<comm::Pending> PythonCommunicator::reduce_scatter(std::span<const comm::ReducePart> given, double scale,
                                                                  const comm::Label& label) {
  std::vector<comm::ReducePart> parts;
  for (const auto& part : given) {
    if (part.encoding) {
      throw named(label,
                  "torch.distributed can't send gradients in a grad_comm_format: leave the format out, or the process group "
                  "that is written in Python or observed");
    }
    if (part.out.numel() == 0) continue;
    parts.push_back(part);
    parts.back().unreduced = comm::unreduced_or_zeros(part, rank_);
    if (part.sum_dtype) parts.back().unreduced = parts.back().unreduced.to(*part.sum_dtype);
  }
  const auto deliver = [scale](const comm::ReducePart& part, const at::Tensor& sum) {
    auto result = sum.to(part.out.scalar_type()).mul(scale);
    if (part.rounded) result = result.to(part.unreduced.scalar_type());
    part.accumulate ? part.out.add_(result) : part.out.copy_(result);
  };
  if (parts.empty() || size_ == 1) {
    for (const auto& part : parts) deliver(part, part.unreduced);
    return std::make_unique<PythonPending>(py::object(), [] {});
  }
  if (!one_dtype(
          parts, +[](const comm::ReducePart& part) { return part.unreduced.scalar_type(); })) {
    throw named(label, "gradients of one unit travel in several dtypes; give the unit one reduce_dtype, or its parameters one dtype");
  }
  std::vector<at::Tensor> rows;
  for (const auto& part : parts) rows.push_back(part.unreduced.view({size_, -1}));
  const at::Tensor input = (rows.size() == 1 ? rows.front() : joined(rows, 1)).view(-1);
  const at::Tensor output = empty(input.numel() / size_, input.options());
  stats_.reduce_scatters += 1;
  stats_.reduce_scatter_bytes += (size_ - 1) * static_cast<std::int64_t>(output.nbytes());
  auto finish = [parts, input, output, deliver] {
    std::int64_t offset = 0;
    for (const auto& part : parts) {
      deliver(part, output.narrow(0, offset, part.out.numel()));
      offset += part.out.numel();
    }
  };
  return call(label,
              [&] { return std::make_unique<PythonPending>(collectives_.attr("reduce_scatter")(output, input), std::move(finish)); });
}

// torch.distributed gathers equal shards on all ranks, so each rank sends as many bytes as the one that has the most.
std::unique_ptr<comm::Pending> PythonCommunicator::gather_uneven(std::span<const comm::UnevenPart> given, const std::vector<bool>& receives,
                                                                 const comm::Label& label) {
  comm::check_parts(given, receives, *this);
  const std::vector<comm::UnevenPart> parts(given.begin(), given.end());
  for (const auto& part : parts) comm::copy_own_bytes(part, rank_);
  std::vector<std::int64_t> of_ranks(static_cast<std::size_t>(size_), 0);
  for (const auto& part : parts) {
    for (std::size_t rank = 0; rank < of_ranks.size(); ++rank) of_ranks[rank] += part.bytes[rank];
  }
  const auto most = *std::max_element(of_ranks.begin(), of_ranks.end());
  if (size_ == 1 || most == 0) return std::make_unique<PythonPending>(py::object(), [] {});
  const auto options = parts.front().own.options();
  const at::Tensor input = empty(most, options), output = empty(size_ * most, options);
  std::int64_t begin = 0;
  for (const auto& part : parts) {
    input.narrow(0, begin, part.own.numel()).copy_(part.own);
    begin += part.own.numel();
  }
  input.narrow(0, begin, most - begin).zero_();
  stats_.all_gathers += 1;
  stats_.all_gather_bytes += (size_ - 1) * most;
  auto finish = [parts, input, output, most, own = rank_, size = size_, receives = receives[static_cast<std::size_t>(rank_)]] {
    for (int rank = 0; receives && rank < size; ++rank) {
      if (rank == own) continue;
      std::int64_t offset = rank * most;
      for (const auto& part : parts) {
        const auto region = comm::region_of_rank(part, rank);
        region.copy_(output.narrow(0, offset, region.numel()));
        offset += region.numel();
      }
    }
  };
  return call(label, [&] { return std::make_unique<PythonPending>(collectives_.attr("all_gather")(output, input), std::move(finish)); });
}

std::unique_ptr<comm::Pending> PythonCommunicator::scatter(std::span<const comm::ScatterPart> parts, int root, const comm::Label& label) {
  stats_.scatters += 1;
  call(label, [&] {
    for (const auto& part : parts) collectives_.attr("scatter")(part.into, part.shards, root);
  });
  return std::make_unique<PythonPending>(py::object(), [] {});
}

at::Tensor PythonCommunicator::exchange(const at::Tensor& value, const comm::Label& label) {
  auto sizes = value.sizes().vec();
  sizes.insert(sizes.begin(), size_);
  const auto all = at::empty(sizes, value.options());
  if (size_ == 1) {
    all.copy_(value.unsqueeze(0));
    return all;
  }
  stats_.control_bytes += (size_ - 1) * static_cast<std::int64_t>(value.nbytes());
  call(label, [&] { collectives_.attr("exchange")(all, value); });
  return all;
}

std::vector<std::string> PythonCommunicator::texts_of_all(const std::string& text, const comm::Label& label) {
  const auto sizes = exchange(at::tensor({static_cast<std::int64_t>(text.size())}, at::kLong), label);
  auto padded = text;
  padded.resize(static_cast<std::size_t>(std::max<std::int64_t>(sizes.max().item<std::int64_t>(), 1)));
  const auto bytes = at::from_blob(padded.data(), {static_cast<std::int64_t>(padded.size())}, at::TensorOptions(at::kByte));
  const auto all = exchange(bytes, label);
  std::vector<std::string> texts;
  for (int rank = 0; rank < size_; ++rank) {
    texts.emplace_back(static_cast<const char*>(all[rank].const_data_ptr()), static_cast<std::size_t>(sizes[rank].item<std::int64_t>()));
  }
  return texts;
}

std::string PythonCommunicator::broadcast(const std::string& text, int root, const comm::Label& label) {
  return texts_of_all(rank_ == root ? text : "", label)[static_cast<std::size_t>(root)];
}

std::string PythonCommunicator::gather(const std::string& text, const comm::Label& label) {
  std::string all;
  for (const auto& part : texts_of_all(text, label)) all += part;
  return rank_ == 0 ? all : "";
}

void PythonCommunicator::expect_equal(const std::string& text, const comm::Label& label) {
  const auto texts = texts_of_all(text, label);
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank] == texts[0]) continue;
    const auto global_rank = [&](std::size_t position) {
      return call(label, [&] { return std::to_string(collectives_.attr("global_rank")(position).cast<std::int64_t>()); });
    };
    throw Error(std::string(label.operation) + ": ranks " + global_rank(0) + " and " + global_rank(rank) + " differ: \"" + texts[0] +
                "\" and \"" + texts[rank] + "\"");
  }
}

void PythonCommunicator::barrier() {
  call({.operation = "barrier", .unit = {}}, [&] { collectives_.attr("barrier")(); });
}

}  // namespace fsdp::torch_python
