#include "report/timeline_page.h"

#include <array>
#include <charconv>
#include <nlohmann/json.hpp>
#include <string_view>

#include "fsdp/error.h"
#include "report/page_assets.h"

namespace fsdp::report {
namespace {

/// Quotes a text for JSON in a script element, which "</script>" or "<!--" would end or change.
std::string quoted(const std::string& text) {
  const auto json = nlohmann::json(text).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  std::string safe;
  for (const char c : json) {
    if (c == '<') {
      safe += "\\u003c";
    } else {
      safe += c;
    }
  }
  return safe;
}

/// Writes the page's data. Lists of numbers have all fields of one entry after the other; times are in ns, from the timeline's beginning
/// or, where noted, from the entry before. What reads them is timeline_data.js.
class PageData {
 public:
  PageData(const Timeline& timeline, const std::string& title, const std::optional<PlanComparison>& plan)
      : timeline_(timeline), title_(title), plan_(plan) {}

  std::string write() {
    text_ = "{\"version\":2,\"title\":" + quoted(title_) + ",\"length\":";
    number(timeline_.ended - timeline_.began);
    text_ += ",\"names\":[";
    for (const auto& name : timeline_.names) separate(quoted(name));
    text_ += "],\"missing\":[";
    for (const auto rank : timeline_.missing) entry({rank});
    text_ += "],\n\"why\":";
    if (timeline_.why.cause == Cause::kNothing) {
      text_ += "null";
    } else {
      text_ += "{\"rank\":" + std::to_string(timeline_.why.rank) + ",\"text\":" + quoted(timeline_.why.text) + "}";
    }
    text_ += ",\n\"kinds\":[";
    for (const auto kind : events::kMemoryKinds) separate(quoted(std::string(kind)));
    text_ += "],\n\"plan\":";
    if (plan_) {
      write_plan();
    } else {
      text_ += "null";
    }
    text_ += ",\n\"ranks\":[";
    for (const auto& rank : timeline_.ranks) write_rank(rank);
    text_ += "]}";
    return std::move(text_);
  }

 private:
  void number(std::int64_t value) {
    std::array<char, 24> digits{};
    const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
    text_.append(digits.data(), end);
  }
  void separate(const std::string& next) {
    if (!text_.ends_with('[')) text_ += ',';
    text_ += next;
  }
  void entry(std::initializer_list<std::int64_t> values) {
    for (const auto value : values) {
      separate("");
      number(value);
    }
  }
  /// From the entry before.
  std::int64_t after(std::int64_t time) {
    const auto passed = time - before_;
    before_ = time;
    return passed;
  }
  void begin_list(const char* name) {
    text_ += std::string(",\n\"") + name + "\":[";
    before_ = timeline_.began;
  }

  void write_plan() {
    text_ += "{\"peak\":";
    number(plan_->planned_peak);
    text_ += ",\"values\":[";  // name, whether it is a time (in ms; otherwise bytes), planned, measured (-1: not known), rank
    for (const auto& value : plan_->values) {
      separate(std::string("[") + quoted(value.name) + (value.is_time ? ",true," : ",false,") + nlohmann::json(value.planned).dump() + "," +
               nlohmann::json(value.measured).dump() + "," + std::to_string(value.rank) + "]");
    }
    text_ += "]}";
  }

  void write_rank(const RankTimeline& rank) {
    text_ += text_.ends_with('[') ? "\n{\"rank\":" : ",\n{\"rank\":";
    number(rank.writer.rank);
    text_ += ",\"host\":" + quoted(rank.writer.host.data()) + ",\"clock_ahead\":";
    number(rank.clock.ahead);
    text_ += ",\"clock_within\":";
    number(rank.clock.within);
    begin_list("steps");  // number, begin, end, whether it is whole
    for (const auto& step : rank.steps) {
      entry({step.number, step.began - timeline_.began, step.ended - timeline_.began, step.is_whole ? 1 : 0});
    }
    text_ += ']';
    begin_list("compute");  // begin from the one before, length, Activity::Kind, unit
    for (const auto& span : rank.compute)
      entry({after(span.began), span.ended - span.began, static_cast<std::int64_t>(span.kind), span.unit});
    text_ += ']';
    begin_list("collectives");
    for (const auto& span : rank.collectives) write(span);
    text_ += ']';
    begin_list("memory");  // time from the one before, and how much more there is of each kind than at the one before
    BytesByKind held = {};
    for (const auto& moment : rank.memory) {
      entry({after(moment.time)});
      for (std::size_t kind = 0; kind < held.size(); ++kind) entry({moment.held[kind] - held[kind]});
      held = moment.held;
    }
    text_ += ']';
    begin_list("peaks");  // time from the one before, bytes, unit
    for (const auto& peak : rank.peaks) entry({after(peak.time), peak.bytes, peak.unit});
    text_ += "]}";
  }

  /// Begin from the one before; from the begin: end, begin of the wait, arrival (-1: none); lane, track, unit, operation, row, number,
  /// bytes; flags; and if there was a wait: reasons, late rank, what it was doing.
  void write(const CollectiveSpan& span) {
    constexpr std::int64_t kInBackward = 1;
    constexpr std::int64_t kOpen = 2;
    constexpr std::int64_t kFailed = 4;
    const auto& times = span.times;
    const auto from_begin = [&](std::int64_t time) { return time == 0 ? std::int64_t{-1} : time - times.began; };
    const auto flags = (span.in_backward ? kInBackward : 0) + (span.state == CollectiveSpan::State::kOpen ? kOpen : 0) +
                       (span.state == CollectiveSpan::State::kFailed ? kFailed : 0);
    entry({after(times.began), times.ended - times.began, from_begin(times.wait_began), from_begin(times.arrived),
           static_cast<std::int64_t>(span.lane), span.track, span.unit, span.operation, span.row, static_cast<std::int64_t>(span.number),
           span.bytes, flags});
    if (times.wait_began == 0) return;
    for (const auto ns : span.reasons) entry({ns});
    entry({span.late_rank, span.late_rank_was});
  }

  const Timeline& timeline_;
  const std::string& title_;
  const std::optional<PlanComparison>& plan_;
  std::string text_;
  std::int64_t before_ = 0;
};

}  // namespace

std::string timeline_page(const Timeline& timeline, const std::string& title, const std::optional<PlanComparison>& plan) {
  const std::array<std::pair<std::string_view, std::string>, 3> parts = {{{"{{style}}", std::string(kPageStyle)},
                                                                          {"{{data}}", PageData(timeline, title, plan).write()},
                                                                          {"{{program}}", std::string(kPageProgram)}}};
  std::string page;
  std::string_view rest = kPageHtml;
  for (const auto& [mark, text] : parts) {
    const auto at = rest.find(mark);
    if (at == std::string_view::npos) throw Error("the page of timelines has no place for " + std::string(mark));
    page.append(rest.substr(0, at)).append(text);
    rest.remove_prefix(at + mark.size());
  }
  return page.append(rest);
}

}  // namespace fsdp::report
