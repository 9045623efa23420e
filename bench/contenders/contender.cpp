// One rank of a C++ contender: this library, plain training, or the library's collectives.
//
// bench/run.py starts the ranks with torchrun's variables and drives each through stdin: a line `VERB COUNT` is answered by one line
// of JSON on stdout. Between two lines the process sleeps in a read. bench/contenders/contender.py speaks the same protocol.

#include <fsdp/fsdp.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "gpt.h"
#include "memory/device_memory.h"

namespace {

constexpr std::int64_t kFillChunk = 1 << 14;                   // as in gpt.py
constexpr std::int64_t kCollectiveNumel = 16LL * 1024 * 1024;  // fp32 elements of the whole buffer: 64 MiB
constexpr double kLearningRate = 3e-4, kBeta1 = 0.9, kBeta2 = 0.95, kEps = 1e-8, kWeightDecay = 0.1;

struct Options {
  std::string contender;
  GPTConfig gpt = {};
  std::int64_t batch = 0;
  std::int64_t fake_world = 0;  ///< 0: the ranks that were started.
};

Options parse_options(int argc, char** argv) {
  if (argc < 2 || argc % 2 != 0) {
    throw std::invalid_argument(
        "usage: bench_contender "
        "libfsdp|libfsdp_no_reshard|libfsdp_messages|libfsdp_8bit|libfsdp_4bit|local|collectives|collectives_messages [--dim N ...]");
  }
  Options options{.contender = argv[1]};
  const std::map<std::string, std::int64_t*> fields = {
      {"--vocab", &options.gpt.vocab},       {"--dim", &options.gpt.dim},         {"--layers", &options.gpt.layers},
      {"--heads", &options.gpt.heads},       {"--context", &options.gpt.context}, {"--batch", &options.batch},
      {"--fake-world", &options.fake_world},
  };
  for (int i = 2; i < argc; i += 2) {
    const auto field = fields.find(argv[i]);
    if (field == fields.end()) throw std::invalid_argument(std::string("no such option: ") + argv[i]);
    *field->second = std::stoll(argv[i + 1]);
  }
  return options;
}

std::int64_t launcher_variable(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr) throw std::runtime_error(std::string(name) + " is not set; bench/run.py starts this program");
  return std::stoll(value);
}

/// A line of /proc/self/status, in KiB.
std::int64_t status_kib(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(field + ":")) return std::stoll(line.substr(field.size() + 1));
  }
  throw std::runtime_error("no " + field + " in /proc/self/status");
}

double milliseconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

/// Milliseconds that this thread has spent on a core: what else the machine does counts for little. A backward on the CPU runs on the
/// thread that calls it.
double thread_milliseconds(const std::function<void()>& work) {
  const auto now = [] {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) / 1e6;
  };
  const double start = now();
  work();
  return now() - start;
}

std::string json_list(const std::vector<double>& values) {
  std::ostringstream text;
  text.precision(9);
  for (const double value : values) {
    text << (text.tellp() == 0 ? "[" : ", ");
    if (std::isfinite(value)) {
      text << value;
    } else {
      text << "NaN";  // A loss, where collectives move no data and parameters are what memory happens to hold.
    }
  }
  return values.empty() ? "[]" : text.str() + "]";
}

/// Gives every matrix the values that gpt.py's fill_parameters gives it.
void fill_parameters(torch::nn::Module& model) {
  torch::NoGradGuard no_grad;
  std::int64_t index = 0;
  for (const auto& parameter : model.parameters()) {
    const auto phase = static_cast<double>(index++) * 78.233;
    if (parameter.dim() < 2) continue;
    std::int64_t first = 0;
    for (auto& part : parameter.view(-1).split(kFillChunk)) {
      const auto positions = at::arange(part.numel(), at::kDouble) + first;
      part.copy_(at::frac(at::sin(positions * 12.9898 + phase) * 43758.5453) * 0.0346);
      first += kFillChunk;
    }
  }
}

GPT filled_model(const GPTConfig& config) {
  GPT model(config);
  fill_parameters(*model);
  return model;
}

struct Batch {
  at::Tensor tokens, targets;
};

