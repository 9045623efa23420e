#include "export/weight_stream.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <numeric>
#include <utility>

#include "base/copies.h"
#include "base/text.h"
#include "comm/host_memory/hosts.h"
#include "comm/parts.h"
#include "fsdp/error.h"
#include "layout/unit_layout.h"
#include "memory/accounting.h"
#include "memory/device_memory.h"
#include "memory/slot_storage.h"

namespace fsdp::weights {
namespace {

constexpr const char* kGivenBack =
    "full_weights: this tensor belongs to an earlier bucket, whose memory the next one has; clone what is to be kept";
constexpr comm::Label kAgreement = {.operation = "full_weights: the next bucket", .unit = {}};
constexpr auto kKind = memory::Kind::kGatheredParameters;

at::Tensor view(const at::Tensor& bytes, std::int64_t begin, std::int64_t size) { return comm::flat_view(bytes, begin, size); }

comm::Ranks ranks_of(const Request& request) {
  if (request.meshes.empty()) return comm::Ranks(request.engines.front()->options().mesh);
  std::vector<std::shared_ptr<comm::Communicator>> rows;
  for (const auto& mesh : request.meshes) {
    for (const auto& dim : mesh.dims()) rows.push_back(mesh.communicator(dim.name));
  }
  return comm::Ranks(std::move(rows));
}

/// What all ranks must ask for alike.
std::string text_of(const Request& request, const SavedWeights* snapshot) {
  auto text = "bucket_bytes " + std::to_string(request.options.bucket_bytes) + "\ndtype " +
              (request.options.dtype ? c10::toString(*request.options.dtype) : "of the main parameters") + "\nranks " +
              name_of(request.options.ranks) + "\nsince " + (snapshot != nullptr ? text_of_snapshot(*snapshot) : "nothing") + "\n";
  if (!request.problem.empty()) text += "cannot export: " + request.problem + "\n";
  if (request.options.names) text += std::to_string(request.options.names->size()) + " names\n";
  for (const auto& entry : request.entries) {
    text += joined(entry.names, " ", in_quotes) + " " + in_brackets(entry.shape) + " " + c10::toString(entry.own.scalar_type());
    for (const auto& [up, down, scale, transposed] : entry.added) {
      text += " + " + shortest(scale) + " * '" + request.factors[up].names.front() + "' '" + request.factors[down].names.front() + "'";
    }
    text += "\n";
  }
  return text;
}

}  // namespace

WeightStream::Watched::Watched(const Entry& entry)
    : name(entry.names.front()), own(entry.own.unsafeGetTensorImpl()->version_counter()), wrapper(entry.wrapper), version(now()) {}

std::uint64_t WeightStream::Watched::now() const {
  std::uint64_t sum = 0;
  for (const auto* counter : {&own, &wrapper}) sum += counter->enabled() ? counter->current_version() : 0;  // Inference tensors have none.
  return sum;
}

WeightStream::WeightStream(Request request) : engines_(request.engines), since_(request.options.since), ranks_(ranks_of(request)) {
  check(request);
  const auto text = text_of(request, since_ != nullptr ? since_->saved_.get() : nullptr);
  if (since_ == nullptr) {
    for (const auto* entries : {&request.entries, &request.factors}) {
      for (const auto& entry : *entries) watched_.emplace_back(entry);
    }
  }
  entries_ = std::move(request.entries);
  auto& lead = *engines_.front();
  lead.main().exclusively([&] {
    ranks_.compare(text, {.operation = "full_weights: what is asked for", .unit = {}});
    if (!request.problem.empty()) throw Error(request.problem);
    const at::NoGradGuard no_grad;
    choose_receivers(request.options.ranks);
    adapters_ = Adapters(std::move(request.factors), lead.options().mesh);
    try {
      if (since_ != nullptr) keep_changes(request.options);
      plan(request.options.bucket_bytes, request.options.dtype);
      start();
    } catch (...) {
      forget(StreamState::kFailed);
      throw;
    }
    if (buckets_.empty()) return forget(StreamState::kEnded);
    lead.main().set_export([this] { return end(); });
  });
  if (state_ != StreamState::kOpen) return;
  for (std::size_t k = 1; k < engines_.size(); ++k) {
    engines_[k]->main().exclusively([&] {
      engines_[k]->main().set_export([this] {
        std::string text;
        engines_.front()->main().exclusively([&] { text = end(); });
        return text;
      });
    });
  }
  is_known_ = true;
}

WeightStream::~WeightStream() {
  try {
    close();
  } catch (const std::exception&) {
    // The stream is no longer used. If a collective has failed, later ones throw.
  }
}

/// Completes the problem.
void WeightStream::check(Request& request) {
  if (!request.problem.empty()) return;
  try {
    for (const auto& engine : engines_) {
      engine->main().refuse_export();
      if (engine->in_backward() || torch::autograd::get_current_graph_task_id() != -1)
        throw Error("full_weights inside of a backward: call it between steps or microbatches");
    }
    if (request.options.bucket_bytes <= 0) {
      throw Error("full_weights: bucket_bytes is " + std::to_string(request.options.bucket_bytes) + "; give the most bytes of a bucket");
    }
    if (request.options.dtype && !is_converted(*request.options.dtype)) {
      throw Error(std::string("full_weights: dtype ") + c10::toString(*request.options.dtype) + " is no floating-point dtype");
    }
    if (since_ != nullptr) check_snapshot(*since_->saved_, form_of(request.entries, request.options));
  } catch (const CommError&) {
    throw;
  } catch (const Error& error) {
    request.problem = error.what();
    request.entries.clear();
  }
}

void WeightStream::choose_receivers(WeightReceivers receivers) {
  if (receivers == WeightReceivers::kFirst) receives_ = ranks_.index() == 0;
  if (receivers == WeightReceivers::kOnePerHost) {
    const auto boot = comm::Boot::of_this_host();
    const auto mine = at::empty({static_cast<std::int64_t>(sizeof(boot.id))}, at::kByte);
    std::memcpy(mine.mutable_data_ptr(), boot.id, sizeof(boot.id));
    const auto hosts = ranks_.exchange(mine, {.operation = "full_weights: hosts", .unit = {}});
    for (std::int64_t rank = 0; rank < ranks_.index(); ++rank) receives_ = receives_ && !at::equal(hosts[rank], mine);
  }
  routes_.emplace(engines_.front()->options().mesh, receives_);
}

void WeightStream::plan(std::int64_t bucket_bytes, std::optional<at::ScalarType> dtype) {
  auto courses = courses_of(entries_, *routes_);
  std::int64_t whole_bytes = 0;  // of the last bucket, as a receiver holds it
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const auto& entry = entries_[i];
    const auto travels = travelling_dtype(entry, dtype);
    const auto numel = entry.changed ? entry.changed->largest_numel : c10::multiply_integers(entry.shape);
    const auto bytes = aligned(numel * static_cast<std::int64_t>(c10::elementSize(travels)));
    // Values are in the bucket of their positions.
    const bool is_pair = entry.changed && entry.changed->is_positions;
    const auto together = bytes + (is_pair ? aligned(numel * static_cast<std::int64_t>(entries_[i + 1].own.itemsize())) : 0);
    const bool may_begin = !entry.changed || is_pair;
    if (buckets_.empty() || (may_begin && whole_bytes > 0 && whole_bytes + together > bucket_bytes)) {
      buckets_.emplace_back();
      whole_bytes = 0;
    }
    whole_bytes += bytes;
    auto& bucket = buckets_.back();
    bucket.places.push_back(place(i, std::move(courses[i]), travels, bucket.bytes));
    for (const auto& range : bucket.places.back().ranges) bucket.bytes = std::max(bucket.bytes, aligned(range.begin + range.size));
    capacity_ = std::max(capacity_, bucket.bytes);
  }
  for (std::size_t k = 0; k < buckets_.size(); ++k) {
    buckets_[k].label = "(bucket " + std::to_string(k + 1) + " of " + std::to_string(buckets_.size()) + ")";
  }
}

