// What libfsdp's own kernels give on a device, against the same on the CPU, bit for bit; and how fast they read and write. A line for each:
// "passed NAME", "failed NAME: WHY", "measured NAME: VALUE". See own_kernels.py.

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "base/block_format.h"
#include "base/rounded_blocks.h"
#include "base/rounded_rows.h"
#include "comm/device_sums.h"
#include "comm/rank_order_sum.h"
#include "fsdp/gather_format.h"
#include "optim/adamw_8bit_step.h"
#include "optim/block_adamw.h"
#include "optim/fused.h"

namespace {

using fsdp::comm::RankOrderSum;
using fsdp::comm::SumEnd;

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};

struct Check {
  explicit Check(const c10::Device& on) : device(on) {}

  void passed_if(bool passed, const std::string& name, const std::string& why) {
    std::cout << (passed ? "passed " + name : "failed " + name + ": " + why) << std::endl;
    failed = failed || !passed;
  }

  const c10::Device device;
  bool failed = false;
};

at::Tensor numbers(std::int64_t numel, std::int64_t seed, at::ScalarType dtype) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(seed));
  return (at::randn({numel}, generator, at::kDouble) * at::pow(10.0, at::randn({numel}, generator, at::kDouble))).to(dtype);
}

/// NaN apart: CPU and GPU have different ones.
bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const auto x = at::nan_to_num(a.cpu().contiguous(), 7.0);
  const auto y = at::nan_to_num(b.cpu().contiguous(), 7.0);
  return x.nbytes() == y.nbytes() && std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

/// Rows of what was received, of which one may lie apart; `shift`: elements by which no pack begins there.
RankOrderSum sum_of(const std::vector<at::Tensor>& sources, const at::Tensor& old, const SumEnd& end, bool apart, std::int64_t shift,
                    const c10::Device& device) {
  const auto numel = sources[0].numel();
  const auto count = static_cast<std::int64_t>(sources.size());
  const auto memory = at::zeros({(count + 1) * (numel + shift) + shift}, sources[0].options().device(device));
  RankOrderSum sum{.sources = {}, .out = at::zeros({numel + shift}, old.options().device(device)).narrow(0, shift, numel), .end = end};
  sum.out.copy_(old);
  for (std::int64_t k = 0; k < count; ++k) {
    const auto slot = !apart ? k : k == count / 2 ? count : k - static_cast<std::int64_t>(k > count / 2);
    sum.sources.push_back(memory.narrow(0, shift + slot * (numel + shift), numel));
    sum.sources.back().copy_(sources[static_cast<std::size_t>(k)]);
  }
  return sum;
}

