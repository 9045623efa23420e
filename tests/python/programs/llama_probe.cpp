// llama_probe MODEL TOKENS OUT: two ranks load a Hugging Face folder as examples/finetune_llama.cpp does, and write what they compute from
// int32 tokens, [4, 13], into the folder OUT: logits, the loss, and the gradient of each parameter by its name, as float32.

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "llama/config.h"
#include "llama/folder.h"

namespace {

constexpr std::int64_t kRows = 4;
constexpr std::int64_t kColumns = 13;

void write(const std::filesystem::path& file, const at::Tensor& tensor) {
  const auto values = tensor.detach().to(at::kFloat).contiguous();
  std::ofstream(file, std::ios::binary).write(reinterpret_cast<const char*>(values.const_data_ptr()), values.numel() * 4);
}

int probe(const std::filesystem::path& folder, const std::string& token_file, const std::filesystem::path& out) {
  const auto mesh = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}});
  auto model = llama::load_sharded(folder, llama::read_config(folder), mesh, {});
  auto tokens = at::empty({kRows, kColumns}, at::kInt);
  std::ifstream(token_file, std::ios::binary).read(static_cast<char*>(tokens.mutable_data_ptr()), kRows * kColumns * 4);
  tokens = tokens.to(at::kLong);
  {
    const torch::NoGradGuard no_grad;
    const auto logits = model->forward(tokens);
    if (mesh.rank() == 0) write(out / "logits", logits);
  }
  const auto share = kRows / mesh.size();
  const auto loss = model->loss(tokens.narrow(0, mesh.rank() * share, share));
  loss.backward();
  const double mean = mesh.sum(loss.item<double>()) / static_cast<double>(mesh.size());
  const auto gradients = fsdp::handle(*model).full_gradients();
  if (mesh.rank() == 0) {
    write(out / "loss", torch::tensor(mean));
    for (const auto& [name, gradient] : gradients) write(out / name, gradient);
  }
  mesh.barrier();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  return fsdp::launch_local(2, [&] { return probe(argv[1], argv[2], argv[3]); });
}