/// What answers the lines of the protocol.
class Contender {
 public:
  virtual ~Contender() = default;
  virtual std::int64_t parameters() const = 0;
  virtual std::string handle(const std::string& verb, int count) = 0;
};

/// A model that trains; how its gradients and updates are made is the subclass's.
class Trainer : public Contender {
 public:
  explicit Trainer(const Options& options) : options_(options), rank_(launcher_variable("RANK")), world_(launcher_variable("WORLD_SIZE")) {}

  std::int64_t parameters() const override { return parameter_count_; }

  std::string handle(const std::string& verb, int count) override {
    if (verb == "step") return repeat(count);
    if (verb == "memory") return memory();
    throw std::invalid_argument("no such verb: " + verb);
  }

 protected:
  /// Remembers the resident set as it is without a model, then makes the model.
  GPT build() {
    base_kib_ = status_kib("VmRSS");
    anonymous_base_kib_ = status_kib("RssAnon");
    auto model = filled_model(options_.gpt);
    for (const auto& parameter : model->parameters()) parameter_count_ += parameter.numel();
    return model;
  }

  virtual GPT& model() = 0;
  virtual void update() = 0;
  virtual void drop_gradients() = 0;
  virtual void barrier() {}
  /// What the engine itself counts, or nothing where there is none.
  virtual std::optional<std::int64_t> counted_peak_bytes() const { return std::nullopt; }

  const Options& options() const { return options_; }

  struct StepTimes {
    double all;     ///< ms; forward, backward and update.
    double update;  ///< ms
    double loss;
  };
  /// A step on the next batch, which all ranks begin together; drawing the batch and the barrier are not timed.
  StepTimes train_step() {
    const auto batch = draw_batch();
    barrier();
    at::Tensor loss;
    double in_update = 0;
    const double all = milliseconds([&] {
      loss = model()->loss(batch.tokens, batch.targets);
      loss.backward();
      in_update = milliseconds([&] { update(); });
      drop_gradients();
    });
    return {all, in_update, loss.item<double>()};
  }

  /// The next batch: what gpt.py's draw_batch gives.
  Batch draw_batch() {
    const std::int64_t width = options_.gpt.context + 1, count = options_.batch * width;
    const auto x = at::arange(count) + count * (batches_drawn_++ * world_ + rank_);
    const auto rows = (x * x * 48271 + x * 7).remainder(1'000'003).remainder(options_.gpt.vocab).view({options_.batch, width});
    return {rows.narrow(1, 0, width - 1).contiguous(), rows.narrow(1, 1, width - 1).contiguous()};
  }

 private:
  std::string repeat(int count) {
    std::vector<double> times, losses;
    for (int i = 0; i < count; ++i) {
      const auto step = train_step();
      times.push_back(step.all);
      losses.push_back(step.loss);
    }
    return "{\"ms\": " + json_list(times) + ", \"loss\": " + json_list(losses) + "}";
  }

  std::string memory() const {
    std::ostringstream text;
    text << "{\"base_kib\": " << base_kib_ << ", \"anonymous_base_kib\": " << anonymous_base_kib_
         << ", \"high_water_kib\": " << status_kib("VmHWM");
    if (const auto bytes = counted_peak_bytes()) text << ", \"engine_peak_kib\": " << *bytes / 1024;
    text << "}";
    return text.str();
  }

  Options options_;
  std::int64_t rank_, world_;
  std::int64_t batches_drawn_ = 0, parameter_count_ = 0, base_kib_ = 0, anonymous_base_kib_ = 0;
};

/// The step without any communication, with the same fused kernel for the update.
class Local : public Trainer {
 public:
  explicit Local(const Options& options) : Trainer(options), model_(build()), parameters_(model_->parameters()) {
    for (const auto& parameter : parameters_) {
      first_moments_.push_back(at::zeros_like(parameter));
      second_moments_.push_back(at::zeros_like(parameter));
      steps_.push_back(at::zeros({}));
    }
  }

 private:
  GPT& model() override { return model_; }

