#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "checkpoint/commit.h"
#include "checkpoint/dcp_metadata.h"
#include "checkpoint/records.h"
#include "engine/engine.h"
#include "fsdp/error.h"
#include "fsdp/save_load.h"
#include "memory/device_memory.h"
#include "optim/shard_optimizer.h"
#include "state/scalar_type.h"
#include "state/snapshot.h"
#include "state/state_items.h"

namespace fsdp {
namespace {

namespace fs = std::filesystem;

using ckpt::DcpTensor;
using state::Ranks;
using state::StateItem;

/// A checkpoint's folder, open for reading.
class Checkpoint {
 public:
  explicit Checkpoint(const std::string& path) : folder_(path), is_sealed_(fs::exists(folder_ / ckpt::kSidecar)) {
    const auto file = folder_ / ckpt::kMetadataFile;
    if (!fs::is_directory(folder_)) throw Error("there is no checkpoint " + path);
    constexpr std::int64_t kMostMetadata = std::int64_t{1} << 32;
    metadata_ = ckpt::read_dcp_metadata(ckpt::read_whole(file, kMostMetadata), file.string());
    for (const auto& item : metadata_.items) by_name_.emplace(item.name, &item);
  }

  const ckpt::DcpMetadata& metadata() const { return metadata_; }

  const ckpt::DcpItem* find(const std::string& key) const {
    const auto found = by_name_.find(key);
    return found == by_name_.end() ? nullptr : found->second;
  }

  /// A share of the files' checksums, if there are any: all ranks together check all.
  void verify(const Ranks& ranks) const {
    if (!is_sealed_) return;
    const auto listed = ckpt::read_sidecar(folder_);
    std::string faults;
    for (std::size_t i = 0; i < listed.size(); ++i) {
      if (static_cast<std::int64_t>(i) % ranks.size() != ranks.index()) continue;
      const auto fault = ckpt::fault_in(folder_, listed[i]);
      if (!fault.empty()) faults += "\n    " + fault;
    }
    if (!faults.empty()) throw Error(folder_.string() + " is damaged:" + faults);
  }

  /// Elements [offset, offset + numel) of a tensor as it is stored: a 1-D tensor of its dtype.
  at::Tensor read(const std::string& key, std::int64_t offset, std::int64_t numel) {
    const auto& tensor = std::get<DcpTensor>(find(key)->content);
    const auto type = state::scalar_type_of(tensor.dtype, "'" + key + "'");
    const auto itemsize = ckpt::itemsize(tensor.dtype);
    // Mapped apart from malloc's heap where it is large: it goes soon.
    auto values = memory::zeros(at::kCPU, numel * itemsize).view(type);
    auto* to = static_cast<char*>(values.mutable_data_ptr());
    std::int64_t found = 0;
    for (const auto& chunk : tensor.chunks) {
      const auto runs = ckpt::runs_to_slice(chunk.box, tensor.shape, offset, numel);
      if (runs.empty()) continue;
      auto& file = open(chunk.record.file);
      const auto data = ckpt::locate_tensor(file.reader(), chunk.record, key, tensor.dtype, chunk.box.sizes);
      for (const auto& run : runs) {
        file.read_at(data.offset + run.source * itemsize,
                     {to + run.destination * itemsize, static_cast<std::size_t>(run.length * itemsize)});
        found += run.length;
      }
    }
    if (found != numel) {
      throw Error(folder_.string() + ": the stored parts of '" + key + "' have " + std::to_string(found) + " of the " +
                  std::to_string(numel) + " elements that are needed");
    }
    return values;
  }

  ckpt::PythonValue read_object(const std::string& key) {
    const auto& record = std::get<ckpt::DcpObject>(find(key)->content).record;
    return ckpt::read_object(open(record.file).reader(), record, key);
  }

 private:
  ckpt::File& open(const std::string& name) {
    auto found = files_.find(name);
    if (found == files_.end()) found = files_.emplace(name, ckpt::File::open(folder_ / name)).first;
    return found->second;
  }

  fs::path folder_;
  bool is_sealed_;
  ckpt::DcpMetadata metadata_;
  std::map<std::string, const ckpt::DcpItem*> by_name_;
  std::map<std::string, ckpt::File> files_;
};

std::string text_of(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const auto size : shape) text += (text.empty() ? "[" : ", ") + std::to_string(size);
  return text.empty() ? "[]" : text + "]";
}

std::string lines(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += "\n    " + name;
  return text;
}

/// Reads into memory beside the model; what was read is assigned when all is there.
class Loading {
 public:
  Loading(const std::string& path, const LoadOptions& options, const Ranks& ranks)
      : checkpoint_(path), path_(path), options_(options), ranks_(ranks) {}

