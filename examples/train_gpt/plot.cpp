#include "train_gpt/plot.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <locale>
#include <numbers>
#include <sstream>
#include <utility>

namespace {

using Points = std::vector<std::pair<double, double>>;

constexpr double kWidth = 720, kHeight = 400, kLeft = 56, kRight = 16, kTop = 32, kBottom = 44;
constexpr std::size_t kMostPoints = 500;  // more would not be seen

Points points_of(const std::vector<nlohmann::json>& rows, const char* key, double scale) {
  Points points;
  for (const auto& row : rows) {
    if (row.contains(key)) points.emplace_back(row.at("step").get<double>(), row.at(key).get<double>() * scale);
  }
  return points;
}

// Means of neighbours.
Points thinned(const Points& points) {
  const std::size_t group = (points.size() + kMostPoints - 1) / kMostPoints;
  Points means;
  for (std::size_t i = 0; i < points.size(); i += group) {
    const std::size_t count = std::min(group, points.size() - i);
    means.emplace_back(0, 0);
    for (std::size_t j = i; j < i + count; ++j) {
      means.back().first += points[j].first / static_cast<double>(count);
      means.back().second += points[j].second / static_cast<double>(count);
    }
  }
  return means;
}

// 1, 2 or 5 times a power of ten, so that about five of them make up the range.
double tick_distance(double range) {
  const double power = std::pow(10, std::floor(std::log10(range / 5)));
  const double digit = range / 5 / power;
  return power * (digit > 5 ? 10 : digit > 2 ? 5 : digit > 1 ? 2 : 1);
}

}  // namespace

void write_loss_plot(const std::string& path, const std::vector<nlohmann::json>& rows) {
  const auto training = thinned(points_of(rows, "loss", 1 / std::numbers::ln2));
  const auto validation = points_of(rows, "validation_bits_per_byte", 1);
  double last_step = 1, highest = 1;
  for (const auto* points : {&training, &validation}) {
    for (const auto& [step, bits] : *points) {
      last_step = std::max(last_step, step);
      highest = std::max(highest, bits);
    }
  }
  const auto x = [&](double step) { return kLeft + step / last_step * (kWidth - kLeft - kRight); };
  const auto y = [&](double bits) { return kHeight - kBottom - bits / highest * (kHeight - kTop - kBottom); };

  std::ostringstream svg;
  svg.imbue(std::locale::classic());  // A decimal comma would separate coordinates.
  svg << "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " << kWidth << " " << kHeight
      << "\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n";
  for (double bits = 0; bits <= highest; bits += tick_distance(highest)) {
    svg << "<path d=\"M" << kLeft << " " << y(bits) << "H" << kWidth - kRight << "\" stroke=\"#ddd\"/><text x=\"" << kLeft - 8 << "\" y=\""
        << y(bits) + 4 << "\" text-anchor=\"end\">" << bits << "</text>\n";
  }
  for (double step = 0; step <= last_step; step += tick_distance(last_step)) {
    svg << "<text x=\"" << x(step) << "\" y=\"" << kHeight - kBottom + 18 << "\" text-anchor=\"middle\">" << step << "</text>\n";
  }
  svg << "<text x=\"" << kWidth / 2 << "\" y=\"" << kHeight - 8 << "\" text-anchor=\"middle\">step</text>\n"
      << "<text x=\"" << kLeft << "\" y=\"18\">bits per byte: <tspan fill=\"#1f77b4\">training</tspan>, "
      << "<tspan fill=\"#d62728\">validation</tspan></text>\n<polyline class=\"training\" fill=\"none\" stroke=\"#1f77b4\" points=\"";
  for (const auto& [step, bits] : training) svg << x(step) << "," << y(bits) << " ";
  svg << "\"/>\n";
  for (const auto& [step, bits] : validation) {
    svg << "<circle class=\"validation\" cx=\"" << x(step) << "\" cy=\"" << y(bits) << "\" r=\"4\" fill=\"#d62728\"/>\n";
  }
  svg << "</svg>\n";
  std::ofstream(path) << svg.str();
}
