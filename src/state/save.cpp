#include <c10/util/ScopeExit.h>
#include <unistd.h>

#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "checkpoint/commit.h"
#include "engine/engine.h"
#include "fsdp/error.h"
#include "fsdp/fsdp_module.h"
#include "fsdp/save_load.h"
#include "memory/device_memory.h"
#include "state/memory_tier.h"
#include "state/retention.h"
#include "state/snapshot.h"

namespace fsdp {
namespace {

using state::CheckpointRanks;
using state::Snapshot;

constexpr const char* kNothingSaved = "nothing was saved:";
constexpr int kNiceWhileWriting = 10;  // The thread gets a tenth of a core that training also uses, and all of an idle core.

/// Takes a snapshot of this rank's part. Throws Error on every rank if one fails. With a buffer, the values are in the buffer once it has
/// finished.
Snapshot snapshot_of(torch::nn::Module& module, Optimizer* optimizer, const ExtraState& extra, const SaveOptions& options,
                     const CheckpointRanks& ranks, state::HostBuffer* buffer, state::Phases& phases) {
  Snapshot snapshot;
  ranks.together(kNothingSaved, [&] {
    if (buffer != nullptr) state::check_retention(options);  // not only when it is written
    snapshot = state::take_snapshot(module, optimizer, extra, options, ranks);
    if (buffer != nullptr) buffer->begin(snapshot);
  });
  phases.end(Phase::kCollect, state::bytes_of(snapshot));
  return snapshot;
}

void save_all(const std::string& path, torch::nn::Module& module, Optimizer* optimizer, const ExtraState& extra,
              const SaveOptions& options) {
  const auto engine = handle(module).engine();
  memory::synchronize(engine->options().device());  // an update may still be on its way to offloaded state
  const CheckpointRanks ranks(*engine, CheckpointRanks::Groups::kOfMesh);
  state::Phases phases(options.on_phase);
  const auto snapshot = snapshot_of(module, optimizer, extra, options, ranks, nullptr, phases);
  state::write_checkpoint(path, snapshot, options, ranks, phases);
}

}  // namespace

void save(const std::string& path, torch::nn::Module& module, const ExtraState& extra, SaveOptions options) {
  save_all(path, module, nullptr, extra, options);
}

void save(const std::string& path, torch::nn::Module& module, Optimizer& optimizer, const ExtraState& extra, SaveOptions options) {
  save_all(path, module, &optimizer, extra, options);
}

namespace state {

/// One save beside training at a time.
class BackgroundSave {
 public:
  /// Writes a snapshot; `phases` began with it.
  using Write = std::function<void(const Snapshot& snapshot, const CheckpointRanks& ranks, state::Phases& phases)>;

  explicit BackgroundSave(engine::Engine& engine) : ranks(engine, CheckpointRanks::Groups::kOwn), buffer_(engine.options().device()) {}
  ~BackgroundSave() { join(); }
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;

