#include "train_gpt/resume.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "train_gpt/config.h"

namespace fs = std::filesystem;

namespace {

bool is_checkpoint(const fs::path& path) { return fs::is_regular_file(path / ".metadata"); }

// The folder of the run that has saved a checkpoint, if it lies there still.
std::string run_of(const std::string& checkpoint) {
  const auto run = fs::absolute(checkpoint + "/").lexically_normal().parent_path().parent_path().parent_path();
  return has_config(run) ? run.string() : "";
}

// "step-590, step-600": the newest few, by number.
std::string checkpoints_in(const std::string& folder) {
  std::vector<std::pair<long, std::string>> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const auto name = entry.path().filename().string();
    if (name.starts_with(".") || !is_checkpoint(entry.path())) continue;
    const auto digits = name.find_last_not_of("0123456789") + 1;
    found.emplace_back(digits < name.size() ? std::strtol(name.c_str() + digits, nullptr, 10) : -1, name);
  }
  std::sort(found.begin(), found.end());
  constexpr std::size_t kShown = 5;
  std::string text = found.size() > kShown ? "..., " : "";
  for (std::size_t i = found.size() - std::min(kShown, found.size()); i < found.size(); ++i) {
    text += found[i].second + (i + 1 < found.size() ? ", " : "");
  }
  return text;
}

// Options that decide what a checkpoint holds, as on the command line. An optimizer writes no text.
std::vector<std::string> saved_options(const Options& options, bool with_optimizer = true) {
  const auto& model = options.model;
  std::vector<std::string> words = {"--dim " + std::to_string(model.dim), "--layers " + std::to_string(model.layers),
                                    "--heads " + std::to_string(model.heads), "--context " + std::to_string(model.context),
                                    model.tied ? "--tied" : "--tied=false"};
  if (with_optimizer) words.push_back("--optimizer " + options.optimizer);
  return words;
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

// Those of `words` that `others` has not, place by place.
std::string differing(const std::vector<std::string>& words, const std::vector<std::string>& others) {
  std::vector<std::string> found;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (words[i] != others[i]) found.push_back(words[i]);
  }
  return joined(found);
}

}  // namespace

std::string describe_place(const std::string& path) {
  if (!fs::exists(path)) return "there is nothing";
  if (is_checkpoint(path)) {
    const auto run = run_of(path);
    return "it is a checkpoint" + (run.empty() ? "" : " of the run " + run);
  }
  if (has_config(path)) return "it is the folder of a run";
  if (const auto names = checkpoints_in(path); !names.empty()) {
    const auto run = run_of(path + "/any");
    return "it holds the checkpoints " + names + (run.empty() ? "" : " of the run " + run);
  }
  return "it holds no checkpoint, and no config.json of a run";
}

void check_places(const Options& options) {
  const auto& [resume, generate, run, save] = std::tie(options.resume, options.generate, options.run, options.save);
  require(generate.empty() || has_config(generate), "--generate " + generate + " is not the folder of a run: " + describe_place(generate));
  require(resume == "no" || resume == "auto" || has_config(resume) || is_checkpoint(resume),
          "--resume " + resume + " is neither the folder of a run nor a checkpoint: " + describe_place(resume));
  require(run.empty() || !is_checkpoint(run), "--run " + run + " can't be the folder of a run: " + describe_place(run));
  require(save.empty() || !is_checkpoint(save), "--save " + save + " can't be a folder for checkpoints: " + describe_place(save));
}

void check_same(const Options& options, const Options& saved, const std::string& run) {
  const bool trains = options.generate.empty();
  const auto given = saved_options(options, trains), of_run = saved_options(saved, trains);
  const auto wrong = differing(given, of_run);
  require(wrong.empty(), wrong + " does not fit " + run + ", whose checkpoints were saved with " + differing(of_run, given) +
                             ": leave it out, or begin a new run");
}

void check_checkpoint(const Options& options) {
  if (!is_checkpoint(options.resume)) return;
  const auto run = run_of(options.resume);
  if (run.empty()) return;
  const auto needed = differing(saved_options(read_config(run)), saved_options(options));
  require(needed.empty(), "to begin a new run from the checkpoint " + options.resume + ", give " + needed + ", too, as its run " + run +
                              " has them; to go on with that run: --resume " + run);
}

std::optional<fsdp::Loaded> resume(const Options& options, const RunFolder& run, GPT& model, fsdp::Optimizer& optimizer) {
  if (options.resume == "no") return std::nullopt;
  try {
    if (options.resume == "auto") return fsdp::load_latest(options.memory, run.checkpoints(), *model, optimizer);
    return fsdp::load(options.resume, *model, optimizer);
  } catch (const fsdp::CommError&) {
    throw;
  } catch (const fsdp::Error& error) {
    const std::string text = error.what();
    const bool misfit = text.find("does not fit the model") != std::string::npos || text.find("has shape") != std::string::npos;
    if (!misfit) throw;
    const auto from = options.resume == "auto" ? run.checkpoints() : options.resume;
    throw std::runtime_error(from + " was saved with other options than " + joined(saved_options(options)) +
                             ": give the model and the optimizer of the run that saved it\n  " + text.substr(0, text.find("\n  (")));
  }
}
