#include "train_gpt/report.h"

#include <fsdp/timeline.h>

#include <array>
#include <cerrno>  // program_invocation_name
#include <cstdarg>
#include <cstdio>
#include <variant>

#include "generation.h"
#include "train_gpt/plot.h"

namespace {

[[gnu::format(printf, 1, 2)]] std::string format(const char* pattern, ...) {
  std::array<char, 256> text{};
  va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(text.data(), text.size(), pattern, arguments);
  va_end(arguments);
  return text.data();
}

double mib(std::int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

double mega(std::size_t count) { return static_cast<double>(count) / 1e6; }

std::int64_t step_of(const fsdp::Loaded& loaded) { return std::get<std::int64_t>(loaded.extra.at("step")); }

// What the log keeps of the runs before: a row for each step that the checkpoint holds.
std::optional<std::int64_t> kept_steps(const Options& options, const std::optional<fsdp::Loaded>& loaded) {
  if (loaded) return step_of(*loaded);
  return options.resume == "auto" ? std::optional<std::int64_t>(0) : std::nullopt;
}

// "800 steps, or 12 minutes if they take longer".
std::string limits_of(const Options& options) {
  const auto minutes = format("%g minutes", options.minutes);
  if (options.steps == 0) return minutes;
  return std::to_string(options.steps) + " steps" + (options.minutes > 0 ? ", or " + minutes + " if they take longer" : "");
}

}  // namespace

void say_nothing_is_left(const Options& options, const fsdp::DeviceMesh& mesh, const std::string& checkpoint, std::int64_t step) {
  if (mesh.rank() != 0) return;
  std::printf("nothing is left to train: %s has made %ld steps of %s; for more, raise %s\n", checkpoint.c_str(), static_cast<long>(step),
              limits_of(options).c_str(), step >= options.steps && options.steps > 0 ? "--steps" : "--minutes");
  std::fflush(stdout);
}

Report::Report(const Options& options, const RunFolder& run, const fsdp::DeviceMesh& mesh, const std::optional<fsdp::Loaded>& loaded)
    : options_(options), run_(run), mesh_(mesh), loaded_(loaded) {
  if (mesh.rank() == 0) log_.emplace(run.log(), kept_steps(options, loaded));
}

void Report::begin(const GPT& model, const Corpus& corpus) {
  if (options_.timeline) fsdp::keep_events(run_.events(), mesh_);
  if (!speaks()) return;
  std::int64_t parameters = 0;
  for (const auto& parameter : model->parameters()) parameters += parameter.numel();
  log_->write({{"ranks", mesh_.size()},
               {"parameters", parameters},
               {"strategy", options_.strategy},
               {"train_bytes", corpus.train().size()},
               {"validation_bytes", corpus.validation().size()}});
  progress_.line("run folder: " + run_.path());
  progress_.line(format("%.2f M parameters (%s) over %d rank%s; %.2f MB of text for training, %.2f MB for validation, from ",
                        mega(static_cast<std::size_t>(parameters)), options_.strategy.c_str(), static_cast<int>(mesh_.size()),
                        mesh_.size() == 1 ? "" : "s", mega(corpus.train().size()), mega(corpus.validation().size())) +
                 options_.data);
  progress_.line("trains for " + limits_of(options_));
  if (!loaded_) return;
  log_->write({{"resumed", step_of(*loaded_)}});
  progress_.line("resumed from " + loaded_->path);
}

void Report::step(const TrainedStep& trained) {
  if (!speaks()) return;
  log_->write({{"step", trained.step},
               {"loss", trained.loss},
               {"grad_norm", trained.grad_norm},
               {"lr", trained.lr},
               {"tokens_per_second", trained.tokens_per_second},
               {"peak_mib", mib(trained.peak_bytes)}});
  progress_.step(trained);
}

void Report::times(std::int64_t step, const fsdp::StepReport& times) {
  if (!speaks()) return;
  nlohmann::json waits;
  for (std::size_t i = 0; i < fsdp::kWaitReasons; ++i) waits[to_string(static_cast<fsdp::WaitReason>(i))] = times.reasons[i];
  log_->write({{"step", step},
               {"steps", times.steps},
               {"step_ms", times.times.step_ms},
               {"compute_ms", times.times.compute_ms},
               {"exposed_ms", times.times.exposed_ms},
               {"waits", waits}});
  progress_.line(to_line(times));
}

void Report::validation(std::int64_t step, double bits_per_byte) {
  if (!speaks()) return;
  log_->write({{"step", step}, {"validation_bits_per_byte", bits_per_byte}});
  progress_.line(format("step %5d  validation %.3f bits per byte", static_cast<int>(step), bits_per_byte));
}

void Report::sample(std::int64_t step, const std::string& text) {
  if (!speaks()) return;
  log_->write({{"step", step}, {"sample", text}});
  progress_.line("--- sample of step " + std::to_string(step) + " ---\n" + printable(text) + "\n--------------");
}

void Report::timeline() {
  if (!options_.timeline) return;
  mesh_.barrier();  // All ranks have come to the end of these steps.
  if (!speaks()) return;
  fsdp::write_timeline(run_.events(), run_.timeline());
  progress_.line("timeline: " + run_.timeline());
}

void Report::interrupted(std::int64_t step) {
  if (!speaks()) return;
  log_->write({{"step", step}, {"ended", "by a signal"}});
  write_loss_plot(run_.plot(), read_log(run_.log()));
  progress_.line("ended by a signal after step " + std::to_string(step) + ", saved to " + run_.checkpoint(step) +
                 "\nto go on: " + program_invocation_name + " --resume " + run_.path());
}

void Report::finished(const FinalReport& report) {
  if (!speaks()) return;
  log_->write(
      {{"step", report.step}, {"seconds", report.seconds}, {"validation_bits_per_byte", report.validation}, {"sample", report.sample}});
  write_loss_plot(run_.plot(), read_log(run_.log()));
  progress_.line("--- sample ---\n" + printable(report.sample) + "\n--------------");
  progress_.line(format("done: %d steps in %.0f s, validation %.3f bits per byte, peak engine memory %.1f MiB per rank",
                        static_cast<int>(report.step), report.seconds, report.validation, mib(report.peak_bytes)));
  progress_.line("losses: " + run_.plot() + "\nto generate text: " + program_invocation_name + " --generate " + run_.path() +
                 " --prompt TEXT");
}
