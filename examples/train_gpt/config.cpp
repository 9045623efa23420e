#include "train_gpt/config.h"

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(GPTConfig, vocab, dim, layers, heads, hidden, context, tied, checkpoint, rotary_base,
                                                norm_eps)
// All but what belongs to one start of the program: run, resume, generate and newest.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(Options, data, nproc, model, batch, steps, minutes, lr, warmup, weight_decay, clip,
                                                accumulate, optimizer, strategy, outer, outer_strategy, param_dtype, wire_dtype,
                                                float8_gather, offload, keep_gathered_bytes, no_reshard_after_forward, prefetch, seed,
                                                eval_every, eval_sequences, log, timeline, save, save_name, save_async, memory,
                                                memory_every, memory_wait, save_every, keep_last, sample_every, sample_tokens, temperature,
                                                prompt, threads, device)

namespace {

std::string path_in(const std::string& folder) { return folder + "/config.json"; }

}  // namespace

bool has_config(const std::string& folder) {
  if (folder.empty() || !std::filesystem::is_regular_file(path_in(folder))) return false;
  const auto found = nlohmann::json::parse(std::ifstream(path_in(folder)), nullptr, /*allow_exceptions=*/false);
  if (found.is_discarded()) return true;  // read_config() says what is wrong with it
  return found.is_object() && found.contains("model") && found["model"].is_object() && found["model"].contains("dim");
}

Options read_config(const std::string& folder) {
  require(has_config(folder), folder + " is not the folder of a run: it has no config.json");
  try {
    return nlohmann::json::parse(std::ifstream(path_in(folder))).get<Options>();
  } catch (const nlohmann::json::exception& error) {
    throw UsageError("cannot read " + path_in(folder) + ": " + error.what());
  }
}

void write_config(const std::string& folder, const Options& options) {
  const auto path = std::filesystem::weakly_canonical(path_in(folder)).string();  // A link stays a link.
  std::ofstream file(path + ".new");
  file << nlohmann::json(options).dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << std::endl;
  require(file.good(), "cannot write " + path);
  std::filesystem::rename(path + ".new", path);
}
