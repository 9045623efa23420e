#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <iomanip>
#include <iostream>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/classic_stream.h"
#include "checkpoint/output_file.h"
#include "checkpoint/printable.h"
#include "report/plan_comparison.h"
#include "report/timeline_files.h"
#include "report/timeline_page.h"
#include "report/trace_json.h"
#include "subcommands.h"

namespace fsdp::tools {
namespace {

namespace fs = std::filesystem;

struct TimelineOptions {
  std::string folder;
  std::string html;
  std::string json;
  std::string steps;
  std::string plan;
};

std::string counted(std::size_t count, const std::string& what) { return std::to_string(count) + " " + what + (count == 1 ? "" : "s"); }

std::string contents(const report::Timeline& timeline) {
  std::set<std::int64_t> steps;
  for (const auto& rank : timeline.ranks) {
    for (const auto& step : rank.steps) steps.insert(step.number);
  }
  std::string text = counted(timeline.ranks.size(), "rank") + ", " + counted(steps.size(), "step");
  if (!steps.empty()) text += " (" + std::to_string(*steps.begin()) + " to " + std::to_string(*steps.rbegin()) + ")";
  return text;
}

/// A table of what was planned and what was measured.
std::string text_of(const report::PlanComparison& comparison) {
  ClassicStream<std::ostringstream> text;
  const auto number = [](const report::ComparedValue& value, double of) {
    ClassicStream<std::ostringstream> digits;
    digits << std::fixed << std::setprecision(value.is_time ? 1 : 0) << of;
    return of < 0 ? std::string("-") : digits.str();
  };
  text << std::left << std::setw(26) << "planned and measured" << std::right << std::setw(18) << "planned" << std::setw(18) << "measured"
       << "  rank\n";
  for (const auto& value : comparison.values) {
    text << std::left << std::setw(26) << value.name + (value.is_time ? ", ms" : ", B") << std::right << std::setw(18)
         << number(value, value.planned) << std::setw(18) << number(value, value.measured);
    if (value.rank >= 0) text << "  " << value.rank;
    text << "\n";
  }
  return text.str();
}

void write(const std::string& file, const std::string& text, std::ostream& summary) {
  ckpt::write_output(file, text);
  summary << ckpt::printable(file) << ": " << text.size() << " bytes\n";
}

int draw(const TimelineOptions& options) {
  std::optional<report::StepRange> steps;
  if (!options.steps.empty()) steps = report::parse_steps(options.steps);
  const auto page = !options.html.empty() || !options.json.empty() ? options.html : (fs::path(options.folder) / "timeline.html").string();
  // What may be read by another program, as in `--json /dev/stdout | jq`, must stay alone.
  std::ostream& summary = ckpt::is_written_in_place(options.json) || ckpt::is_written_in_place(page) ? std::cerr : std::cout;
  std::vector<std::string> left_out;
  const auto timeline = report::read_timeline(options.folder, steps, left_out);
  summary << contents(timeline) << "\n";
  if (timeline.why.cause != report::Cause::kNothing) summary << ckpt::printable(timeline.why.text) << "\n";
  if (const auto longest = report::longest_wait(timeline); !longest.empty())
    summary << "longest wait: " << ckpt::printable_line(longest) << "\n";
  std::optional<report::PlanComparison> plan;
  if (!options.plan.empty()) plan = report::compare(report::read_plan(options.plan), timeline);
  if (plan) summary << text_of(*plan);
  for (const auto& line : left_out) summary << "Not read: " << ckpt::printable_line(line) << "\n";
  if (!options.json.empty()) write(options.json, report::trace_json(timeline), summary);
  if (!page.empty()) write(page, report::timeline_page(timeline, report::title_of(options.folder), plan), summary);
  return 0;
}

}  // namespace

std::function<int()> add_timeline(CLI::App& command) {
  auto options = std::make_shared<TimelineOptions>();
  command.add_option("folder", options->folder, "The value of FSDP_EVENTS with which the ranks were started")->required();
  command.add_option("--html", options->html, "The page to write, in one file (default, without --json: timeline.html in the folder)");
  command.add_option("--json", options->json, "A trace to write as Perfetto's JSON, for https://ui.perfetto.dev");
  command.add_option("--steps", options->steps, "The first and the last step, as in 12-14, or one step (default: all steps with events)");
  command.add_option("--plan", options->plan,
                     "The output of `fsdp plan --json` for this run, which the page shows beside the measured values");
  return [options] { return draw(*options); };
}

}  // namespace fsdp::tools