  void verify() const { checkpoint_.verify(ranks_); }

  std::string stored_key(const std::string& key) const { return options_.rename ? options_.rename(key) : key; }
  bool has(const std::string& key) const { return checkpoint_.find(stored_key(key)) != nullptr; }

  /// Reads this rank's values of a tensor, or notes that they are missing.
  void read(const StateItem& item) {
    const auto key = item.key();
    const auto stored = stored_key(key);
    const auto* found = checkpoint_.find(stored);
    if (found == nullptr) {
      missing_.push_back(key);
      return;
    }
    used_.insert(stored);
    const auto* tensor = std::get_if<DcpTensor>(&found->content);
    if (tensor == nullptr) throw Error(path_ + ": '" + stored + "' is no tensor");
    if (tensor->shape != item.shape) {
      throw Error(path_ + ": '" + stored + "' has shape " + text_of(tensor->shape) + ", the model's has " + text_of(item.shape));
    }
    if (item.values.numel() > 0) read_.emplace_back(item.values, checkpoint_.read(stored, item.offset, item.values.numel()));
  }

  /// A scalar's value.
  std::optional<double> number(const std::string& key) {
    const auto stored = stored_key(key);
    const auto* found = checkpoint_.find(stored);
    if (found == nullptr) return std::nullopt;
    used_.insert(stored);
    const auto* tensor = std::get_if<DcpTensor>(&found->content);
    if (tensor != nullptr && ckpt::numel(tensor->shape) == 1) return checkpoint_.read(stored, 0, 1).item<double>();
    if (tensor == nullptr) {
      const auto value = checkpoint_.read_object(stored);
      if (const auto* whole = std::get_if<std::int64_t>(&value.value)) return static_cast<double>(*whole);
      if (const auto* real = std::get_if<double>(&value.value)) return *real;
    }
    throw Error(path_ + ": '" + stored + "' is no number");
  }

  /// What was asked for and not found, or found below these prefixes and not asked for: an Error if strict.
  void check(const std::vector<std::string>& prefixes) {
    for (const auto& item : checkpoint_.metadata().items) {
      const auto below = [&](const std::string& prefix) { return item.name.starts_with(prefix + "."); };
      if (!used_.contains(item.name) && std::any_of(prefixes.begin(), prefixes.end(), below)) unexpected_.push_back(item.name);
    }
    if (!options_.strict || (missing_.empty() && unexpected_.empty())) return;
    std::string text = path_ + " does not fit the model";
    if (!missing_.empty()) text += "\n  missing in the checkpoint:" + lines(missing_);
    if (!unexpected_.empty()) text += "\n  not in the model:" + lines(unexpected_);
    throw Error(text + "\n  (LoadOptions::rename maps names, strict = false allows this)");
  }

  void assign() {
    for (const auto& [to, from] : read_) to.copy_(from);
  }

  ExtraState extra() {
    ExtraState extra;
    const std::string prefix = std::string(state::kExtra) + ".";
    for (const auto& item : checkpoint_.metadata().items) {
      if (!item.name.starts_with(prefix)) continue;
      auto& value = extra[item.name.substr(prefix.size())];
      if (const auto* tensor = std::get_if<DcpTensor>(&item.content)) {
        value = checkpoint_.read(item.name, 0, ckpt::numel(tensor->shape)).reshape(tensor->shape).clone();
        continue;
      }
      const auto object = checkpoint_.read_object(item.name);
      if (const auto* boolean = std::get_if<bool>(&object.value)) {
        value = *boolean;
      } else if (const auto* whole = std::get_if<std::int64_t>(&object.value)) {
        value = *whole;
      } else if (const auto* real = std::get_if<double>(&object.value)) {
        value = *real;
      } else if (const auto* text = std::get_if<std::string>(&object.value)) {
        value = *text;
      } else {
        throw Error(path_ + ": '" + item.name + "' is not a bool, int, float, str or tensor; keep such values out of '" + state::kExtra +
                    "'");
      }
    }
    return extra;
  }

  /// This rank's generator, if as many ranks saved theirs.
  std::optional<at::Tensor> rng() {
    if (!options_.rng) return std::nullopt;
    std::int64_t saved = 0;
    while (checkpoint_.find(state::rng_key(saved)) != nullptr) ++saved;
    if (saved != ranks_.size()) return std::nullopt;
    const auto key = state::rng_key(ranks_.index());
    const auto* tensor = std::get_if<DcpTensor>(&checkpoint_.find(key)->content);
    if (tensor == nullptr || tensor->dtype != ckpt::Dtype::uint8) throw Error(path_ + ": '" + key + "' is no generator's state");
    return checkpoint_.read(key, 0, ckpt::numel(tensor->shape));
  }