/// Lays out what this rank holds of an entry, from `begin` on. Ranges that it does not hold are empty.
WeightStream::Place WeightStream::place(std::size_t i, Course course, at::ScalarType dtype, std::int64_t begin) const {
  const auto itemsize = static_cast<std::int64_t>(c10::elementSize(dtype));
  Place place{.entry = i, .dtype = dtype, .route = course.route, .ranges = std::move(course.ranges), .bytes = std::move(course.numel)};
  if (place.route == nullptr) {
    place.ranges = {receives_ ? Range{begin, place.ranges.front().size * itemsize} : Range{}};
    return place;
  }
  for (auto& numel : place.bytes) {
    for (auto& of_rank : numel) of_rank *= itemsize;
  }
  auto held = place.ranges.front();
  for (std::size_t k = 0; k < place.route->rows.size(); ++k) {
    if (place.route->rows[k].receives_here()) held = place.ranges[k + 1];
  }
  for (auto& range : place.ranges) {
    const bool is_held = held.begin <= range.begin && range.begin + range.size <= held.begin + held.size;
    range = is_held ? Range{begin + (range.begin - held.begin) * itemsize, range.size * itemsize} : Range{};
  }
  return place;
}

/// Starts the gather of the next bucket. After the last one, the ranks only exchange that they continue.
void WeightStream::start() {
  if (next_ == buckets_.size()) {
    if (!buckets_.empty()) go_on(buckets_.back(), [] {});
    ++next_;
    ahead_ = {};
    return;
  }
  const auto& bucket = buckets_[next_];
  const auto to_merge = merged(bucket);
  Flight flight{.plan = &bucket, .buffer = {}, .pending = {}};
  go_on(bucket, [&] {
    flight.buffer = take_buffer(bucket.bytes);
    if (to_merge.empty()) {
      fill(bucket, flight.buffer.bytes);
    } else {
      count(adapters_.hold(to_merge));
    }
  });
  if (!to_merge.empty()) {
    adapters_.gather({.operation = "gather of adapters", .unit = bucket.label, .model = engines_.front()->options().model});
    go_on(bucket, [&] {
      adapters_.put_in_order();
      fill(bucket, flight.buffer.bytes);
    });
    count(-adapters_.release());
  }
  ahead_ = std::move(flight);
  ++next_;
  gather(ahead_);
}

