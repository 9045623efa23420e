// fsdp: what a training run can be asked from outside.

#include <CLI/CLI.hpp>
#include <functional>
#include <map>

#include "base/process.h"
#include "fsdp/version.h"
#include "subcommands.h"

namespace {

struct Subcommand {
  const char* name;
  const char* what;
  std::function<int()> (*add)(CLI::App& command);
};

constexpr Subcommand kSubcommands[] = {
    {"why", "Print which rank the others wait for, and what it is doing; or why the ranks have ended", &fsdp::tools::add_why},
    {"plan", "Print the memory and communication that training of a model needs, from its config.json", &fsdp::tools::add_plan},
    {"timeline", "Draw a timeline of all ranks, with the reasons of their waits; they may still run", &fsdp::tools::add_timeline},
};

}  // namespace

int main(int argc, char** argv) {
  fsdp::prepare_process();
  CLI::App app("Answers questions about training runs.", "fsdp");
  app.require_subcommand(1);
  app.footer("Exit codes: 0 no problem found, 1 a problem was found, 2 wrong option, or nothing to read.");
  app.set_version_flag("--version", fsdp::version());
  std::map<const CLI::App*, std::function<int()>> run;
  for (const auto& [name, what, add] : kSubcommands) {
    auto* const command = app.add_subcommand(name, what);
    run.emplace(command, add(*command));
  }
  return fsdp::tools::run_command(app, argc, argv, [&] { return run.at(app.get_subcommands().front())(); });
}