  std::vector<std::string> take_missing() { return std::move(missing_); }
  std::vector<std::string> take_unexpected() { return std::move(unexpected_); }

  /// Any name below a prefix.
  bool has_any(const std::string& prefix) const {
    const auto& items = checkpoint_.metadata().items;
    return std::any_of(items.begin(), items.end(), [&](const auto& item) { return item.name.starts_with(prefix + "."); });
  }

 private:
  Checkpoint checkpoint_;
  std::string path_;
  const LoadOptions& options_;
  const Ranks& ranks_;
  std::vector<std::pair<at::Tensor, at::Tensor>> read_;  // where to, and what
  std::set<std::string> used_;
  std::vector<std::string> missing_;
  std::vector<std::string> unexpected_;
};

/// How often each of an optimizer's parameters was updated, as the checkpoint says; before and after, so that a failure can undo it.
class Steps {
 public:
  explicit Steps(Optimizer& optimizer) : optimizer_(optimizer) {
    for (const auto& part : optimizer.state().parts) {
      for (const auto& unit : optimizer.engine()->units()) {
        for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
          if (part->updates(*unit, i)) before_[unit->parameters[i].name] = part->steps(*unit, i);
        }
      }
    }
  }

  void read(Loading& loading) {
    std::map<std::string, std::int64_t> steps;
    for (const auto& [parameter, before] : before_) {
      const std::string prefix = std::string(state::kOptimizer) + ".state." + parameter;
      const auto count = loading.number(prefix + ".step");
      // Torch's SGD and Muon keep no count, and this library's count for them only whether there was an update.
      steps[parameter] = count ? static_cast<std::int64_t>(*count) : (loading.has(prefix + ".momentum_buffer") ? 1 : 0);
    }
    set(steps);
  }
  void undo() { set(before_); }

 private:
  void set(const std::map<std::string, std::int64_t>& steps) {
    state::set_optimizer_steps(optimizer_, [&](const std::string& parameter) { return steps.at(parameter); });
  }

  Optimizer& optimizer_;
  std::map<std::string, std::int64_t> before_;
};

Loaded load_all(const std::string& path, torch::nn::Module& module, Optimizer* optimizer, const LoadOptions& options) {
  const torch::NoGradGuard no_grad;
  const auto engine = handle(module).engine();
  const Ranks ranks(engine->mesh(), Ranks::Groups::kOfMesh);
  std::optional<Loading> loading;
  std::optional<Steps> steps;
  std::optional<double> lr_factor;
  std::optional<at::Tensor> rng;
  Loaded loaded;
  std::exception_ptr failure;
  try {
    if (optimizer != nullptr && optimizer->engine() != engine) throw Error("load: the optimizer belongs to another model");
    engine->flush_writes();
    loading.emplace(path, options, ranks);
    loading->verify();
    for (const auto& item : state::model_items(module, state::kModel)) loading->read(item);
    std::vector<std::string> prefixes = {state::kModel};
    if (optimizer != nullptr) {
      if (options.strict && !loading->has_any(state::kOptimizer)) {
        throw Error(path + " has no state of an optimizer; load the model alone, or pass strict = false");
      }
      steps.emplace(*optimizer);
      steps->read(*loading);
      for (const auto& item : state::optimizer_items(*optimizer, state::kOptimizer)) loading->read(item);
      prefixes.push_back(std::string(state::kOptimizer) + ".state");
      if (loading->has(state::kLrFactor)) lr_factor = loading->number(state::kLrFactor);
    }
    loading->check(prefixes);
    loaded.extra = loading->extra();
    rng = loading->rng();
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  try {
    ranks.agree(failure, "nothing was loaded:");
  } catch (...) {
    if (steps) steps->undo();
    throw;
  }
  loading->assign();
  engine->main_parameters_changed();
  if (lr_factor) optimizer->set_lr_factor(*lr_factor);
  if (rng) {
    auto generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard lock(generator.mutex());
    generator.set_state(*rng);
  }
  loaded.rng = rng.has_value();
  loaded.missing = loading->take_missing();
  loaded.unexpected = loading->take_unexpected();
  return loaded;
}

}  // namespace

Loaded load(const std::string& path, torch::nn::Module& module, LoadOptions options) { return load_all(path, module, nullptr, options); }

Loaded load(const std::string& path, torch::nn::Module& module, Optimizer& optimizer, LoadOptions options) {
  return load_all(path, module, &optimizer, options);
}

std::optional<std::string> latest(const std::string& folder) {
  const auto found = ckpt::latest_step(folder);
  return found ? std::optional(found->string()) : std::nullopt;
}

}  // namespace fsdp