  void update() override {
    torch::NoGradGuard no_grad;
    std::vector<at::Tensor> gradients;
    for (const auto& parameter : parameters_) gradients.push_back(parameter.grad());
    for (auto& step : steps_) step += 1;
    at::_fused_adamw_(parameters_, gradients, first_moments_, second_moments_, /*max_exp_avg_sqs=*/{}, steps_, kLearningRate, kBeta1,
                      kBeta2, kWeightDecay, kEps, /*amsgrad=*/false, /*maximize=*/false);
  }

  void drop_gradients() override { model_->zero_grad(); }

  GPT model_;
  std::vector<at::Tensor> parameters_, first_moments_, second_moments_, steps_;
};

/// All ranks, which share memory unless the contender's name says that they send messages.
fsdp::DeviceMesh mesh_of(const Options& options) {
  return fsdp::init_device_mesh("cpu", {{"dp_shard", -1}}, {.shared_memory = !options.contender.ends_with("_messages")});
}

/// `libfsdp_8bit` gathers matrices and sends gradients in 8 bits. `libfsdp_4bit` has 4 for both: differences of replicated parameters.
fsdp::FullyShardOptions sharding_of(const Options& options, const fsdp::DeviceMesh& mesh) {
  fsdp::FullyShardOptions sharding{
      .mesh = mesh, .units = fsdp::each<GPTBlockImpl>(), .reshard_after_forward = options.contender != "libfsdp_no_reshard"};
  if (!options.contender.ends_with("bit")) return sharding;
  const bool eight = options.contender.ends_with("8bit");
  if (!eight) sharding.placements = fsdp::Placements::optim_grads();
  const auto rounded = std::make_shared<const fsdp::GatherFormat>(eight ? fsdp::float8_blocks(128) : fsdp::int4_differences());
  sharding.gather_format = [=](const std::string&, const at::Tensor& parameter) { return parameter.dim() > 1 ? rounded : nullptr; };
  sharding.grad_comm_format = fsdp::GradCommFormat{.bits = eight ? 8 : 4};
  return sharding;
}

/// This library, over the ranks that were started or over a mesh whose collectives move no data.
class Sharded : public Trainer {
 public:
  explicit Sharded(const Options& options)
      : Trainer(options),
        mesh_(join(options)),
        model_(build()),
        handle_(fsdp::fully_shard(*model_, sharding_of(options, mesh_))),
        optimizer_(*model_, {.lr = kLearningRate, .betas = {kBeta1, kBeta2}, .eps = kEps, .weight_decay = kWeightDecay}),
        plain_(options.fake_world > 0 ? filled_model(options.gpt) : nullptr) {}

  /// Also saves, and loads again (the number is the checkpoint's), and tells what sharding adds on the host.
  std::string handle(const std::string& verb, int number) override {
    if (verb == "host") return host(number);
    if (verb == "save") return save(number);
    if (verb == "async_save") return save_beside_training(number);
    if (verb == "save_in_memory") return save_in_memory(number);
    if (verb == "load") return load(number, {.check_first = false});
    if (verb == "load_checked_first") return load(number, {});
    return Trainer::handle(verb, number);
  }

 private:
  static fsdp::DeviceMesh join(const Options& options) {
    if (options.fake_world == 0) return mesh_of(options);
    at::globalContext().setFlushDenormal(true);  // What an all-gather without data leaves in a buffer must not slow arithmetic down.
    return fsdp::null_device_mesh({{"dp_shard", options.fake_world}});
  }

  GPT& model() override { return model_; }
  void update() override { optimizer_.step(); }
  void drop_gradients() override { optimizer_.zero_grad(); }
  void barrier() override { mesh_.barrier(); }

  /// Forward and backward of this model, and of the same one unsharded, in turns: in one process both find the same memory and caches. The
  /// losses are the unsharded one's: no data arrive at the other.
  std::string host(int count) {
    std::vector<double> sharded, plain, losses;
    for (int i = 0; i < count; ++i) {
      const auto batch = draw_batch();
      if (i % 2 == 0) sharded.push_back(sharded_step(batch));
      plain.push_back(plain_step(batch, losses));
      if (i % 2 != 0) sharded.push_back(sharded_step(batch));
    }
    return "{\"ms\": " + json_list(sharded) + ", \"plain_ms\": " + json_list(plain) + ", \"loss\": " + json_list(losses) + "}";
  }

