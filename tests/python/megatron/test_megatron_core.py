"""Megatron-Core's adapter over libfsdp: its own model, options and process groups, compared with plain training."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.marks import on_ranks
from support.megatron import STRATEGIES, whole
from torch import nn

import libfsdp
from libfsdp.megatron import DistributedDataParallelConfig, MegatronFSDP

VOCABULARY, LENGTH = 32, 8
# Not by importlib.util.find_spec, which imports what is above.
_megatron = importlib.machinery.PathFinder.find_spec("megatron")
_core = _megatron and importlib.machinery.PathFinder.find_spec("megatron.core", _megatron.submodule_search_locations)
pytestmark = pytest.mark.skipif(_core is None, reason="the package megatron-core is not installed")


class Core:
    """What the tests use of Megatron-Core, imported after libfsdp has taken the place of its Megatron-FSDP."""

    def __init__(self) -> None:
        libfsdp.install_megatron()
        try:
            modules = {
                name.rpartition(".")[2]: importlib.import_module(f"megatron.core.{name}")
                for name in (
                    "distributed.fsdp.mcore_fsdp_adapter",
                    "distributed.distributed_data_parallel_config",
                    "distributed.finalize_model_grads",
                    "models.gpt.gpt_layer_specs",
                    "models.gpt.gpt_model",
                    "parallel_state",
                    "tensor_parallel.random",
                    "transformer.transformer_config",
                    "utils",
                )
            }
        finally:
            libfsdp.uninstall_megatron()
        self.__dict__.update(modules)
        # Both ask for CUDA: the memory that attention writes to, and the generator of dropout, which the tests have not.
        self.utils.GlobalMemoryBuffer.get_tensor = lambda _, shape, dtype, *__: torch.empty(shape, dtype=dtype)
        self.random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
        if not self.parallel_state.model_parallel_is_initialized():
            self.parallel_state.initialize_model_parallel()

    def __getattr__(self, name: str) -> Any:  # for the checker of types
        raise AttributeError(name)

    def config(self) -> Any:
        return self.transformer_config.TransformerConfig(
            num_layers=2,
            hidden_size=16,
            num_attention_heads=2,
            use_cpu_initialization=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bias_dropout_fusion=False,
            gradient_accumulation_fusion=False,
        )

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        layers = self.gpt_layer_specs.get_gpt_layer_local_spec()
        model: nn.Module = self.gpt_model.GPTModel(self.config(), layers, VOCABULARY, LENGTH)
        return model

    def sharded(self, strategy: str, **options: Any) -> Any:
        """The adapter around a model."""
        config = self.distributed_data_parallel_config.DistributedDataParallelConfig(
            use_megatron_fsdp=True, use_distributed_optimizer=True, data_parallel_sharding_strategy=strategy, **options
        )
        adapter = self.mcore_fsdp_adapter.FullyShardedDataParallel
        return adapter(self.config(), config, self.model(), device=torch.device("cpu"))


def loss_of(model: Any, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
    mask = torch.ones(LENGTH, LENGTH).tril()[None, None] < 0.5
    losses: torch.Tensor = model(tokens, torch.arange(LENGTH).expand(2, LENGTH), mask, labels=tokens)
    return losses.mean()


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, steps: list[int]) -> list[float]:
    """This rank's losses of some microbatches; the update is by the mean over the ranks."""
    losses = []
    for step in steps:
        for rank in range(dist.get_world_size()):
            loss = loss_of(model, step, rank)
            (loss / dist.get_world_size() / len(steps)).backward()
            if rank == dist.get_rank():
                losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("options", [{}, {"overlap_grad_reduce": True, "overlap_param_gather": True}])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_trains_as_one_process_does(strategy: str, options: dict[str, Any]) -> None:
    """Two microbatches a step, as Megatron-Core's schedule without a pipeline runs them; that itself asks for CUDA."""
    core = Core()
    model = core.sharded(strategy, **options)
    assert type(model.module) is MegatronFSDP
    assert model.module.strategy.placements == strategy
    units = [core.mcore_fsdp_adapter.TransformerLayer] if strategy == STRATEGIES[-1] else []
    assert model.module.fsdp_unit_modules == units
    alone = core.model()
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, alone)]
    for step in range(3):
        losses = []
        model.zero_grad_buffer()
        for microbatch in range(2):
            with model.no_sync() if microbatch == 0 else contextlib.nullcontext():
                loss = loss_of(model, 2 * step + microbatch, dist.get_rank())
                (loss / 2).backward()
                losses.append(loss.item())
        core.finalize_model_grads.finalize_model_grads([model])
        optimizers[0].step()
        model.module.install_optimized_model_weights()
        assert losses == pytest.approx(plain_step(alone, optimizers[1], [2 * step, 2 * step + 1]), rel=1e-6)
    for (name, p), reference in zip(model.module.module.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(p.detach()), reference.detach(), rtol=1e-4, atol=1e-5, msg=name)


@on_ranks(2)
def test_options() -> None:
    """Options of Megatron-Core's dataclass, the dtypes among them, reach the class."""
    core = Core()
    model = core.sharded("optim", grad_reduce_in_fp32=True, check_for_nan_in_grad=True).module
    assert isinstance(model.ddp_config, DistributedDataParallelConfig)
    assert model.ddp_config.check_for_nan_in_grad
    assert model.mp_policy.main_params_dtype == model.mp_policy.main_grads_dtype == torch.float32
    assert model.dist_index.device_mesh.device_type == "cpu"
    other = core.sharded("optim").module
    assert other.mp_policy.main_grads_dtype is None
    assert not other.ddp_config.check_for_nan_in_grad
