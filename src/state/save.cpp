#include <c10/util/ScopeExit.h>
#include <unistd.h>

#include <exception>
#include <filesystem>
#include <future>
#include <system_error>
#include <thread>
#include <utility>

#include "engine/engine.h"
#include "fsdp/error.h"
#include "fsdp/fsdp_module.h"
#include "fsdp/save_load.h"
#include "memory/device_memory.h"
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

struct AsyncSaver::Impl {
  Impl(torch::nn::Module& module_, Optimizer* optimizer_)
      : module(module_),
        optimizer(optimizer_),
        engine(handle(module_).engine()),
        ranks(*engine, CheckpointRanks::Groups::kOwn),
        buffer(engine->options().device()) {}

  void join() {
    // The thread of a forked process's parent can't be joined.
    if (thread.joinable()) process == getpid() ? thread.join() : thread.detach();
  }

  void wait() {
    join();
    if (failure) std::rethrow_exception(std::exchange(failure, nullptr));
  }

  /// Finishes the copy of `snapshot`, reports it, and writes it.
  void finish(const Snapshot& snapshot, std::promise<void> copied, const std::string& path, const SaveOptions& options,
              state::Phases phases) {
    try {
      ranks.together(kNothingSaved, [&] {
        const auto tell = c10::make_scope_exit([&] { copied.set_value(); });
        buffer.finish();
      });
      // This changes the priority of this thread only, as on Linux each thread has its own. It is done after the copy, because an update
      // may wait for the copy.
      [[maybe_unused]] const int now = ::nice(kNiceWhileWriting);
      state::write_checkpoint(path, snapshot, options, ranks, phases);
    } catch (const std::exception&) {
      failure = std::current_exception();
    }
  }

  torch::nn::Module& module;
  Optimizer* optimizer;
  std::shared_ptr<engine::Engine> engine;
  CheckpointRanks ranks;  // with communicators of their own, because the thread uses them while the model trains
  state::HostBuffer buffer;
  // There is one thread per save, beside which training continues. It ends when the files are committed. `failure`, which it writes, is
  // read after it was joined.
  std::thread thread;
  pid_t process = 0;  // that has started the thread
  std::exception_ptr failure;
};

AsyncSaver::AsyncSaver(torch::nn::Module& module, Optimizer* optimizer) : impl_(std::make_unique<Impl>(module, optimizer)) {}

AsyncSaver::~AsyncSaver() { impl_->join(); }

void AsyncSaver::save(const std::string& path, const ExtraState& extra, SaveOptions options) {
  impl_->wait();
  state::Phases phases(options.on_phase);
  // The program may change its working directory meanwhile.
  std::error_code unknown;  // the working directory may be unknown, because it was removed; then the path stays relative
  const auto absolute = std::filesystem::absolute(path, unknown);
  const auto target = unknown || path.empty() ? path : absolute.string();
  auto snapshot = snapshot_of(impl_->module, impl_->optimizer, extra, options, impl_->ranks, &impl_->buffer, phases);
  std::promise<void> copied;
  impl_->engine->main().set_reader(copied.get_future());
  impl_->process = getpid();
  impl_->thread = std::thread([impl = impl_.get(), target, options, snapshot = std::move(snapshot), copied = std::move(copied),
                               phases]() mutable { impl->finish(snapshot, std::move(copied), target, options, phases); });
}

void AsyncSaver::wait() { impl_->wait(); }

}  // namespace fsdp