/// Does `work`, which needs no other ranks, and reports to them that this rank continues. Throws on every rank if it fails on one, if one
/// has stopped, or if one has written the weights.
void WeightStream::go_on(const BucketPlan& bucket, const std::function<void()>& work) const {
  std::exception_ptr failure;
  try {
    refuse_writes();
    work();
  } catch (...) {
    failure = std::current_exception();
  }
  const auto said = tell(failure ? Says::kHasFailed : Says::kGoesOn);
  if (failure) std::rethrow_exception(failure);
  for (const auto& [rank, says] : said) {
    if (says == Says::kGoesOn) continue;
    throw Error("full_weights: rank " + std::to_string(rank) + (says == Says::kStops ? " has stopped before " : " has failed before ") +
                bucket.label.substr(1, bucket.label.size() - 2) +
                "; all ranks must take all buckets, or stop together (training can go on)");
  }
}

/// [The weights of one moment]
void WeightStream::refuse_writes() const {
  for (const auto& tensor : watched_) {
    if (tensor.now() != tensor.version) {
      throw Error("full_weights: '" + tensor.name +
                  "' was written while the weights were exported, so that some would be from before and others from after; write to the "
                  "model before full_weights, or when all buckets are taken");
    }
  }
}

/// The entries of a bucket to which products are added.
std::vector<const Entry*> WeightStream::merged(const BucketPlan& bucket) const {
  std::vector<const Entry*> found;
  for (const auto& place : bucket.places) {
    if (!entries_[place.entry].added.empty()) found.push_back(&entries_[place.entry]);
  }
  return found;
}

WeightStream::Buffer WeightStream::take_buffer(std::int64_t bytes) {
  const auto device = engines_.front()->options().mesh.device();
  Buffer buffer{.memory = std::move(spare_), .bytes = {}};
  if (!buffer.memory && capacity_ > 0) {
    RECORD_USER_SCOPE(memory::allocation_range(kKind));
    buffer.memory = memory::allocate_shareable(device, capacity_);
    count(capacity_);
  }
  const auto storage = memory::empty_storage(device);
  memory::attach(*storage.unsafeGetStorageImpl(), buffer.memory.get(), bytes);
  buffer.bytes = engine::view_of(storage, at::kByte, 0, {bytes});
  return buffer;
}

