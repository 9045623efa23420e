#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/mesh/device_mesh_state.h"
#include "comm/parts.h"
#include "fsdp/device_mesh.h"

// A communicator that takes all the liberties that comm/communicator.h leaves it, and watches that its caller takes none.
namespace fsdp::testing {

struct UnkindOptions {
  std::uint64_t seed = 0;                                      ///< Of the delays; mixed with the rank.
  std::chrono::microseconds max_delay{1000};                   ///< Before each collective and before each wait.
  std::function<void(const std::string& misuse)> report = {};  ///< Default: fails the current test.
};

/// Passes collectives on to another communicator, in buffers of its own. The caller's destinations (`full`, `staging`, `out`, `lost`,
/// `into`) hold poison (bits that are NaN in every floating-point dtype) from the start of a collective until wait() has returned, and for
/// good if the collective is destroyed without wait(). Reported as misuse: a source (`shard`, `unreduced`, `shards`, the old value of an
/// accumulating `out`) that has changed before wait(), a destination that was written to, memory that was freed, a label that has died.
/// Contiguous CPU tensors only.
class UnkindCommunicator final : public comm::Communicator {
 public:
  UnkindCommunicator(std::shared_ptr<comm::Communicator> inner, const UnkindOptions& options)
      : inner_(std::move(inner)), state_(std::make_shared<State>(options, inner_->rank())) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::int64_t staging_numel(std::int64_t shard_numel) const override { return inner_->staging_numel(shard_numel); }
  std::int64_t staging_numel(std::int64_t shard_numel, at::ScalarType wire_dtype) const override {
    return inner_->staging_numel(shard_numel, wire_dtype);
  }
  comm::Traffic traffic() const override { return inner_->traffic(); }

  std::unique_ptr<comm::Pending> all_gather(std::span<const comm::GatherPart> parts, const comm::Label& label) override {
    auto watch = std::make_unique<Watched>(state_, label);
    std::vector<comm::GatherPart> hidden;
    for (const comm::GatherPart& part : parts) {
      const std::int64_t numel = part.shard.numel();
      hidden.push_back({.full = at::empty_like(part.full), .shard = watch->source("shard", part.shard)});
      for (int r = 0; r < size(); ++r) {
        const at::Tensor region = part.full.narrow(0, r * numel, numel);
        const bool own_source = r == rank() && region.const_data_ptr() == part.shard.const_data_ptr();
        if (!own_source) watch->destination("full", region, hidden.back().full.narrow(0, r * numel, numel));
      }
    }
    return start(std::move(watch), [&] { return inner_->all_gather(hidden, label); });
  }

  std::unique_ptr<comm::Pending> reduce_scatter(std::span<const comm::ReducePart> parts, double scale, const comm::Label& label) override {
    auto watch = std::make_unique<Watched>(state_, label);
    std::vector<comm::ReducePart> hidden;
    for (const comm::ReducePart& part : parts) {
      const at::Tensor old = part.out.clone();
      const bool gives = comm::gives({&part, 1}, rank());
      const bool in_place = gives && overlap(part.out, part.unreduced);
      hidden.push_back({.unreduced = gives ? watch->source("unreduced", part.unreduced) : part.unreduced,
                        .staging = part.staging.defined() ? at::empty_like(part.staging) : at::Tensor(),
                        .out = old,
                        .accumulate = part.accumulate,
                        .rounded = part.rounded,
                        .sum_dtype = part.sum_dtype,
                        .gives = part.gives,
                        .encoding = part.encoding});
      if (part.encoding && part.encoding->lost.defined()) {
        hidden.back().encoding->lost = part.encoding->lost.clone();
        watch->destination("lost", part.encoding->lost, hidden.back().encoding->lost);
      }
      if (part.staging.defined()) watch->destination("staging", part.staging, {});
      if (in_place) {
        watch->delivery(part.out, old);  // Until then it is a part of the source.
      } else {
        watch->destination("out", part.out, old);
      }
    }
    return start(std::move(watch), [&] { return inner_->reduce_scatter(hidden, scale, label); });
  }