  // bench/instructions.py knows these two by their names. The graph goes with the loss, which is not timed.

  double sharded_step(const Batch& batch) {
    at::Tensor loss;
    const double time = thread_milliseconds([&] {
      loss = model_->loss(batch.tokens, batch.targets);
      loss.backward();
    });
    optimizer_.zero_grad();
    return time;
  }

  double plain_step(const Batch& batch, std::vector<double>& losses) {
    at::Tensor loss;
    const double time = thread_milliseconds([&] {
      loss = plain_->loss(batch.tokens, batch.targets);
      loss.backward();
    });
    plain_->zero_grad();
    losses.push_back(loss.item<double>());
    return time;
  }

  /// The folder of checkpoint `number`; bench/checkpoint.py says below which one.
  static std::string checkpoint(int number) {
    const char* folder = std::getenv("BENCH_CHECKPOINTS");
    if (folder == nullptr) throw std::runtime_error("BENCH_CHECKPOINTS is not set; bench/checkpoint.py starts this program");
    return std::string(folder) + "/libfsdp-" + std::to_string(number);
  }

  std::string save(int number) {
    barrier();
    const double time = milliseconds([&] { fsdp::save(checkpoint(number), *model_, optimizer_); });
    return "{\"ms\": " + json_list({time}) + "}";
  }

  std::string save_beside_training(int number) {
    if (!saver_) saver_ = std::make_unique<fsdp::AsyncSaver>(*model_, &optimizer_);
    const auto alone = train_step();
    barrier();
    double call = 0;
    StepTimes beside{};
    const double all = milliseconds([&] {
      call = milliseconds([&] { saver_->save(checkpoint(number)); });
      beside = train_step();
      saver_->wait();
    });
    // Its update waits for the copy, if that has not ended. A slow update alone must not make the call shorter.
    return "{\"blocked_ms\": " + json_list({call + std::max(0.0, beside.update - alone.update)}) +
           ", \"delayed_ms\": " + json_list({call + beside.all - alone.all}) + ", \"ms\": " + json_list({all}) + "}";
  }

  /// Ten steps alone, and ten of which the first is saved in memory. Each rank has a folder of its own, as on a host of its own, so that
  /// files are copied, too.
  std::string save_in_memory(int number) {
    const auto folder = std::string("/dev/shm") + checkpoint(0) + "/host-" + std::to_string(mesh_.rank());
    if (!in_memory_) in_memory_ = std::make_unique<fsdp::AsyncSaver>(*model_, &optimizer_, fsdp::AsyncSaverOptions{.memory = folder});
    const auto ten_steps = [&] {
      for (int i = 0; i < 10; ++i) train_step();
    };
    barrier();
    const double alone = milliseconds(ten_steps);
    barrier();
    double saved = 0;
    const double beside = milliseconds([&] {
      saved = milliseconds([&] { in_memory_->save_in_memory("step-" + std::to_string(number)); });
      ten_steps();
    });
    in_memory_->wait();
    barrier();
    // Without training beside it: the time of the bytes.
    const double bytes = milliseconds([&] {
      in_memory_->save_in_memory("step-" + std::to_string(number) + "1");
      in_memory_->wait();
    });
    return "{\"alone_ms\": " + json_list({alone}) + ", \"blocked_ms\": " + json_list({saved}) + ", \"bytes_ms\": " + json_list({bytes}) +
           ", \"ms\": " + json_list({beside}) + "}";
  }

  std::string load(int number, const fsdp::LoadOptions& options) {
    barrier();
    const double time = milliseconds([&] { fsdp::load(checkpoint(number), *model_, optimizer_, options); });
    return "{\"ms\": " + json_list({time}) + "}";
  }

  std::optional<std::int64_t> counted_peak_bytes() const override { return handle_.memory_stats().total.peak; }

  fsdp::DeviceMesh mesh_;
  GPT model_;
  fsdp::FSDPModule handle_;
  fsdp::AdamW optimizer_;
  std::unique_ptr<fsdp::AsyncSaver> saver_;
  std::unique_ptr<fsdp::AsyncSaver> in_memory_;
  GPT plain_;  ///< The same model unsharded; null, unless host time is measured.
};

