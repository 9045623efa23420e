#include "collectives.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "graph.h"
#include "memory.h"
#include "streams.h"
#include "turns.h"

namespace sim {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// What one operation has sent and expects.
struct Posted {
  std::vector<WorkPtr> messages;
  std::function<void()> deliver;  ///< Writes what has come to the device. Empty: nothing comes.
};

/// A collective before it is launched, or several that are launched as one.
struct Operation {
  std::string name;
  std::vector<Range> ranges;
  std::vector<at::Tensor> tensors;
  std::vector<std::function<Posted()>> posts;
};

/// A collective that is under way. It holds itself until what comes has been written.
class Transfer : public std::enable_shared_from_this<Transfer> {
 public:
  void begin(int device, std::vector<at::Tensor> tensors) {
    self_ = shared_from_this();
    tensors_ = std::move(tensors);
    complete_at_synchronize(device, self_, [this] { complete(); });
  }
  void post(const std::vector<std::function<Posted()>>& posts) {
    for (const auto& post : posts) {
      auto posted = post();
      const std::lock_guard lock(posted_mutex_);
      posted_.push_back(std::move(posted));
    }
  }
  void set_turn(std::shared_ptr<Turn> turn) { turn_ = std::move(turn); }

  void wait_for_messages() {
    for (const WorkPtr& message : messages()) {
      if (!is_aborted_) message->wait();
    }
  }
  /// The first time, writes what has come.
  void complete() {
    const std::lock_guard lock(mutex_);
    const auto self = std::exchange(self_, nullptr);
    if (const auto record = std::exchange(record_, {})) record();
    turn_ ? turn_->wait() : wait_for_messages();  // Gloo's messages are waited for once.
    if (is_aborted_) return;
    for (const Posted& posted : std::exchange(posted_, {})) {
      if (posted.deliver) posted.deliver();
    }
  }
  /// What the first complete() says to a graph.
  void on_completion(std::function<void()> record) { record_ = std::move(record); }
  /// Nobody waits for what has not come: it never does.
  void abort() {
    is_aborted_ = true;
    for (const WorkPtr& message : messages()) {
      try {
        message->abort();
      } catch (...) {  // A collective of Gloo's, which others complete.
      }
    }
  }
  /// As NCCL's backend keeps them from others, until a stream has waited.
  void let_go_of_tensors() {
    const std::lock_guard lock(mutex_);
    tensors_.clear();
  }
  bool has_come() {
    for (const WorkPtr& message : messages()) {
      if (!message->isCompleted()) return false;
    }
    return true;
  }

 private:
  std::vector<WorkPtr> messages() {
    const std::lock_guard lock(posted_mutex_);
    std::vector<WorkPtr> all;
    for (const Posted& posted : posted_) all.insert(all.end(), posted.messages.begin(), posted.messages.end());
    return all;
  }

  std::mutex mutex_;
  std::mutex posted_mutex_;  // Any thread aborts, while one waits.
  std::vector<Posted> posted_;
  std::atomic<bool> is_aborted_ = false;
  std::vector<at::Tensor> tensors_;
  std::shared_ptr<Turn> turn_;
  std::shared_ptr<Transfer> self_;
  std::function<void()> record_;
};

class Work final : public c10d::Work {
 public:
  Work(int rank, c10d::OpType type, int device, Point end, std::shared_ptr<Transfer> transfer, bool host_waits)
      : c10d::Work(rank, type), device_(device), end_(std::move(end)), transfer_(std::move(transfer)), host_waits_(host_waits) {}

  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    transfer_->complete();
    stream_waits(current_stream(device_), end_);
    transfer_->let_go_of_tensors();
    if (host_waits_) host_waits(device_, clock_of(current_stream(device_)), "barrier");
  }
  bool isCompleted() override { return transfer_->has_come(); }
  bool isSuccess() const override { return true; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    transfer_->complete();
    const auto type = c10::ListType::create(c10::TensorType::get());
    auto future = c10::make_intrusive<c10::ivalue::Future>(type, std::vector<c10::Device>{device(device_)});
    future->markCompleted(c10::IValue(std::vector<at::Tensor>{}));
    return future;
  }