void check_sums(Check& check) {
  for (const auto source : kDtypes) {
    for (const auto out : kDtypes) {
      int wrong = 0;
      int all = 0;
      for (const std::int64_t numel : {1, 7, 1024, 100'003}) {
        for (const int ranks : {1, 2, 3, 4, 5, 7, 8, 9, 17, 64}) {
          if (numel * ranks > 300'000) continue;
          std::vector<at::Tensor> sources;
          for (int r = 0; r < ranks; ++r) sources.push_back(numbers(numel, 31 + r, source));
          const auto old = numbers(numel, 5, out);
          for (int variant = 0; variant < 12; ++variant) {
            const auto rounded = variant % 3 == 0 ? at::ScalarType::Undefined : variant % 3 == 1 ? at::kBFloat16 : at::kHalf;
            const SumEnd end{.scale = 1.0 / 3, .rounded = rounded, .accumulate = variant % 2 == 0};
            const auto expected = sum_of(sources, old, end, false, 0, at::kCPU);
            const auto here = sum_of(sources, old, end, variant % 4 < 2, variant / 4, check.device);
            fsdp::comm::rank_order_sums({&expected, 1});
            fsdp::comm::rank_order_sums({&here, 1});
            wrong += same_bits(here.out, expected.out) ? 0 : 1;
            ++all;
          }
        }
      }
      const auto name = std::string("sums of ") + c10::toString(source) + " in " + c10::toString(out);
      check.passed_if(wrong == 0, name, std::to_string(wrong) + " of " + std::to_string(all) + " have other bits than the CPU's");
    }
  }
}

/// As many as several launches take.
void check_many_parts(Check& check) {
  std::vector<RankOrderSum> sums;
  std::vector<RankOrderSum> expected;
  for (std::int64_t k = 0; k < 200; ++k) {
    std::vector<at::Tensor> sources = {numbers(97 * k + 1, k, at::kBFloat16), numbers(97 * k + 1, k + 1, at::kBFloat16)};
    const auto old = at::zeros({97 * k + 1});
    sums.push_back(sum_of(sources, old, {.scale = 0.5}, false, 0, check.device));
    expected.push_back(sum_of(sources, old, {.scale = 0.5}, false, 0, at::kCPU));
  }
  fsdp::comm::rank_order_sums(sums);
  fsdp::comm::rank_order_sums(expected);
  std::size_t wrong = 0;
  for (std::size_t k = 0; k < sums.size(); ++k) wrong += same_bits(sums[k].out, expected[k].out) ? 0 : 1;
  check.passed_if(wrong == 0, "sums of 200 parts at once", std::to_string(wrong) + " have other bits than the CPU's");
}

void check_formats(Check& check) {
  for (const auto main_dtype : kDtypes) {
    for (const auto compute : kDtypes) {
      int wrong = 0;
      for (const std::int64_t block : {16, 32, 128}) {
        for (const std::int64_t pieces : {1, 5}) {
          const auto format = fsdp::float8_blocks(block);
          auto main = numbers(pieces * 300 * block, block, at::kDouble).view({pieces, 300 * block});
          main.narrow(1, 0, block).zero_();
          main.narrow(1, block, block).mul_(1e-38);
          main = main.to(main_dtype);
          const auto travelled = [&](const c10::Device& device) {
            const auto wire = at::zeros({pieces, 300 * format.block_bytes}, at::TensorOptions().dtype(at::kByte).device(device));
            const auto whole = at::zeros(main.sizes(), at::TensorOptions().dtype(compute).device(device));
            format.pre_all_gather(main.to(device), wire);
            format.post_all_gather(wire, whole);
            return std::pair(wire, whole);
          };
          const auto expected = travelled(at::kCPU);
          const auto here = travelled(check.device);
          wrong += same_bits(here.first, expected.first) && same_bits(here.second, expected.second) ? 0 : 1;
        }
      }
      const auto name = std::string("8-bit blocks of ") + c10::toString(main_dtype) + " to " + c10::toString(compute);
      check.passed_if(wrong == 0, name, std::to_string(wrong) + " of 6 have other bits than the CPU's");
    }
  }
}

/// Contributions of gradients for three receivers.
fsdp::RoundedRows rounded_rows(const fsdp::GradCommFormat& format, std::int64_t numel, const c10::Device& device) {
  const auto padded = fsdp::padded_numel(format, numel);
  return {.values = numbers(4 * padded, 1, at::kFloat).to(device).view({4, padded}),
          .encoded = at::zeros({3, fsdp::encoded_bytes(format, numel)}, at::TensorOptions().dtype(at::kByte).device(device)),
          .lost = format.error_feedback ? numbers(3 * numel, 2, at::kFloat).to(device).view({3, numel}) : at::Tensor(),
          .numel = numel,
          .own = 1,
          .reduction_number = at::full({}, 3, at::TensorOptions().dtype(at::kLong).device(device))};
}

void check_rounding(Check& check) {
  for (const int bits : {8, 4}) {
    for (const bool hadamard : {false, true}) {
      int wrong = 0;
      for (const std::int64_t block : {32, 128, 1024}) {
        for (const std::int64_t numel : {1, 100'003}) {
          const fsdp::GradCommFormat format{
              .bits = bits, .block = block, .hadamard = hadamard, .stochastic_rounding = true, .error_feedback = true};
          const auto travelled = [&](const c10::Device& device) {
            const auto rows = rounded_rows(format, numel, device);
            fsdp::encode_rows(format, {&rows, 1});
            fsdp::decode_rows(format, {&rows, 1});
            return rows;
          };
          const auto expected = travelled(at::kCPU);
          const auto here = travelled(check.device);
          bool same = same_bits(here.encoded, expected.encoded) && same_bits(here.lost, expected.lost);
          for (const auto row : {0, 2, 3})
            same = same && same_bits(here.values[row].narrow(0, 0, numel), expected.values[row].narrow(0, 0, numel));
          wrong += same ? 0 : 1;
        }
      }
      const auto name = "gradients in " + std::to_string(bits) + " bits" + (hadamard ? ", transformed" : "");
      check.passed_if(wrong == 0, name, std::to_string(wrong) + " of 6 have other bits than the CPU's");
    }
  }
}

fsdp::optim::QuantizedPiece quantized_piece(std::int64_t numel, at::ScalarType value, at::ScalarType gradient, const c10::Device& device) {
  const auto blocks = (numel + fsdp::optim::kBlock - 1) / fsdp::optim::kBlock;
  fsdp::optim::QuantizedPiece piece{
      .value = numbers(numel, 1, value).to(device), .gradient = numbers(numel, 2, gradient).to(device), .state = {}};
  for (int moment = 0; moment < 2; ++moment) {
    piece.state.push_back(at::full({numel}, moment == 0 ? 127 : 0, piece.value.options().dtype(at::kByte)));
    piece.state.push_back(at::zeros({blocks}, piece.value.options().dtype(at::kFloat)));
  }
  return piece;
}

/// Three steps, the last blocks of which are not whole.
void check_adamw_8bit(Check& check) {
  if (!fsdp::optim::steps_adamw_8bit_on(check.device.type())) return;
  const fsdp::optim::AdamStep step{.lr = 0.01, .beta1 = 0.9, .beta2 = 0.99, .weight_decay = 0.1, .eps = 1e-6};
  for (const auto value : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const auto gradient : {at::kFloat, at::kBFloat16, at::kHalf}) {
      int wrong = 0;
      for (const std::int64_t numel : {1, 255, 256, 257, 100'003}) {
        const auto expected = quantized_piece(numel, value, gradient, at::kCPU);
        const auto here = quantized_piece(numel, value, gradient, check.device);
        for (std::int64_t steps = 1; steps <= 3; ++steps) {
          fsdp::optim::step_adamw_8bit(expected, step, steps);
          fsdp::optim::step_adamw_8bit(here, step, steps);
        }
        bool same = same_bits(here.value, expected.value);
        for (std::size_t k = 0; k < here.state.size(); ++k) same = same && same_bits(here.state[k], expected.state[k]);
        wrong += same ? 0 : 1;
      }
      const auto name = std::string("AdamW with 8-bit state on ") + c10::toString(value) + " and gradients in " + c10::toString(gradient);
      check.passed_if(wrong == 0, name, std::to_string(wrong) + " of 5 have other bits than the CPU's");
    }
  }
}

/// How many GB/s `bytes` read and written are, by what `work` puts on the stream.
void measure(const Check& check, const std::string& name, double bytes, const std::function<void()>& work) {
  const c10::impl::VirtualGuardImpl guard(check.device.type());
  const auto wait = [&] {
    if (!check.device.is_cpu()) guard.synchronizeStream(guard.getStream(check.device));
  };
  constexpr int kTimes = 20;
  work();
  wait();
  const auto begin = std::chrono::steady_clock::now();
  for (int k = 0; k < kTimes; ++k) work();
  wait();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  std::cout << "measured " << name << ": " << bytes * kTimes / seconds.count() / 1e9 << " GB/s" << std::endl;
}

void measure_all(const Check& check, std::int64_t numel) {
  for (const int ranks : {2, 8, 64}) {
    const std::vector<at::Tensor> sources(static_cast<std::size_t>(ranks), at::ones({numel / ranks}, at::kBFloat16));
    const auto sum = sum_of(sources, at::zeros({numel / ranks}), {.scale = 0.5}, false, 0, check.device);
    const auto bytes = static_cast<double>(numel) * 2 + static_cast<double>(numel / ranks) * 4;
    const auto what = " of " + std::to_string(ranks) + " in bf16";
    measure(check, "sum by the kernel" + what, bytes, [&] { fsdp::comm::rank_order_sums({&sum, 1}); });
    measure(check, "sum by operators" + what, bytes, [&] { fsdp::comm::sum_by_operators({&sum, 1}); });
  }
  const auto format = fsdp::float8_blocks(32);
  const auto main = at::ones({1, numel}, at::TensorOptions().device(check.device));
  const auto wire = at::zeros({1, numel / 32 * 33}, main.options().dtype(at::kByte));
  const auto whole = at::zeros({1, numel}, main.options().dtype(at::kBFloat16));
  measure(check, "encode fp32", static_cast<double>(numel) * 5, [&] { format.pre_all_gather(main, wire); });
  measure(check, "decode to bf16", static_cast<double>(numel) * 3, [&] { format.post_all_gather(wire, whole); });
  for (const bool hadamard : {false, true}) {
    const fsdp::GradCommFormat rounded{.bits = 4, .hadamard = hadamard};
    const auto rows = rounded_rows(rounded, numel / 8, check.device);
    const auto what = std::string(" in 4 bits") + (hadamard ? ", transformed" : "");
    const auto bytes = static_cast<double>(numel / 8) * 3 * (4 + 0.5);
    measure(check, "encode gradients" + what, bytes, [&] { fsdp::encode_rows(rounded, {&rows, 1}); });
    measure(check, "decode gradients" + what, bytes, [&] { fsdp::decode_rows(rounded, {&rows, 1}); });
  }
  if (!fsdp::optim::steps_adamw_8bit_on(check.device.type())) return;
  const auto piece = quantized_piece(numel / 4, at::kFloat, at::kFloat, check.device);
  measure(check, "AdamW with 8-bit state", static_cast<double>(numel / 4) * 16,
          [&] { fsdp::optim::step_adamw_8bit(piece, {.lr = 0.01}, 1); });
}

}  // namespace

int main(int argc, char** argv) {
  Check check(c10::Device(argc > 1 ? argv[1] : "cpu"));
  const bool has_kernels = fsdp::comm::device_sums().of(check.device.type()) != nullptr;
  std::cout << "measured built with kernels for " << check.device.str() << ": " << (has_kernels ? "yes" : "no") << std::endl;
  check_sums(check);
  check_many_parts(check);
  check_formats(check);
  check_rounding(check);
  check_adamw_8bit(check);
  measure_all(check, check.device.is_cpu() ? 1 << 16 : 1 << 28);
  return check.failed ? 1 : 0;
}
