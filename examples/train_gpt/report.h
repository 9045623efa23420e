#pragma once

#include <fsdp/device_mesh.h>
#include <fsdp/save_load.h>
#include <fsdp/step_report.h>

#include <cstdint>
#include <optional>
#include <string>

#include "corpus.h"
#include "gpt.h"
#include "train_gpt/log.h"
#include "train_gpt/options.h"
#include "train_gpt/progress.h"
#include "train_gpt/run_folder.h"

struct FinalReport {
  std::int64_t step = 0;
  double seconds = 0;
  double validation = 0;  ///< Bits per byte.
  std::string sample;
  std::int64_t peak_bytes = 0;
};

/// One line on rank 0: the checkpoint has all steps, or all minutes, that the options ask for.
void say_nothing_is_left(const Options& options, const fsdp::DeviceMesh& mesh, const std::string& checkpoint, std::int64_t step);

/// What a run tells, in its log and on stdout. Only rank 0 does; on the others nothing happens, but that with --timeline all of them keep
/// their events.
class Report {
 public:
  /// `loaded`: the checkpoint that the run goes on from. What is given must outlive this.
  Report(const Options& options, const RunFolder& run, const fsdp::DeviceMesh& mesh, const std::optional<fsdp::Loaded>& loaded);

  void begin(const GPT& model, const Corpus& corpus);
  void step(const TrainedStep& trained);
  /// Where the time of the last steps went.
  void times(std::int64_t step, const fsdp::StepReport& times);
  void validation(std::int64_t step, double bits_per_byte);
  /// What the model wrote with the weights of this step.
  void sample(std::int64_t step, const std::string& text);
  /// With --timeline, draws what the ranks did in the last steps. Collective.
  void timeline();
  /// Both write the plot, and say what to do next.
  void interrupted(std::int64_t step);
  void finished(const FinalReport& report);

 private:
  bool speaks() const { return log_.has_value(); }

  const Options& options_;
  const RunFolder& run_;
  const fsdp::DeviceMesh& mesh_;
  const std::optional<fsdp::Loaded>& loaded_;
  std::optional<Log> log_;  // on rank 0
  Progress progress_;
};