 private:
  const int device_;
  const Point end_;
  const std::shared_ptr<Transfer> transfer_;
  const bool host_waits_;
};

void check(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.device().type() == kType, "sim: a collective got a tensor of ", tensor.device());
  TORCH_CHECK(tensor.is_contiguous(), "sim: a collective got a tensor that is not contiguous");
}

/// The tensors as the CPU sees them. Addresses are those of the call: until a replay, storages may be given others.
std::vector<at::Tensor> on_cpu(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> all;
  for (const auto& tensor : tensors) all.push_back(sim::on_cpu(tensor));
  return all;
}
using sim::on_cpu;

/// What a collective has read, flat. Both work on tensors of on_cpu().
at::Tensor taken(const at::Tensor& tensor) { return tensor.reshape({-1}).clone(); }
void put(const at::Tensor& to, const at::Tensor& values) { to.copy_(values.view(to.sizes())); }

at::Tensor reduced(const at::Tensor& a, const at::Tensor& b, const c10d::ReduceOp& op) {
  if (op == c10d::ReduceOp::MAX) return at::maximum(a, b);
  if (op == c10d::ReduceOp::MIN) return at::minimum(a, b);
  TORCH_CHECK(op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::AVG, "sim: collectives have sums, averages, maxima and minima");
  return a + b;
}

/// The rows of all ranks as one. Neighbours in pairs, again and again: NCCL's order is nobody's, and this one is libfsdp's.
at::Tensor reduced(const at::Tensor& rows, const c10d::ReduceOp& op) {
  auto terms = rows.unbind(0);
  while (terms.size() > 1) {
    std::vector<at::Tensor> pairs;
    for (std::size_t k = 0; k < terms.size(); k += 2)
      pairs.push_back(k + 1 < terms.size() ? reduced(terms[k], terms[k + 1], op) : terms[k]);
    terms = std::move(pairs);
  }
  return op == c10d::ReduceOp::AVG ? terms[0] / rows.size(0) : terms[0];
}

class Collectives final : public c10d::Backend {
 public:
  Collectives(c10::intrusive_ptr<c10d::Backend> messages, CollectivesOptions options)
      : Backend(messages->getRank(), messages->getSize()),
        messages_(std::move(messages)),
        options_(c10::make_intrusive<Options>("simccl")) {
    if (options.in_turn == InTurn::kOfOneBackend) turns_ = std::make_shared<Turns>();
    if (options.in_turn == InTurn::kOfAllBackends) turns_ = Turns::of_process();
  }
  /// Turns use this, also those whose end nobody waits for because an earlier one has failed.
  ~Collectives() override {
    if (last_turn_) last_turn_->wait_until_over();
  }
  Collectives(const Collectives&) = delete;
  Collectives& operator=(const Collectives&) = delete;

