#include "command_line.h"

#include <charconv>
#include <cmath>
#include <exception>
#include <iostream>

#include "checkpoint/printable.h"
#include "fsdp/error.h"
#include "fsdp/size.h"

namespace fsdp::tools {
namespace {

/// True if this is a number and nothing else.
template <typename Number>
bool read_number(const std::string& text, Number& number) {
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), number);
  return failure == std::errc() && end == text.data() + text.size();
}

/// CLI11 says no more than that it lacks one.
void require_subcommand(const CLI::App& app, const std::string& word) {
  if (word.starts_with("-")) return;
  std::string known;
  for (const auto* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (command->get_name() == word) return;
    known += " " + command->get_name();
  }
  throw Error("there is no command '" + word + "'; these are there:" + known);
}

}  // namespace

CLI::Option* add_size(CLI::App& command, const std::string& name, std::int64_t& bytes, const std::string& what) {
  const auto read = [&bytes, name](const std::string& text) {
    try {
      bytes = parse_size(text);
    } catch (const Error& error) {
      throw CLI::ValidationError(name, error.what());
    }
  };
  return command.add_option_function<std::string>(name, read, what)->type_name("SIZE");
}

CLI::Validator whole_number(std::int64_t least) {
  const auto check = [least](const std::string& text) {
    std::int64_t number = 0;
    return read_number(text, number) && number >= least ? "" : "'" + text + "' is no whole number of at least " + std::to_string(least);
  };
  return {check, "at least " + std::to_string(least)};
}

CLI::Validator positive_number() {
  const auto check = [](const std::string& text) {
    double number = 0;
    return read_number(text, number) && std::isfinite(number) && number > 0 ? "" : "'" + text + "' is no number above 0";
  };
  return {check, "above 0"};
}

int run_command(CLI::App& app, int argc, char** argv, const std::function<int()>& chosen) {
  try {
    if (argc < 2) {
      std::cerr << app.help();
      return kUsageError;
    }
    require_subcommand(app, argv[1]);
    app.parse(argc, argv);
    return chosen();
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const std::exception& error) {
    std::cerr << app.get_name() << ": " << ckpt::printable(error.what()) << "\n";
    return kUsageError;
  }
}

}  // namespace fsdp::tools
