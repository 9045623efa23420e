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
    {"why", "Say for which rank the others wait, and what it is doing; or why the ranks have ended", &fsdp::tools::add_why},
    {"plan", "Say what training of a model will need and send, from its config.json; whether it fits", &fsdp::tools::add_plan},
    {"timeline", "Draw what the ranks did beside each other, and why they waited; they may still run", &fsdp::tools::add_timeline},
};

}  // namespace

int main(int argc, char** argv) {
  fsdp::prepare_process();
  CLI::App app("Answers questions about training runs.", "fsdp");
  app.require_subcommand(1);
  app.footer("Exit codes: 0 all well, 1 something was found, 2 wrong option, or nothing to read.");
  app.set_version_flag("--version", fsdp::version());
  std::map<const CLI::App*, std::function<int()>> run;
  for (const auto& [name, what, add] : kSubcommands) {
    auto* const command = app.add_subcommand(name, what);
    run.emplace(command, add(*command));
  }
  return fsdp::tools::run_command(app, argc, argv, [&] { return run.at(app.get_subcommands().front())(); });
}
