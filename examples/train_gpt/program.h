#pragma once

#include <fsdp/device_mesh.h>

#include <functional>

#include "corpus.h"
#include "train_gpt/options.h"

/// What a rank does to train; returns the exit code.
using Train = std::function<int(const Options& options, const Corpus& corpus, const fsdp::DeviceMesh& mesh)>;

/// The program around it: reads the command line and the text, starts the ranks, and runs `train` in each, or writes text (--generate).
/// What is refused is said once, by one rank. Returns the exit code.
int run_program(int argc, char** argv, const Train& train);
