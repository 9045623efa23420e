#include "train_gpt/evaluate.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>

double evaluate(GPT& model, const Corpus& corpus, const Options& options, const fsdp::DeviceMesh& mesh) {
  const at::NoGradGuard no_grad;
  const std::int64_t share = (options.eval_sequences + mesh.size() - 1) / mesh.size();
  const std::int64_t total = share * mesh.size();
  double nats = 0;
  for (std::int64_t i = 0; i < share; i += 8) {
    const std::int64_t count = std::min<std::int64_t>(8, share - i);
    const auto batch = corpus.validation_batch(mesh.rank() * share + i, count, total, options.model.context);
    nats += model->loss(batch.tokens.to(mesh.device()), batch.targets.to(mesh.device())).item<double>() * static_cast<double>(count);
  }
  return mesh.sum(nats) / static_cast<double>(total) / std::log(2.0);
}
