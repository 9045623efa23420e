#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <stdexcept>
#include <string>

#include "memory/slot_pool.h"
#include "support/random_case.h"
#include "support/replicas.h"
#include "support/sharded_trainee.h"

// One random case: trained twice with the library, and once by plain replicas.
namespace fsdp::testing {

/// MKL rounds a matrix product by where its operands lie in memory, and parameters that are cut anywhere lie elsewhere in a unit's buffer
/// than alone. Set before the first product; a value that the user gave stays.
inline const bool products_ignore_addresses = setenv("MKL_CBWR", "COMPATIBLE", /*overwrite=*/0) == 0;

/// Largest absolute value; 0 if there is none. NaN where `tensor` has one.
inline double largest(const at::Tensor& tensor) { return tensor.numel() == 0 ? 0 : tensor.detach().abs().max().item<double>(); }

/// Names, presence, shapes, dtypes and values agree: exactly if `tolerance` is 0 (but for the sign of zeros), else to `tolerance` times the
/// scale of the tensor.
inline void expect_near(const NamedTensors& actual, const NamedTensors& expected, double tolerance, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const auto& [name, value] = actual[i];
    const auto& reference = expected[i].second;
    ASSERT_EQ(name, expected[i].first) << what;
    ASSERT_EQ(value.defined(), reference.defined()) << what << ": " << name;
    if (!value.defined()) continue;
    ASSERT_EQ(value.sizes(), reference.sizes()) << what << ": " << name;
    ASSERT_EQ(value.scalar_type(), reference.scalar_type()) << what << ": " << name;
    if (at::allclose(value, reference, 0, 0, /*equal_nan=*/true)) continue;
    const double difference = largest(value.to(at::kDouble) - reference.to(at::kDouble));
    EXPECT_LE(difference, tolerance * largest(reference))
        << what << ": " << name << ", " << (value != reference).sum().item<std::int64_t>() << " of " << value.numel() << " elements differ";
  }
}

inline void expect_near(const RandomTrace& actual, const RandomTrace& expected, double tolerance, const std::string& what) {
  EXPECT_EQ(actual.failures, expected.failures) << what << ": where passes failed";
  ASSERT_EQ(actual.losses.size(), expected.losses.size()) << what;
  for (std::size_t i = 0; i < actual.losses.size(); ++i) {
    if (std::isnan(actual.losses[i]) && std::isnan(expected.losses[i])) continue;
    EXPECT_NEAR(actual.losses[i], expected.losses[i], tolerance * std::abs(expected.losses[i])) << what << ": loss " << i;
  }
  ASSERT_EQ(actual.norms.size(), expected.norms.size()) << what;
  for (std::size_t i = 0; i < actual.norms.size(); ++i) {
    EXPECT_NEAR(actual.norms[i], expected.norms[i], std::max(tolerance, 1e-12) * expected.norms[i]) << what << ": norm " << i;
  }
  ASSERT_EQ(actual.gradients.size(), expected.gradients.size()) << what;
  for (std::size_t s = 0; s < actual.gradients.size(); ++s) {
    expect_near(actual.gradients[s], expected.gradients[s], tolerance, what + ", gradients of step " + std::to_string(s));
  }
  expect_near(actual.parameters, expected.parameters, tolerance, what + ", parameters");
}

/// Where the order of sums or the ends of tensors are open, training and the models' conditioning amplify rounding, by some 100 units of it
/// as a rule and by 2,100 in the worst of 480 such cases. What a fault changes is of the order of the gradients themselves.
inline double rounding(const Case& c) {
  const bool all_double = c.model.dtype == at::kDouble && !c.model.mixed_dtypes;
  return 4096 * (all_double ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon());
}

/// On each of the case's ranks. `folder`: empty, the same on all of them.
inline void check(const Case& c, Meshes& meshes, const std::string& folder) {
  memory::fill_slots_with_nan(c.fill_slots);
  const auto train = [&](const Settings& settings, const char* name) {
    SCOPED_TRACE(name);
    const auto own = folder + "/" + std::to_string(c.seed) + "-" + name;
    std::filesystem::create_directories(own);
    const auto& mesh = meshes.in_rows(settings.outer, c.unkind, c.pieces, /*messages=*/c.grad_comm.has_value());
    return ShardedTrainee(c, settings, mesh, meshes.pieces(), own).train();
  };
  const auto first = train(c.first, "first");
  const auto second = train(c.second, "second");
  const auto first_order = sum_order(c, c.first);
  const auto second_order = sum_order(c, c.second);
  // Which operator is the one to fail depends on the library's own: where one training ends its pass before it and the other does not,
  // their gradients differ rightly.
  const bool same = first_order == second_order && first.norms == second.norms && first.failures == second.failures;
  // Where the order of sums is open, both have the same units and meshes.
  if (same) {
    expect_near(second, first, c.same_ends(c.first, c.second) ? 0 : rounding(c), "second against first");
  }
  if (c.grad_comm) return;  // The replicas do not know where a unit's regions begin.
  // One rank of each case trains the reference: which one changes from case to case.
  const auto rank = static_cast<std::int64_t>(c.seed % static_cast<std::uint64_t>(c.ranks));
  if (position_in(meshes.in_rows(c.first.outer, c.unkind, c.pieces)) != rank) return;
  const auto expect_replicas = [&](const RandomTrace& trace, const Settings& settings, const SumOrder& order, const char* name) {
    const double tolerance = c.sums_in_order() && c.same_ends(settings) ? 0 : rounding(c);
    const auto replicas = Replicas(c, order, rank, trace, tolerance, meshes.pieces()).train();
    expect_near(trace, replicas, tolerance, std::string(name) + " against replicas");
  };
  expect_replicas(first, c.first, first_order, "first");
  if (!same) expect_replicas(second, c.second, second_order, "second");
}

/// What a rank that a signal ends (a hang's alarm, an abort, a crash) was doing.
inline std::string current_case;

inline void print_current_case(int signal) {
  [[maybe_unused]] const auto written = write(STDERR_FILENO, current_case.data(), current_case.size());
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

/// As check, of the case of a seed; what ends it says which it was.
inline void check_seed(std::uint64_t seed, Meshes& meshes, const std::string& folder) {
  for (const int signal : {SIGABRT, SIGALRM, SIGBUS, SIGFPE, SIGSEGV}) std::signal(signal, print_current_case);
  auto c = make_case(seed);
  if (c.pieces > 1) {
    meshes.in_rows(1, /*unkind=*/false, c.pieces);
    c.model.piece = meshes.pieces().coordinate("tp");
  }
  current_case = described(c) + "\n";
  const ::testing::ScopedTrace trace(__FILE__, __LINE__, current_case);
  try {
    check(c, meshes, folder);
  } catch (const std::exception& error) {
    throw std::runtime_error(current_case + error.what());
  }
}

}  // namespace fsdp::testing