  const std::string getBackendName() const override { return "simccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return 0; }
  void shutdown() override { messages_->shutdown(); }
  void abort() override {
    const std::lock_guard lock(transfers_mutex_);
    is_aborted_ = true;
    for (const auto& one : transfers_) {
      if (const auto transfer = one.lock()) transfer->abort();
    }
  }

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {
    TORCH_CHECK(!together_, "sim: a coalesced group begins within another");
    together_.emplace();
  }
  WorkPtr endCoalescing() override {
    TORCH_CHECK(together_, "sim: no coalesced group has begun");
    Operation operation = *std::exchange(together_, {});
    if (operation.posts.empty()) return nullptr;
    operation.name = "coalesced" + operation.name;
    return start(std::move(operation), c10d::OpType::COALESCED, /*async=*/true);
  }

  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    TORCH_CHECK(out.numel() == in.numel() * size_, "sim: sizes of an all-gather");
    return add(
        "all_gather", {in}, {out},
        [this, in = on_cpu(in), out = on_cpu(out)] { return gather(in, [out](const at::Tensor& all) { put(out, all); }); },
        c10d::OpType::_ALLGATHER_BASE, options.asyncOp);
  }
  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& outs, std::vector<at::Tensor>& ins,
                    const c10d::AllgatherOptions& options) override {
    const auto deliver = [outs = on_cpu(outs[0]), size = size_](const at::Tensor& all) {
      for (std::size_t rank = 0; rank < outs.size(); ++rank) put(outs[rank], all.view({size, -1})[static_cast<std::int64_t>(rank)]);
    };
    return add(
        "all_gather", {ins[0]}, outs[0], [this, in = on_cpu(ins[0]), deliver] { return gather(in, deliver); }, c10d::OpType::ALLGATHER,
        options.asyncOp);
  }
  WorkPtr allgather_into_tensor_coalesced(std::vector<at::Tensor>& outs, std::vector<at::Tensor>& ins,
                                          const c10d::AllgatherOptions& options) override {
    startCoalescing();
    for (std::size_t k = 0; k < outs.size(); ++k) _allgather_base(outs[k], ins[k], options);
    return endCoalescing();
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(in.numel() == out.numel() * size_, "sim: sizes of a reduce-scatter");
    const auto deliver = [out = on_cpu(out), op = options.reduceOp, size = size_](const at::Tensor& all) {
      put(out, reduced(all.view({size, -1}), op));
    };
    return add(
        "reduce_scatter", {in}, {out}, [this, in = on_cpu(in), deliver] { return exchange(in, deliver); },
        c10d::OpType::_REDUCE_SCATTER_BASE, options.asyncOp);
  }
  WorkPtr reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outs, std::vector<at::Tensor>& ins,
                                          const c10d::ReduceScatterOptions& options) override {
    startCoalescing();
    for (std::size_t k = 0; k < outs.size(); ++k) _reduce_scatter_base(outs[k], ins[k], options);
    return endCoalescing();
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<std::int64_t>& outs, std::vector<std::int64_t>& ins,
                        const c10d::AllToAllOptions& options) override {
    TORCH_CHECK(outs.empty() && ins.empty(), "sim: an all-to-all has equal parts");
    const auto deliver = [out = on_cpu(out)](const at::Tensor& all) { put(out, all); };
    return add(
        "all_to_all", {in}, {out}, [this, in = on_cpu(in), deliver] { return exchange(in, deliver); }, c10d::OpType::ALLTOALL_BASE,
        options.asyncOp);
  }
  WorkPtr alltoall(std::vector<at::Tensor>& outs, std::vector<at::Tensor>& ins, const c10d::AllToAllOptions& options) override {
    const auto moved = [](std::vector<at::Tensor> tensors) {
      std::erase_if(tensors, [](const at::Tensor& tensor) { return tensor.numel() == 0; });
      return tensors;
    };
    const auto own = static_cast<std::size_t>(rank_);
    TORCH_CHECK(outs[own].numel() == 0 && ins[own].numel() == 0, "sim: a rank sends itself nothing");
    const auto post = [this, outs = on_cpu(outs), ins = on_cpu(ins)] {
      Posted all;
      std::vector<std::function<void()>> deliveries;
      for (int peer = 0; peer < size_; ++peer) {
        const auto& [out, in] = std::tie(outs[static_cast<std::size_t>(peer)], ins[static_cast<std::size_t>(peer)]);
        if (out.numel() > 0) {
          auto received = receive_message(out, peer);
          all.messages.push_back(received.messages.front());
          deliveries.push_back(std::move(received.deliver));
        }
        if (in.numel() > 0) all.messages.push_back(send_message(in, peer).messages.front());
      }
      all.deliver = [deliveries] {
        for (const auto& deliver : deliveries) deliver();
      };
      return all;
    };
    return add("all_to_all", moved(ins), moved(outs), post, c10d::OpType::ALLTOALL, options.asyncOp);
  }
  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    const auto deliver = [tensor = on_cpu(tensors[0]), op = options.reduceOp, size = size_](const at::Tensor& all) {
      put(tensor, reduced(all.view({size, -1}), op));
    };
    return add(
        "all_reduce", tensors, tensors, [this, in = on_cpu(tensors[0]), deliver] { return gather(in, deliver); }, c10d::OpType::ALLREDUCE,
        options.asyncOp);
  }
  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    const bool is_root = options.rootRank == rank_;
    const auto post = [this, tensor = on_cpu(tensors[0]), options, is_root]() -> Posted {
      std::vector<at::Tensor> values = {taken(tensor)};
      auto work = messages_->broadcast(values, options);
      if (is_root) return {{work}, {}};
      return {{work}, [tensor, values] { put(tensor, values[0]); }};
    };
    const std::vector<at::Tensor> none;
    return add("broadcast", is_root ? tensors : none, is_root ? none : tensors, post, c10d::OpType::BROADCAST, options.asyncOp);
  }
  // Messages between two ranks arrive in order; tags say nothing.
  WorkPtr send(std::vector<at::Tensor>& tensors, int peer, int) override {
    return add(
        "send", tensors, {}, [this, tensor = on_cpu(tensors[0]), peer] { return send_message(tensor, peer); }, c10d::OpType::SEND, true);
  }
  WorkPtr recv(std::vector<at::Tensor>& tensors, int peer, int) override {
    return add(
        "recv", {}, tensors, [this, tensor = on_cpu(tensors[0]), peer] { return receive_message(tensor, peer); }, c10d::OpType::RECV, true);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    auto transfer = std::make_shared<Transfer>();
    transfer->post({[&]() -> Posted { return {{messages_->barrier(options)}, {}}; }});
    const int device = current_device();
    return c10::make_intrusive<Work>(rank_, c10d::OpType::BARRIER, device, point_of(current_stream(device)), transfer, /*host_waits=*/true);
  }

 private:
  WorkPtr add(const char* name, const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes, std::function<Posted()> post,
              c10d::OpType type, bool async) {
    Operation alone;
    Operation& operation = together_ ? *together_ : alone;
    for (const bool write : {false, true}) {
      for (const at::Tensor& tensor : write ? writes : reads) {
        check(tensor);
        add_ranges(operation.ranges, tensor, write);
        operation.tensors.push_back(tensor);
      }
    }
    operation.posts.push_back(std::move(post));
    operation.name += together_ ? std::string(" ") + name : name;
    return together_ ? nullptr : start(std::move(operation), type, async);
  }

  WorkPtr start(Operation operation, c10d::OpType type, bool async) {
    const int device = operation.tensors.at(0).device().index();
    const auto current = current_stream(device);
    if (!stream_) stream_ = new_stream(device);
    if (async) stream_waits(*stream_, point_of(current));
    const auto launched =
        launch(async ? *stream_ : current, "simccl::" + operation.name, operation.ranges, Counts::kAsCollective, free_at_);
    free_at_ = launched.clock.time();
    auto transfer = std::make_shared<Transfer>();
    {
      const std::lock_guard lock(transfers_mutex_);
      TORCH_CHECK(!is_aborted_, "sim: the backend of this collective was aborted");
      std::erase_if(transfers_, [](const auto& one) { return one.expired(); });
      transfers_.push_back(transfer);
    }
    transfer->begin(device, std::move(operation.tensors));
    record(async ? *stream_ : current, *transfer, operation.posts);
    if (turns_ == nullptr) {
      transfer->post(operation.posts);
    } else {
      // The transfer exists until its turn is over, and so does this: see the destructor.
      last_turn_ = turns_->queue([transfer = transfer.get(), posts = std::move(operation.posts)] {
        transfer->post(posts);
        transfer->wait_for_messages();
      });
      transfer->set_turn(last_turn_);
    }
    Point end{.clock = launched.clock, .capture = capture_of(async ? *stream_ : current)};
    auto work = c10::make_intrusive<Work>(rank_, type, device, std::move(end), transfer, /*host_waits=*/false);
    if (!async) work->synchronize();
    return work;
  }

  /// In a graph: the same messages, at the same places in the order of the stream's work.
  static void record(c10::Stream stream, Transfer& transfer, const std::vector<std::function<Posted()>>& posts) {
    if (capture_of(stream) == 0) return;
    const auto again = std::make_shared<Transfer>();
    record_in_graph(stream, [again, posts] { again->post(posts); });
    transfer.on_completion([stream, again] { record_in_graph(stream, [again] { again->complete(); }); });
    record_at_end_of_graph(stream, [again] { again->complete(); });  // where nobody has waited
  }

  Posted gather(const at::Tensor& in, const std::function<void(const at::Tensor&)>& deliver) {
    const auto own = taken(in);
    return swap(
        own, own.numel(), [](int) { return 0; }, deliver);
  }
  Posted exchange(const at::Tensor& in, const std::function<void(const at::Tensor&)>& deliver) {
    const auto own = taken(in);
    const auto numel = own.numel() / size_;
    return swap(
        own, numel, [numel](int peer) { return peer * numel; }, deliver);
  }
  /// Each rank's `numel` elements for this one, of which this one's for a peer begin at `begin_of`. Ranks whose sizes or numbers of calls
  /// differ wait for each other until the backend is aborted.
  Posted swap(const at::Tensor& own, std::int64_t numel, const std::function<std::int64_t(int)>& begin_of,
              const std::function<void(const at::Tensor&)>& deliver) {
    const auto bytes = static_cast<std::uint64_t>(numel) * own.itemsize();
    const int tag = static_cast<int>(0x40000000U | (((swaps_++ << 18U) ^ (bytes * 2654435761U >> 7U)) & 0x3fffffffU));
    const auto all = at::empty({size_ * numel}, own.options());
    const auto of_peer = [&](int peer) { return own.narrow(0, begin_of(peer), numel); };
    all.narrow(0, rank_ * numel, numel).copy_(of_peer(rank_));
    Posted posted{{}, [all, deliver] { deliver(all); }};
    for (int peer = 0; peer < size_ && numel > 0; ++peer) {
      if (peer == rank_) continue;
      std::vector<at::Tensor> values = {all.narrow(0, peer * numel, numel)};
      posted.messages.push_back(messages_->recv(values, peer, tag));
    }
    for (int peer = 0; peer < size_ && numel > 0; ++peer) {
      if (peer == rank_) continue;
      std::vector<at::Tensor> values = {of_peer(peer)};
      posted.messages.push_back(messages_->send(values, peer, tag));
    }
    return posted;
  }

  // Gloo sends the bytes of a message when its receiver is there, as NCCL does.
  Posted send_message(const at::Tensor& tensor, int peer) {
    std::vector<at::Tensor> values = {taken(tensor)};
    return {{messages_->send(values, peer, sent_[peer]++)}, {}};
  }
  Posted receive_message(const at::Tensor& tensor, int peer) {
    std::vector<at::Tensor> values = {at::empty({tensor.numel()}, tensor.options().device(at::kCPU))};
    return {{messages_->recv(values, peer, received_[peer]++)}, [tensor, values] { put(tensor, values[0]); }};
  }

  const c10::intrusive_ptr<c10d::Backend> messages_;
  const c10::intrusive_ptr<Options> options_;
  std::shared_ptr<Turns> turns_;        // null: nobody waits for one
  std::shared_ptr<Turn> last_turn_;     // of this backend's
  std::optional<c10::Stream> stream_;   // One for all collectives, as of an NCCL communicator. The first makes it, on its device.
  std::uint64_t free_at_ = 0;           // NCCL runs a communicator's collectives one after the other, whatever their streams.
  std::optional<Operation> together_;   // between startCoalescing() and endCoalescing()
  std::map<int, int> sent_, received_;  // how many messages, by peer
  std::uint64_t swaps_ = 0;
  std::mutex transfers_mutex_;  // Any thread aborts.
  std::vector<std::weak_ptr<Transfer>> transfers_;
  bool is_aborted_ = false;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_collectives(c10::intrusive_ptr<c10d::Backend> messages, CollectivesOptions options) {
  return c10::make_intrusive<Collectives>(std::move(messages), options);
}

}  // namespace sim