  std::unique_ptr<comm::Pending> gather_uneven(std::span<const comm::UnevenPart> parts, const std::vector<bool>& receives,
                                               const comm::Label& label) override {
    auto watch = std::make_unique<Watched>(state_, label);
    std::vector<comm::UnevenPart> hidden;
    for (const comm::UnevenPart& part : parts) {
      comm::UnevenPart copy{.whole = {}, .own = watch->source("own", part.own), .bytes = part.bytes};
      if (part.whole.defined()) {
        copy.whole = at::empty_like(part.whole);
        if (overlap(part.own, part.whole)) {
          watch->delivery(part.whole, copy.whole);
        } else {
          watch->destination("whole", part.whole, copy.whole);
        }
      }
      hidden.push_back(std::move(copy));
    }
    return start(std::move(watch), [&] { return inner_->gather_uneven(hidden, receives, label); });
  }

  std::unique_ptr<comm::Pending> scatter(std::span<const comm::ScatterPart> parts, int root, const comm::Label& label) override {
    auto watch = std::make_unique<Watched>(state_, label);
    std::vector<comm::ScatterPart> hidden;
    for (const comm::ScatterPart& part : parts) {
      comm::ScatterPart copy{.shards = {}, .into = at::empty_like(part.into)};
      bool own_source = false;
      if (rank() == root) {
        for (const at::Tensor& shard : part.shards) {
          copy.shards.push_back(watch->source("shard", shard));
          own_source = own_source || overlap(shard, part.into);
        }
      }
      if (!own_source) watch->destination("into", part.into, copy.into);
      hidden.push_back(std::move(copy));
    }
    return start(std::move(watch), [&] { return inner_->scatter(hidden, root, label); });
  }

  at::Tensor exchange(const at::Tensor& value, const comm::Label& label) override {
    state_->delay();
    return counted([&] { return inner_->exchange(value, label); });
  }
  std::string broadcast(const std::string& text, int root, const comm::Label& label) override {
    state_->delay();
    return counted([&] { return inner_->broadcast(text, root, label); });
  }
  std::string gather(const std::string& text, const comm::Label& label) override {
    state_->delay();
    return counted([&] { return inner_->gather(text, label); });
  }
  void expect_equal(const std::string& text, const comm::Label& label) override {
    state_->delay();
    counted([&] { inner_->expect_equal(text, label); });
  }
  void barrier() override {
    state_->delay();
    counted([&] { inner_->barrier(); });
  }
  void confirm() override { inner_->confirm(); }

 private:
  /// What the communicator and its pending collectives share.
  struct State {
    State(const UnkindOptions& options, int rank) : options(options), random(options.seed * 1'000'003 + static_cast<std::uint64_t>(rank)) {}

    void delay() {
      const auto longest = options.max_delay.count();
      if (longest > 0) usleep(static_cast<useconds_t>(random() % static_cast<std::uint64_t>(longest + 1)));
    }

    void report(const std::string& misuse) const {
      if (options.report) {
        options.report(misuse);
      } else {
        ADD_FAILURE() << misuse;
      }
    }

    const UnkindOptions options;
    std::mt19937_64 random;
  };

  static bool overlap(const at::Tensor& a, const at::Tensor& b) {
    const auto* a_begin = static_cast<const char*>(a.const_data_ptr());
    const auto* b_begin = static_cast<const char*>(b.const_data_ptr());
    return a.nbytes() > 0 && b.nbytes() > 0 && a_begin < b_begin + b.nbytes() && b_begin < a_begin + a.nbytes();
  }

  class Watched final : public comm::Pending {
   public:
    Watched(std::shared_ptr<State> state, const comm::Label& label)
        : state_(std::move(state)),
          label_(label),
          unit_(label.unit),
          name_(std::string(label.operation) + " of unit '" + std::string(label.unit) + "'") {}

    ~Watched() override {
      if (done_ || inner_ == nullptr) return;
      inner_.reset();  // Waits. What it brought is not delivered: nobody may look at it.
      check();
    }

    void wait() override {
      if (done_) return;
      state_->delay();
      inner_->wait();
      check();
      // Only now: results that come from the same memory as a source must not hide a change of it.
      for (const auto& [to, from] : deliveries_) {
        if (to.numel() > 0 && is_there(to)) std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
      }
      done_ = true;
    }

    void begin(std::unique_ptr<comm::Pending> inner) {
      inner_ = std::move(inner);
      for (const Region& region : destinations_) std::memset(region.tensor.mutable_data_ptr(), kPoison, region.tensor.nbytes());
    }

    /// What travels instead of `tensor`: a copy, with which it is compared in the end.
    at::Tensor source(const char* name, const at::Tensor& tensor) {
      at::Tensor copy = tensor.clone();
      if (tensor.numel() > 0) sources_.push_back({name, tensor, tensor.const_data_ptr(), copy});
      return copy;
    }

