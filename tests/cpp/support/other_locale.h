#pragma once

#include <locale>
#include <string>

namespace fsdp::testing {

/// While it lives, the global locale writes numbers as in German: 1.024,5.
class OtherLocale {
 public:
  OtherLocale() : before_(std::locale::global(std::locale(std::locale::classic(), new German))) {}
  ~OtherLocale() { std::locale::global(before_); }
  OtherLocale(const OtherLocale&) = delete;
  OtherLocale& operator=(const OtherLocale&) = delete;

 private:
  struct German : std::numpunct<char> {
    char do_decimal_point() const override { return ','; }
    char do_thousands_sep() const override { return '.'; }
    std::string do_grouping() const override { return "\3"; }
  };
  std::locale before_;
};

}  // namespace fsdp::testing
