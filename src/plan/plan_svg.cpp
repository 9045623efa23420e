#include <algorithm>
#include <array>
#include <iomanip>
#include <ios>
#include <string>

#include "base/classic_stream.h"
#include "fsdp/plan.h"

namespace fsdp {
namespace {

struct DrawnKind {
  const char* name;
  const char* colour;  // From a palette that is safe for colour-blind readers (Okabe and Ito, 2008).
  std::int64_t PlanBytes::*bytes;
};

/// From below, first what is always there.
constexpr std::array kKinds = {
    DrawnKind{"main parameters", "#0072b2", &PlanBytes::main_parameters},
    DrawnKind{"optimizer state", "#56b4e9", &PlanBytes::optimizer_state},
    DrawnKind{"main gradients", "#009e73", &PlanBytes::main_gradients},
    DrawnKind{"activations", "#999999", &PlanBytes::activations},
    DrawnKind{"gathered parameters", "#e69f00", &PlanBytes::gathered_parameters},
    DrawnKind{"unreduced gradients", "#d55e00", &PlanBytes::unreduced_gradients},
    DrawnKind{"communication", "#cc79a7", &PlanBytes::communication},
    DrawnKind{"unused slots", "#f0e442", &PlanBytes::unused_slots},
};

constexpr double kWidth = 900;
constexpr double kHeight = 300;
constexpr double kLeft = 80;
constexpr double kTop = 30;

std::string escaped(const std::string& text) {
  std::string safe;
  for (const char c : text) {
    if (c == '<')
      safe += "&lt;";
    else if (c == '&')
      safe += "&amp;";
    else
      safe += c;
  }
  return safe;
}

double gib(std::int64_t bytes) { return static_cast<double>(bytes) / (1 << 30); }

}  // namespace

std::string Plan::svg() const {
  ClassicStream<std::ostringstream> svg;
  svg << std::fixed << std::setprecision(2) << "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " << kLeft + kWidth + 20 << " "
      << kTop + kHeight + 70 << "\" font-family=\"sans-serif\" font-size=\"12\">\n"
      << "<text x=\"" << kLeft << "\" y=\"18\">Memory of a rank of " << ranks << " over one step. Peak: " << gib(peak.device())
      << " GiB, in " << escaped(moment) << "</text>\n";
  const double whole = static_cast<double>(std::max<std::int64_t>(peak.device(), 1));
  const double step = kWidth / static_cast<double>(std::max<std::size_t>(moments.size(), 1));
  for (std::size_t k = 0; k < moments.size(); ++k) {
    const auto& [what, most] = moments[k];
    double top = kTop + kHeight;
    svg << "<g><title>" << escaped(what) << ": " << gib(most.device()) << " GiB</title>";
    for (const auto& kind : kKinds) {
      const double height = kHeight * static_cast<double>(most.*kind.bytes) / whole;
      if (height <= 0) continue;
      top -= height;
      svg << "<rect x=\"" << kLeft + step * static_cast<double>(k) << "\" y=\"" << top << "\" width=\"" << step << "\" height=\"" << height
          << "\" fill=\"" << kind.colour << "\"/>";
    }
    svg << "</g>\n";
  }
  for (const double part : {0.0, 0.5, 1.0}) {
    const double y = kTop + kHeight * (1 - part);
    svg << "<line x1=\"" << kLeft - 5 << "\" y1=\"" << y << "\" x2=\"" << kLeft + kWidth << "\" y2=\"" << y
        << "\" stroke=\"#bbb\"/><text x=\"" << kLeft - 8 << "\" y=\"" << y + 4 << "\" text-anchor=\"end\">" << part * gib(peak.device())
        << " GiB</text>\n";
  }
  double x = kLeft;
  double y = kTop + kHeight + 24;
  for (std::size_t k = 0; k < kKinds.size(); ++k) {
    if (k == kKinds.size() / 2) {
      x = kLeft;
      y += 22;
    }
    svg << "<rect x=\"" << x << "\" y=\"" << y - 10 << "\" width=\"12\" height=\"12\" fill=\"" << kKinds[k].colour << "\"/><text x=\""
        << x + 18 << "\" y=\"" << y << "\">" << kKinds[k].name << "</text>\n";
    x += kWidth / 4;
  }
  svg << "</svg>\n";
  return svg.str();
}

}  // namespace fsdp
