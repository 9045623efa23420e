#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "engine/engine.h"
#include "fsdp/error.h"
#include "fsdp/fully_shard.h"
#include "fsdp/save_load.h"
#include "state/snapshot.h"

namespace fsdp {
namespace {

using state::Ranks;
using state::Snapshot;

/// This rank's part, or an Error on every rank.
Snapshot snapshot_of(torch::nn::Module& module, Optimizer* optimizer, const ExtraState& extra, const SaveOptions& options,
                     const Ranks& ranks) {
  Snapshot snapshot;
  std::exception_ptr failure;
  try {
    snapshot = state::take_snapshot(module, optimizer, extra, options, ranks);
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  ranks.agree(failure, "nothing was saved:");
  return snapshot;
}

void save_all(const std::string& path, torch::nn::Module& module, Optimizer* optimizer, const ExtraState& extra,
              const SaveOptions& options) {
  const Ranks ranks(*handle(module).engine(), Ranks::Groups::kOfMesh);
  state::write_checkpoint(path, snapshot_of(module, optimizer, extra, options, ranks), options, ranks);
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
      : module(module_), optimizer(optimizer_), ranks(*handle(module_).engine(), Ranks::Groups::kOwn) {}

  void wait() {
    if (thread.joinable()) thread.join();
    if (failure) std::rethrow_exception(std::exchange(failure, nullptr));
  }

  torch::nn::Module& module;
  Optimizer* optimizer;
  Ranks ranks;  // of its own: the thread speaks while the model trains
  state::HostBuffer buffer;
  // One per save: it ends when the files are committed. What it writes, `failure`, is read after it was joined.
  std::thread thread;
  std::exception_ptr failure;
};

AsyncSaver::AsyncSaver(torch::nn::Module& module, Optimizer* optimizer) : impl_(std::make_unique<Impl>(module, optimizer)) {}

AsyncSaver::~AsyncSaver() {
  if (impl_->thread.joinable()) impl_->thread.join();
}

void AsyncSaver::save(const std::string& path, const ExtraState& extra, SaveOptions options) {
  impl_->wait();
  auto snapshot = snapshot_of(impl_->module, impl_->optimizer, extra, options, impl_->ranks);
  impl_->buffer.take(snapshot);
  impl_->thread = std::thread([impl = impl_.get(), path, options, snapshot = std::move(snapshot)] {
    try {
      state::write_checkpoint(path, snapshot, options, impl->ranks);
    } catch (const std::exception&) {
      impl->failure = std::current_exception();
    }
  });
}

void AsyncSaver::wait() { impl_->wait(); }

}  // namespace fsdp
