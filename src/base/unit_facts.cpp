#include "base/unit_facts.h"

#include <bit>

#include "base/text.h"

namespace fsdp {

std::string describe_difference(const UnitFacts& facts, const UnitFacts& other) {
  if (facts.layout != other.layout) return "parameters of other names, shapes or dtypes, in another order, or others of them frozen";
  std::uint64_t bit = 1;
  for (const char* name : kSwitches) {
    if (((facts.switches ^ other.switches) & bit) != 0) return std::string(name) + " " + ((facts.switches & bit) != 0 ? "true" : "false");
    bit <<= 1;
  }
  return facts.divide_factor == other.divide_factor ? "" : "gradient_divide_factor " + shortest(std::bit_cast<double>(facts.divide_factor));
}

}  // namespace fsdp