void WeightStream::detach(Buffer& buffer) {
  if (buffer.bytes.defined()) memory::detach_for_good(*buffer.bytes.storage().unsafeGetStorageImpl(), kGivenBack);
  buffer.bytes = at::Tensor();
}

/// True if this rank's part is gathered from where it lies: the code that copies other ranks' parts to their places copies this one, too.
/// (On devices, copies of a whole bucket are one launch.)
bool WeightStream::is_gathered_straight(const Place& place) const {
  const auto& entry = entries_[place.entry];
  return place.route != nullptr && entry.added.empty() && entry.own.scalar_type() == place.dtype && entry.own.is_contiguous() &&
         entry.own.is_cpu() && engines_.front()->options().mesh.device().is_cpu();
}

/// Converts this rank's parts into their places, with what is added to them.
void WeightStream::fill(const BucketPlan& bucket, const at::Tensor& buffer) const {
  Copies conversions;
  for (const auto& place : bucket.places) {
    const auto& entry = entries_[place.entry];
    const auto& range = place.ranges.front();
    if (range.size == 0 || is_gathered_straight(place)) continue;
    const auto to = view(buffer, range.begin, range.size).view(place.dtype);
    if (entry.added.empty()) {
      conversions.add(to.view(entry.own.sizes()), entry.own);
    } else {
      adapters_.merge(to, entry);
    }
  }
  conversions.run();
}

void WeightStream::gather(Flight& flight) const {
  const comm::Label label = {.operation = "gather of weights", .unit = flight.plan->label, .model = engines_.front()->options().model};
  const auto& buffer = flight.buffer.bytes;
  for (const auto& route : routes_->all()) {
    const auto& rows = route->rows;
    for (std::size_t k = 0; k < rows.size(); ++k) {
      const auto& row = rows[k];
      std::vector<comm::UnevenPart> parts;
      for (const auto& place : flight.plan->places) {
        if (place.route != route.get()) continue;
        const auto& own = place.ranges[k];
        const auto& whole = place.ranges[k + 1];
        const bool is_straight = k == 0 && own.size > 0 && is_gathered_straight(place);
        parts.push_back({.whole = row.receives_here() ? view(buffer, whole.begin, whole.size) : at::Tensor(),
                         .own = is_straight ? entries_[place.entry].own.view({-1}).view(at::kByte) : view(buffer, own.begin, own.size),
                         .bytes = place.bytes[k]});
      }
      if (parts.empty() || !row.some_receive()) continue;
      auto pending = row.ranks->gather_uneven(parts, row.receives, label);
      if (k + 1 < rows.size()) {
        pending->wait();  // The next row sends what has come.
      } else {
        flight.pending.push_back(std::move(pending));
      }
    }
  }
}

std::optional<WeightBucket> WeightStream::next() {
  if (state_ != StreamState::kOpen) return std::nullopt;
  std::optional<WeightBucket> bucket;
  engines_.front()->main().exclusively([&] {
    const at::NoGradGuard no_grad;
    try {
      detach(given_);
      if (given_.memory) spare_ = std::move(given_.memory);
      if (ahead_.plan == nullptr) return forget(StreamState::kEnded);
      for (const auto& pending : ahead_.pending) pending->wait();
      auto flight = std::exchange(ahead_, {});
      given_ = std::move(flight.buffer);
      start();
      try {
        bucket = arrived(*flight.plan, given_.bytes);
      } catch (...) {
        stop(Says::kHasFailed);
        throw;
      }
      // Nothing more is to be gathered, so the model may be used.
      if (ahead_.plan == nullptr) release_engines();
    } catch (const CommError&) {
      forget(StreamState::kFailed);
      throw;
    } catch (...) {
      forget(StreamState::kClosed);
      throw;
    }
  });
  return bucket;
}

