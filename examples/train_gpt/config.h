#pragma once

#include <string>

#include "train_gpt/options.h"

// The configuration of a run: its options, as JSON in the run's folder.

/// Whether the folder has a config.json that a run has written, damaged or not; other programs give their files this name, too.
bool has_config(const std::string& folder);
/// Options without a value there have their defaults. Throws UsageError if it cannot be read.
Options read_config(const std::string& folder);
/// Replaces the file as a whole. Throws UsageError if it cannot be written.
void write_config(const std::string& folder, const Options& options);
