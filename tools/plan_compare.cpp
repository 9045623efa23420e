#include "plan_compare.h"

#include <algorithm>
#include <iomanip>
#include <iostream>
#include <nlohmann/json.hpp>

#include "base/classic_stream.h"
#include "fsdp/error.h"
#include "plan_question.h"

namespace fsdp::tools {

int compare_plans(const std::string& first, const std::string& second) {
  const auto parse = [](const std::string& path) {
    try {
      auto json = nlohmann::json::parse(read_text(path));
      json.at("peak").at("device");
      return json;
    } catch (const nlohmann::json::exception&) {
      throw Error(path + " is no plan; fsdp plan --json writes one");
    }
  };
  const auto a = parse(first);
  const auto b = parse(second);
  std::cout << std::left << std::setw(24) << "" << std::right << std::setw(20) << "A" << std::setw(20) << "B" << std::setw(10) << "B / A"
            << "\n";
  const auto row = [&](const std::string& name, double of_a, double of_b, int digits) {
    if (of_a == 0 && of_b == 0) return;
    ClassicStream<std::ostringstream> ratio;
    if (of_a > 0) ratio << std::fixed << std::setprecision(3) << of_b / of_a;
    std::cout << std::fixed << std::setprecision(digits) << std::left << std::setw(24) << name << std::right << std::setw(20) << of_a
              << std::setw(20) << of_b << std::setw(10) << ratio.str() << "\n";
  };
  const auto rows = [&](const char* group, int digits) {
    if (!a.contains(group) || !b.contains(group)) return;
    for (const auto& [name, value] : a[group].items()) {
      if (!value.is_number() || !b[group].contains(name)) continue;
      auto text = name;
      std::ranges::replace(text, '_', ' ');
      row(text, value.get<double>(), b[group][name].get<double>(), digits);
    }
  };
  std::cout << "At the peak, in bytes:\n";
  rows("peak", 0);
  std::cout << "The most in a step, in bytes:\n";
  if (a.contains("memory") && b.contains("memory")) {
    for (const auto& [name, use] : a["memory"].items()) {
      if (!b["memory"].contains(name)) continue;
      auto text = name;
      std::ranges::replace(text, '_', ' ');
      row(text, use.at("peak").get<double>(), b["memory"][name].at("peak").get<double>(), 0);
    }
  }
  std::cout << "Sent by a rank in a step, in bytes, and how often:\n";
  rows("wire", 0);
  if (a.contains("time") && b.contains("time")) std::cout << "Time:\n";
  rows("time", 1);
  return 0;
}

}  // namespace fsdp::tools