/// The tensors of a bucket.
WeightBucket WeightStream::arrived(const BucketPlan& bucket, const at::Tensor& buffer) const {
  WeightBucket result;
  if (!receives_) return result;
  result.flat = buffer;
  for (auto place = bucket.places.begin(); place != bucket.places.end(); ++place) {
    const auto& entry = entries_[place->entry];
    const auto weight = whole(*place, buffer);
    if (entry.changed) ++place;  // to the values
    for (const auto& name : entry.names) {
      if (entry.changed) {
        result.changes.push_back({name, entry.changed->shape, weight, whole(*place, buffer)});
      } else {
        result.weights.emplace_back(name, weight);
      }
    }
  }
  return result;
}

at::Tensor WeightStream::whole(const Place& place, const at::Tensor& buffer) const {
  const auto& entry = entries_[place.entry];
  const auto& range = place.ranges.back();
  auto values = view(buffer, range.begin, range.size).view(place.dtype).view(entry.shape);
  if (!entry.changed && !arrives_in_order(entry.assembly.get(), entry.cut_by_unit(), entry.shape)) put_in_order(entry, values);
  return values;
}

/// Puts the values of a tensor, which lie as they have arrived, into their places.
void WeightStream::put_in_order(const Entry& entry, const at::Tensor& values) const {
  auto& accounting = engines_.front()->accounting();
  const auto bytes = static_cast<std::int64_t>(values.nbytes());
  accounting.add(kKind, bytes);
  try {
    assemble(entry.assembly.get(), entry.cut_by_unit(), values.flatten().clone(), values);
  } catch (...) {
    accounting.remove(kKind, bytes);
    throw;
  }
  accounting.remove(kKind, bytes);
}

std::vector<WeightStream::Said> WeightStream::tell(Says says) const {
  const auto all = ranks_.exchange(at::tensor({engines_.front()->options().mesh.rank(), static_cast<std::int64_t>(says)}), kAgreement);
  const auto* data = all.const_data_ptr<std::int64_t>();
  std::vector<Said> said;
  for (std::int64_t k = 0; k < ranks_.size(); ++k) said.push_back({.rank = data[2 * k], .says = static_cast<Says>(data[2 * k + 1])});
  return said;
}

void WeightStream::close() {
  if (state_ != StreamState::kOpen) return;
  engines_.front()->main().exclusively([&] { end(); });
}

/// Under the lock of an engine. Returns the text of the error if a use of the model ends the stream.
std::string WeightStream::end() {
  const auto text = "full_weights was left open before bucket " + std::to_string(std::min(next_ + 1, buckets_.size())) + " of " +
                    std::to_string(buckets_.size()) + " when the model was used; take all buckets, or close it, first";
  stop(Says::kStops);
  return text;
}

/// Releases everything, and reports the end to the other ranks when they request their next bucket.
void WeightStream::stop(Says says) {
  const bool others_come = next_ <= buckets_.size();
  forget(StreamState::kClosed);
  if (others_come) tell(says);
}

/// Waits for what is under way, and lets go of it.
void WeightStream::forget(StreamState state) {
  state_ = state;
  ahead_.pending.clear();
  detach(ahead_.buffer);
  detach(given_);
  ahead_ = {};
  given_ = {};
  spare_ = {};
  entries_.clear();
  watched_.clear();
  adapters_ = {};
  if (since_ != nullptr && since_->saved_->state == SnapshotState::kMoving) {
    since_->saved_->state = state == StreamState::kEnded ? SnapshotState::kKnown : SnapshotState::kUnknown;
  }
  count(-counted_bytes_);
  release_engines();
}

/// Enters memory that this stream has taken, or, below 0, has given back.
void WeightStream::count(std::int64_t bytes) {
  auto& accounting = engines_.front()->accounting();
  counted_bytes_ += bytes;
  if (bytes > 0) accounting.add(kKind, bytes);
  if (bytes < 0) accounting.remove(kKind, -bytes);
}

void WeightStream::release_engines() {
  if (!std::exchange(is_known_, false)) return;
  for (const auto& engine : engines_) engine->main().set_export({});
}

}  // namespace fsdp::weights