    /// `result` is undefined where nothing is delivered.
    void destination(const char* name, const at::Tensor& tensor, const at::Tensor& result) {
      if (tensor.numel() == 0) return;
      destinations_.push_back({name, tensor, tensor.const_data_ptr(), {}});
      if (result.defined()) delivery(tensor, result);
    }

    void delivery(const at::Tensor& to, const at::Tensor& from) { deliveries_.emplace_back(to, from); }

   private:
    static constexpr unsigned char kPoison = 0xff;

    struct Region {
      const char* name;
      at::Tensor tensor;
      const void* address;
      at::Tensor copy;
    };

    static bool is_there(const at::Tensor& tensor) {
      const auto end = static_cast<std::size_t>(tensor.storage_offset()) * tensor.itemsize() + tensor.nbytes();
      return tensor.storage().nbytes() >= end;
    }

    void check() {
      if (std::string_view(label_.unit) != unit_) state_->report(name_ + ": the label's unit has died");
      for (const Region& region : sources_) {
        if (!check_memory(region)) continue;
        if (std::memcmp(region.address, region.copy.const_data_ptr(), region.copy.nbytes()) != 0)
          state_->report(name_ + ": " + region.name + " was changed before wait()");
      }
      for (const Region& region : destinations_) {
        if (!check_memory(region)) continue;
        const auto* bytes = static_cast<const unsigned char*>(region.address);
        if (bytes[0] != kPoison || std::memcmp(bytes, bytes + 1, region.tensor.nbytes() - 1) != 0)
          state_->report(name_ + ": " + region.name + " was written to before wait()");
      }
    }

    bool check_memory(const Region& region) {
      if (is_there(region.tensor) && region.tensor.const_data_ptr() == region.address) return true;
      state_->report(name_ + ": the memory of " + region.name + " was freed before wait()");
      return false;
    }

    const std::shared_ptr<State> state_;
    const comm::Label label_;
    const std::string unit_;
    const std::string name_;
    std::unique_ptr<comm::Pending> inner_;
    std::vector<Region> sources_;
    std::vector<Region> destinations_;
    std::vector<std::pair<at::Tensor, at::Tensor>> deliveries_;
    bool done_ = false;
  };

  template <typename Start>
  std::unique_ptr<comm::Pending> start(std::unique_ptr<Watched> watch, const Start& inner) {
    state_->delay();
    watch->begin(counted(inner));
    return watch;
  }

  /// What the inner communicator counts during a call is counted here too.
  template <typename Call>
  std::invoke_result_t<Call> counted(const Call& call) {
    struct Count {
      ~Count() {
        const comm::CommStats& after = inner.stats();
        stats.all_gather_bytes += after.all_gather_bytes - before.all_gather_bytes;
        stats.reduce_scatter_bytes += after.reduce_scatter_bytes - before.reduce_scatter_bytes;
        stats.scatter_bytes += after.scatter_bytes - before.scatter_bytes;
        stats.control_bytes += after.control_bytes - before.control_bytes;
        stats.control_messages += after.control_messages - before.control_messages;
        stats.all_gathers += after.all_gathers - before.all_gathers;
        stats.reduce_scatters += after.reduce_scatters - before.reduce_scatters;
        stats.scatters += after.scatters - before.scatters;
      }
      const comm::Communicator& inner;
      comm::CommStats& stats;
      const comm::CommStats before;
    } count{*inner_, stats_, inner_->stats()};
    return call();
  }

  const std::shared_ptr<comm::Communicator> inner_;
  const std::shared_ptr<State> state_;
};

/// A mesh of CPUs whose communicators, and those that are made from it, are unkind.
inline DeviceMesh unkind(const DeviceMesh& mesh, const UnkindOptions& options) {
  auto state = std::make_shared<DeviceMesh::State>();
  state->device = mesh.device();
  state->rank = mesh.rank();
  state->dims = mesh.dims();
  for (const MeshDim& dim : mesh.dims()) {
    state->coordinates.push_back(mesh.coordinate(dim.name));
    auto make = [mesh, options, name = dim.name](std::int64_t neighbours) {
      return std::make_shared<UnkindCommunicator>(mesh.new_communicator(name, neighbours), options);
    };
    auto communicator = std::make_shared<UnkindCommunicator>(mesh.communicator(dim.name), options);
    state->rows.push_back(std::make_shared<MeshRow>(MeshRow{.communicator = std::move(communicator), .make = std::move(make)}));
  }
  return DeviceMesh(std::move(state));
}

}  // namespace fsdp::testing
