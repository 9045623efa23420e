#include "export/weight_changes.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <limits>
#include <numeric>
#include <utility>

#include "base/text.h"
#include "checkpoint/digits.h"
#include "export/weight_stream.h"
#include "fsdp/error.h"

namespace fsdp::weights {
namespace {

constexpr comm::Label kComparison = {.operation = "full_weights: what has changed", .unit = {}};

std::int64_t numel_of(const std::vector<std::int64_t>& shape) { return c10::multiply_integers(shape); }

std::vector<std::int64_t> numbers_of(const at::Tensor& values) {
  const auto numbers = values.contiguous();
  return {numbers.const_data_ptr<std::int64_t>(), numbers.const_data_ptr<std::int64_t>() + numbers.numel()};
}

at::ScalarType dtype_of_positions(std::int64_t numel) { return numel <= std::numeric_limits<std::int32_t>::max() ? at::kInt : at::kLong; }

/// The places of a shard's elements in what the unit cuts, flattened. `places`: those in the shard, int64.
at::Tensor places_in_unit(const Entry& entry, const at::Tensor& places) {
  if (!entry.is_cut_by_unit()) return places;
  const auto& unit = *entry.unit;
  const auto begins = begins_by_rank(entry);
  const auto own = begins[static_cast<std::size_t>(unit.main_pieces().first)];
  if (entry.cut == 0) return places + own;
  const auto slices = unit.communicators.gather->size();
  const auto slice = unit.communicators.gather->rank();
  const auto within = places + (own - begins[static_cast<std::size_t>(unit.inner_pieces().first)]);
  const auto& shape = entry.shape_in_unit();
  const auto row = c10::multiply_integers(shape.begin() + entry.cut, shape.end());  // of the tensor
  const auto part = row / slices;                                                   // of it in a slice
  return within.div(part, "floor") * row + slice * part + within.remainder(part);
}

}  // namespace

at::Tensor bits(const at::Tensor& values) {
  switch (values.itemsize()) {
    case 1:
      return values.view(at::kByte);
    case 2:
      return values.view(at::kShort);
    case 4:
      return values.view(at::kInt);
    case 8:
      return values.view(at::kLong);
    default:
      return values.view(at::kLong).view({-1, 2});
  }
}

at::Tensor changed_elements(const at::Tensor& values, const at::Tensor& saved) {
  const auto differ = bits(values).ne(bits(saved.to(values.device())));
  return differ.dim() == 1 ? differ : differ.any(1);
}

void save_values(const at::Tensor& values, at::Tensor& saved, std::optional<at::Device> device) {
  if (!saved.defined()) saved = at::empty(values.sizes(), values.options().device(device.value_or(values.device())));
  saved.copy_(values);
}

bool is_converted(at::ScalarType dtype) { return at::isFloatingType(dtype) && dtype != at::kFloat4_e2m1fn_x2; }

at::ScalarType travelling_dtype(const Entry& entry, std::optional<at::ScalarType> dtype) {
  const auto own = entry.own.scalar_type();
  return dtype && is_converted(own) && !entry.as_is ? *dtype : own;
}

std::vector<std::int64_t> begins_by_rank(const Entry& entry) {
  const auto& layout = entry.unit->layout;
  std::vector<std::int64_t> begins = {0};
  // A complex number is two of the layout's elements.
  const auto element =
      std::max(layout.positions()[entry.parameter].numel / std::max(numel_of(entry.shape_in_unit()), std::int64_t{1}), std::int64_t{1});
  for (std::int64_t piece = 0; piece < layout.world_size(); ++piece) {
    const auto numel = entry.changed ? entry.changed->numel_of_piece[static_cast<std::size_t>(piece)]
                                     : layout.local_slice(entry.parameter, piece).numel / element;
    begins.push_back(begins.back() + numel);
  }
  return begins;
}

Comparison::Comparison(std::vector<Entry> entries, SavedWeights& saved, std::optional<at::ScalarType> dtype, bool receives, bool everything,
                       const Adapters& adapters)
    : entries_(std::move(entries)), saved_(saved), dtype_(dtype), receives_(receives), everything_(everything), adapters_(adapters) {
  saved_.shards.resize(entries_.size());
}

/// This rank's values as they travel, flat.
at::Tensor Comparison::now(std::size_t entry) const {
  const auto& own = entries_[entry].own;
  const auto dtype = travelling_dtype(entries_[entry], dtype_);
  if (entries_[entry].added.empty()) return own.to(dtype).reshape({-1});
  const auto merged = at::empty({own.numel()}, own.options().dtype(dtype));
  adapters_.merge(merged, entries_[entry]);
  return merged;
}

std::vector<std::int64_t> Comparison::count() const {
  std::vector<std::int64_t> counts;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    counts.push_back(is_sent(entries_[i]) ? changed_elements(now(i), saved_.shards[i]).count_nonzero().item<std::int64_t>() : 0);
  }
  return counts;
}

