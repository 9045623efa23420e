#pragma once

#include <fsdp/fsdp.h>

#include <optional>
#include <string>

#include "gpt.h"
#include "train_gpt/options.h"
#include "train_gpt/run_folder.h"

// Going on from a checkpoint: what --resume may name, and which options must be those that the checkpoint was saved with.

/// What is at a path that was given for a run or for a checkpoint: "it is a checkpoint: ...", "it holds checkpoints: ...", or nothing of
/// the kind. For an error's text.
std::string describe_place(const std::string& path);

/// Throws UsageError unless --resume, --generate, --run and --save name what they must.
void check_places(const Options& options);

/// Throws UsageError where options say something else than the run with these saved options, whose checkpoints are to be read.
void check_same(const Options& options, const Options& saved, const std::string& run);

/// Throws UsageError where --resume names a checkpoint of a run that needs other options.
void check_checkpoint(const Options& options);

/// Goes on from a checkpoint, if the options say so and there is one. Collective. Throws std::runtime_error, in the words of this program,
/// if the checkpoint is of another model or optimizer; what else the library throws goes on.
std::optional<fsdp::Loaded> resume(const Options& options, const RunFolder& run, GPT& model, fsdp::Optimizer& optimizer);