  void wait() {
    join();
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

  /// Takes a snapshot and begins to write it. Call it after wait().
  void begin(torch::nn::Module& module, Optimizer* optimizer, const ExtraState& extra, const SaveOptions& options, Write write) {
    state::Phases phases(options.on_phase);
    auto snapshot = snapshot_of(module, optimizer, extra, options, ranks, &buffer_, phases);
    std::promise<void> copied;
    handle(module).engine()->main().set_reader(copied.get_future());
    process_ = getpid();
    thread_ = std::thread([this, write = std::move(write), snapshot = std::move(snapshot), copied = std::move(copied), phases]() mutable {
      finish(snapshot, std::move(copied), write, phases);
    });
  }

  const CheckpointRanks ranks;  // with communicators of their own, because the thread uses them while the model trains

 private:
  void join() {
    // The thread of a forked process's parent can't be joined.
    if (thread_.joinable()) process_ == getpid() ? thread_.join() : thread_.detach();
  }

  /// Finishes the copy of `snapshot`, reports it, and writes it.
  void finish(const Snapshot& snapshot, std::promise<void> copied, const Write& write, state::Phases& phases) {
    try {
      ranks.together(kNothingSaved, [&] {
        const auto tell = c10::make_scope_exit([&] { copied.set_value(); });
        buffer_.finish();
      });
      // This changes the priority of this thread only, as on Linux each thread has its own. It is done after the copy, because an update
      // may wait for the copy.
      [[maybe_unused]] const int now = ::nice(kNiceWhileWriting);
      write(snapshot, ranks, phases);
    } catch (const std::exception&) {
      failure_ = std::current_exception();
    }
  }

  state::HostBuffer buffer_;
  // There is one thread per save, beside which training continues. It ends when the files are committed. `failure_`, which it writes, is
  // read after it was joined.
  std::thread thread_;
  pid_t process_ = 0;  // that has started the thread
  std::exception_ptr failure_;
};

}  // namespace state

namespace {

/// The program may change its working directory while a save runs.
std::string absolute(const std::string& path) {
  std::error_code unknown;  // the working directory may be unknown, because it was removed; then the path stays relative
  const auto absolute = std::filesystem::absolute(path, unknown);
  return unknown || path.empty() ? path : absolute.string();
}

}  // namespace

struct AsyncSaver::Impl {
  Impl(torch::nn::Module& module_, Optimizer* optimizer_, const AsyncSaverOptions& options)
      : module(module_), optimizer(optimizer_), engine(handle(module_).engine()), disk(*engine) {
    // A rank that has no folder, while others have, gets an error with them.
    if (disk.ranks.all(options.memory.empty(), "checkpoint: whether there is memory")) return;
    memory.emplace(*engine);
    tier = std::make_unique<state::MemoryTier>(memory->ranks, absolute(options.memory), options.distance);
  }

  void begin_in_memory(const std::string& name, const ExtraState& extra, const SaveOptions& options, std::int64_t saved) {
    memory->begin(module, optimizer, extra, options, [this, name, saved](const Snapshot& snapshot, const auto&, state::Phases& phases) {
      tier->write(name, snapshot, saved, phases);
    });
  }

  torch::nn::Module& module;
  Optimizer* optimizer;
  std::shared_ptr<engine::Engine> engine;
  // Saves in memory do not wait for the disk, which may take minutes.
  state::BackgroundSave disk;
  std::unique_ptr<state::MemoryTier> tier;  // before `memory`, whose thread uses it
  std::optional<state::BackgroundSave> memory;
};

AsyncSaver::AsyncSaver(torch::nn::Module& module, Optimizer* optimizer, AsyncSaverOptions options)
    : impl_(std::make_unique<Impl>(module, optimizer, options)) {}

AsyncSaver::~AsyncSaver() = default;

void AsyncSaver::save(const std::string& path, const ExtraState& extra, SaveOptions options) {
  wait();
  const auto target = absolute(path);
  // Both have one number, so that neither is newer.
  const auto saved = ckpt::new_saved();
  auto in_memory = options;
  in_memory.on_phase = {};  // It would be called from two threads.
  if (impl_->tier) impl_->begin_in_memory(std::filesystem::path(target).filename().string(), extra, in_memory, saved);
  impl_->disk.begin(impl_->module, impl_->optimizer, extra, options,
                    [target, options, saved](const Snapshot& snapshot, const CheckpointRanks& ranks, state::Phases& phases) {
                      state::write_checkpoint(target, snapshot, options, ranks, phases, saved);
                    });
}

void AsyncSaver::save_in_memory(const std::string& name, const ExtraState& extra, SaveOptions options) {
  if (!impl_->tier) throw Error("save_in_memory: the saver has no folder in memory, or no longer; give AsyncSaverOptions::memory");
  wait_for_memory();
  impl_->begin_in_memory(name, extra, options, ckpt::new_saved());
}

void AsyncSaver::wait() {
  // If both have failed, the error of the disk is thrown, and the other one by the next call.
  impl_->disk.wait();
  wait_for_memory();
}

void AsyncSaver::wait_for_memory() {
  if (impl_->memory) impl_->memory->wait();
}

void AsyncSaver::remove_memory() {
  wait();
  if (!impl_->tier) return;
  impl_->tier->remove();
  impl_->tier.reset();
}

}  // namespace fsdp