std::vector<Entry> Comparison::take(const Counts& counts) {
  std::vector<Entry> taken;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const auto numel = numel_of(entries_[i].shape);
    const auto value = static_cast<std::int64_t>(c10::elementSize(travelling_dtype(entries_[i], dtype_)));
    const auto place = static_cast<std::int64_t>(c10::elementSize(dtype_of_positions(numel)));
    if (everything_ || counts.largest[i] * (place + value) >= numel * value) {
      if (!everything_ && counts.largest[i] == 0) continue;
      if (is_sent(entries_[i])) save_values(now(i), saved_.shards[i], saved_.device);
      auto& entry = taken.emplace_back(entries_[i]);
      // Data that are written to the shards during the stream are not sent; the next comparison finds them.
      if (is_sent(entry)) entry.own = saved_.shards[i];
    } else if (counts.largest[i] > 0) {
      take_changes(i, counts, taken);
    }
  }
  for (auto& entry : taken) entry.added.clear();  // The snapshot's values have it.
  return taken;
}

/// Adds an entry for the positions and one for the values.
void Comparison::take_changes(std::size_t i, const Counts& counts, std::vector<Entry>& taken) {
  const auto& entry = entries_[i];
  auto positions = at::empty({0}, entry.own.options().dtype(at::kLong));
  auto values = at::empty({0}, entry.own.options().dtype(travelling_dtype(entry, dtype_)));
  if (is_sent(entry)) {
    const auto mine = now(i);
    const auto places = changed_elements(mine, saved_.shards[i]).nonzero().view({-1});
    const auto new_bits = bits(mine).index_select(0, places);
    auto saved = bits(saved_.shards[i]);
    saved.index_copy_(0, places.to(saved.device()), new_bits.to(saved.device()));
    positions = places_in_unit(entry, places);
    if (entry.assembly != nullptr) positions = places_in_whole(*entry.assembly, positions, entry.shape);
    values = new_bits.view({-1}).view(values.scalar_type());
  }
  const Changed changed{.shape = entry.shape,
                        .numel_of_piece = counts.of_pieces[i],
                        .numel_of_rank = counts.of_ranks[i],
                        .largest_numel = counts.largest[i],
                        .is_positions = true};
  const auto& owners = entry.assembly != nullptr ? changed.numel_of_rank : changed.numel_of_piece;
  const auto numel = entry.is_cut() ? std::accumulate(owners.begin(), owners.end(), std::int64_t{0}) : values.numel();
  auto& first = taken.emplace_back(entry);
  first.shape = {numel};
  first.cut = 0;
  first.own = positions.to(dtype_of_positions(numel_of(entry.shape)));
  first.changed = changed;
  auto second = first;
  second.own = values;
  second.changed->is_positions = false;
  taken.push_back(std::move(second));
}

double Comparison::fraction(const Counts& counts) const {
  std::int64_t numel = 0;
  for (const auto& entry : entries_) numel += numel_of(entry.shape);
  if (everything_ || numel == 0) return everything_ ? 1 : 0;
  const auto changed = std::accumulate(counts.largest.begin(), counts.largest.end(), std::int64_t{0});
  return static_cast<double>(changed) / static_cast<double>(numel);
}

const char* name_of(WeightReceivers receivers) {
  switch (receivers) {
    case WeightReceivers::kAll:
      return "all";
    case WeightReceivers::kFirst:
      return "the first";
    case WeightReceivers::kOnePerHost:
      return "one per host";
  }
  return "";
}

std::vector<std::string> form_of(const std::vector<Entry>& entries, const FullWeightsOptions& options) {
  std::vector<std::string> form = {std::string("ranks ") + name_of(options.ranks)};
  for (const auto& entry : entries) {
    form.push_back(joined(entry.names, " ", in_quotes) + " " + in_brackets(entry.shape) + " " +
                   c10::toString(travelling_dtype(entry, options.dtype)) + ", " + std::to_string(entry.own.numel()) +
                   " elements on this rank");
  }
  return form;
}

void check_snapshot(const SavedWeights& saved, const std::vector<std::string>& form) {
  if (saved.state == SnapshotState::kMoving) {
    throw Error("full_weights: since belongs to a stream that has not ended: take all its buckets, or close it, first");
  }
  if (saved.form.empty()) return;
  for (std::size_t i = 0; i < std::max(saved.form.size(), form.size()); ++i) {
    const auto old_line = i < saved.form.size() ? saved.form[i] : "no tensor more";
    const auto new_line = i < form.size() ? form[i] : "no tensor more";
    if (old_line == new_line) continue;
    throw Error("full_weights: since was used for " + old_line + ", where this stream has " + new_line +
                "; a snapshot is for one kind of stream: give a new WeightSnapshot, and everything is sent");
  }
}

