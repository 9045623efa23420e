#pragma once

#include <fsdp/device_mesh.h>

#include <string>

#include "gpt.h"
#include "train_gpt/options.h"

/// What a sharded model writes after --prompt, at most --sample-tokens bytes; equal seeds give equal texts. The whole parameters are
/// gathered once, on rank 0, which generates alone, with a cache of keys and values: it takes memory for all of them. Collective. The text
/// is on rank 0, other ranks get "".
std::string generate(GPT& model, const Options& options, const fsdp::DeviceMesh& mesh);

/// The program under --generate: prints what the best checkpoint of a run writes, or the newest. Collective. Returns the exit code.
int generate_from_run(const Options& options, const fsdp::DeviceMesh& mesh);