/// As the engine's slots are: where ranks share memory, peers can read them.
at::Tensor slot(std::int64_t numel, double value) {
  const auto bytes = numel * static_cast<std::int64_t>(sizeof(float));
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), static_cast<std::size_t>(bytes),
                                                       fsdp::memory::allocate_shareable(at::kCPU, bytes), nullptr, /*resizable=*/false);
  return at::empty({0}, at::kFloat).set_(c10::Storage(std::move(storage)), 0, {numel}, {1}).fill_(value);
}

/// The library's collectives over two buffers of 64 MiB.
class Collectives : public Contender {
 public:
  explicit Collectives(const Options& options)
      : mesh_(mesh_of(options)),
        communicator_(mesh_.communicator("dp_shard")),
        full_(slot(kCollectiveNumel, 0)),
        shard_(at::full({kCollectiveNumel / mesh_.size()}, static_cast<double>(mesh_.rank() + 1), at::kFloat)),
        unreduced_(slot(kCollectiveNumel, static_cast<double>(mesh_.rank() + 1))),
        staging_(at::zeros({communicator_->staging_numel(shard_.numel())})),
        reduced_(at::zeros_like(shard_)) {}

  std::int64_t parameters() const override { return 0; }

  std::string handle(const std::string& verb, int count) override {
    if (verb == "all_gather") return repeat(count, full_, [this] { all_gather(); });
    if (verb == "reduce_scatter") return repeat(count, reduced_, [this] { reduce_scatter(); });
    throw std::invalid_argument("no such verb: " + verb);
  }

 private:
  void all_gather() {
    const fsdp::comm::GatherPart part{.full = full_, .shard = shard_};
    communicator_->all_gather({&part, 1}, {.operation = "all-gather", .unit = "bench"})->wait();
  }

  void reduce_scatter() {
    const fsdp::comm::ReducePart part{.unreduced = unreduced_, .staging = staging_, .out = reduced_};
    communicator_->reduce_scatter({&part, 1}, /*scale=*/1, {.operation = "reduce-scatter", .unit = "bench"})->wait();
  }

  std::string repeat(int count, const at::Tensor& result, const std::function<void()>& work) {
    std::vector<double> times;
    for (int i = 0; i < count; ++i) {
      mesh_.barrier();
      times.push_back(milliseconds(work));
    }
    const std::vector<double> check = {result[0].item<double>(), result[-1].item<double>()};
    return "{\"ms\": " + json_list(times) + ", \"check\": " + json_list(check) + "}";
  }

  fsdp::DeviceMesh mesh_;
  std::shared_ptr<fsdp::comm::Communicator> communicator_;
  at::Tensor full_, shard_, unreduced_, staging_, reduced_;
};

std::unique_ptr<Contender> make_contender(const Options& options) {
  if (options.contender.starts_with("collectives")) return std::make_unique<Collectives>(options);
  if (options.contender == "local") return std::make_unique<Local>(options);
  if (options.contender.starts_with("libfsdp")) return std::make_unique<Sharded>(options);
  throw std::invalid_argument("no such contender: " + options.contender);
}

/// Answers lines until stdin ends.
void serve(const Options& options, std::FILE* replies) {
  const auto reply = [replies](const std::string& text) {
    std::fprintf(replies, "%s\n", text.c_str());
    std::fflush(replies);
  };
  at::set_num_threads(1);
  const auto contender = make_contender(options);
  reply("{\"parameters\": " + std::to_string(contender->parameters()) + "}");
  std::string verb;
  for (int count = 0; std::cin >> verb >> count;) reply(contender->handle(verb, count));
}

}  // namespace

int main(int argc, char** argv) {
  std::FILE* replies = fdopen(dup(STDOUT_FILENO), "w");
  dup2(STDERR_FILENO, STDOUT_FILENO);  // What libraries print goes to the log, not between the replies.
  try {
    serve(parse_options(argc, argv), replies);
  } catch (const std::exception& error) {
    std::cerr << "bench_contender: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