std::string text_of_snapshot(const SavedWeights& saved) {
  return "a snapshot after " + std::to_string(saved.streams) + " streams" + (saved.id.empty() ? "" : " (" + saved.id + ")");
}

/// Does `work`, which asks nothing of other ranks. Throws on every rank if it fails on one.
void WeightStream::on_all(const std::function<void()>& work) const {
  std::exception_ptr failure;
  try {
    work();
  } catch (...) {
    failure = std::current_exception();
  }
  if (ranks_.agree(failure == nullptr, kComparison)) return;
  if (failure != nullptr) std::rethrow_exception(failure);
  throw Error("full_weights: another rank could not compare its shards with since; see its own error (training can go on)");
}

/// Keeps of the entries what has changed since the snapshot.
void WeightStream::keep_changes(const FullWeightsOptions& options) {
  auto& saved = *since_->saved_;
  std::vector<std::uint8_t> unknown = {saved.state != SnapshotState::kKnown};
  ranks_.unite(unknown, kComparison);
  if (saved.id.empty()) saved.id = ranks_.broadcast(ckpt::random_digits() + ckpt::random_digits(), kComparison);
  saved.form = form_of(entries_, options);
  saved.state = SnapshotState::kMoving;
  ++saved.streams;
  const bool everything = unknown.front() != 0;
  std::vector<const Entry*> merged;
  for (const auto& entry : entries_) {
    if (!entry.added.empty()) merged.push_back(&entry);
  }
  if (!merged.empty()) {
    on_all([&] { count(adapters_.hold(merged)); });
    adapters_.gather({.operation = "full_weights: the adapters", .unit = {}});
    on_all([&] { adapters_.put_in_order(); });
  }
  Comparison comparison(std::move(entries_), saved, options.dtype, receives_, everything, adapters_);
  Counts counts;
  if (!everything) {
    std::vector<std::int64_t> changed;
    on_all([&] { changed = comparison.count(); });
    counts = exchange(comparison.entries(), changed);
  }
  on_all([&] { entries_ = comparison.take(counts); });
  count(-adapters_.release());
  changed_fraction_ = comparison.fraction(counts);
  for (const auto& entry : entries_) {
    if (entry.changed && entry.own.device() == engines_.front()->options().mesh.device())
      count(static_cast<std::int64_t>(entry.own.nbytes()));
  }
}

/// Exchanges how many elements have changed. `changed`: in this rank's shards, by entry.
Counts WeightStream::exchange(const std::vector<Entry>& entries, const std::vector<std::int64_t>& changed) {
  Counts counts{.of_pieces = std::vector<std::vector<std::int64_t>>(entries.size()),
                .of_ranks = std::vector<std::vector<std::int64_t>>(entries.size()),
                .largest = {}};
  if (entries.empty()) return counts;
  const auto own = at::tensor(changed, at::kLong);
  auto received = own.clone();
  std::vector<const Route*> routes;
  for (const auto& entry : entries) routes.push_back(entry.is_cut() ? &routes_->of(entry) : nullptr);
  for (const auto& route : routes_->all()) {
    std::vector<std::int64_t> cut;
    for (std::size_t i = 0; i < entries.size(); ++i) {
      if (routes[i] == route.get()) cut.push_back(static_cast<std::int64_t>(i));
    }
    const auto indices = at::tensor(cut, at::kLong);
    auto owners = own.index_select(0, indices);
    for (const auto& row : route->rows) owners = row.ranks->exchange(owners, kComparison);
    owners = owners.view({-1, indices.numel()}).t().contiguous();
    received.index_copy_(0, indices, owners.sum(1));
    for (std::size_t k = 0; k < cut.size(); ++k) {
      const auto i = static_cast<std::size_t>(cut[k]);
      const auto& entry = entries[i];
      auto mine = owners[static_cast<std::int64_t>(k)];
      if (entry.assembly != nullptr) {
        const auto by_rank = mine.view({static_cast<std::int64_t>(entry.assembly->shapes.size()), -1});
        counts.of_ranks[i] = numbers_of(by_rank.sum(1));
        mine = by_rank[static_cast<std::int64_t>(entry.assembly->rank())];
      }
      if (!entry.is_cut_by_unit()) continue;
      // An owner of several pieces has them side by side: the first one counts for all.
      auto& of_pieces = counts.of_pieces[i];
      of_pieces.resize(static_cast<std::size_t>(entry.unit->layout.world_size()));
      const auto numel = numbers_of(mine);
      const auto step = of_pieces.size() / numel.size();
      for (std::size_t owner = 0; owner < numel.size(); ++owner) of_pieces[owner * step] = numel[owner];
    }
  }
  const auto largest = std::get<0>(ranks_.exchange(received, kComparison).max(0));
  counts.largest = numbers_of(largest);
  return counts;
}

}  // namespace fsdp::weights
