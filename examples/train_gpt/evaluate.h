#pragma once

#include <fsdp/device_mesh.h>

#include "corpus.h"
#include "gpt.h"
#include "train_gpt/options.h"

/// Validation loss in bits per byte over evenly spread sequences, each rank a share. Collective.
double evaluate(GPT& model, const Corpus& corpus, const Options& options, const fsdp::DeviceMesh& mesh);
