#include "train_gpt/program.h"

#include <fsdp/launch.h>

#include <exception>
#include <iostream>
#include <optional>
#include <string>

#include "train_gpt/generate.h"
#include "train_gpt/run_folder.h"

int run_program(int argc, char** argv, const Train& train) {
  std::optional<Options> options;
  std::optional<Corpus> corpus;
  std::string refusal;
  try {
    options = parse(argc, argv);
    if (!options) return 0;
    if (options->generate.empty()) corpus = read_corpus(*options);
  } catch (const std::exception& error) {
    refusal = error.what();
  }
  if (!refusal.empty() && !fsdp::is_launched()) {
    std::cerr << "train_gpt: " << refusal << std::endl;
    return kUsageExitCode;
  }
  return fsdp::launch_local(options && options->generate.empty() ? options->nproc : 1, [&] {
    // Ranks of another launcher read the command line themselves: what they all refuse is said once.
    const auto mesh = fsdp::init_device_mesh(options ? options->device : "cpu", {{"dp_shard", -1}});
    if (!nobody_refuses(mesh, refusal)) return kUsageExitCode;
    return options->generate.empty() ? train(*options, *corpus, mesh) : generate_from_run(*options, mesh);
  });
}
