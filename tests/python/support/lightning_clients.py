"""Lightning's two ways to train with FSDP2's names: its Fabric, and its Trainer. As programs of support/clients.py."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import distribute_tensor

from support.clients import STEPS, Trained, common_folder, environment, ids, language_model, values
from support.training import full_gradients, installed


def with_fabric(implementation: str, *options: str) -> Trained:
    """Fabric with its FSDP2 strategy: gradients without synchronization, clipping, and a checkpoint that is loaded back."""
    with installed(implementation), environment(TORCHELASTIC_RUN_ID="none"):
        fabric_module = importlib.import_module("lightning.fabric")
        strategies = importlib.import_module("lightning.fabric.strategies")

        def parallelize(model: Any, mesh: Any) -> Any:
            from torch.distributed.fsdp import fully_shard

            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh["data_parallel"])
            return fully_shard(model, mesh=mesh["data_parallel"])

        strategy = strategies.ModelParallelStrategy(
            parallelize, data_parallel_size=dist.get_world_size(), tensor_parallel_size=1
        )
        fabric = fabric_module.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
        fabric.launch()
        with fabric.init_module(empty_init="meta" in options):
            model = language_model()
        model = fabric.setup_module(model)
        if "meta" in options:
            torch.manual_seed(1)
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(distribute_tensor(0.1 * torch.randn(p.shape), p.device_mesh, p.placements))
                for mine, initial in zip(model.module.buffers(), language_model().buffers(), strict=True):
                    mine.copy_(initial)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
        trained = Trained(notes={"class": type(model.module).__name__})
        for step in range(2 * STEPS):
            last = step % 2 == 1
            with fabric.no_backward_sync(model, enabled=not last):
                batch = ids(step)
                loss = model(input_ids=batch, labels=batch).loss
                fabric.backward(loss)
            trained.losses.append(loss.item())
            if last:
                fabric.clip_gradients(model, optimizer, max_norm=0.1)
                trained.gradients.append(full_gradients(model.module))
                optimizer.step()
                optimizer.zero_grad()
        trained.parameters = values(model.module)
        folder = common_folder()
        fabric.save(folder / "state", {"model": model, "optimizer": optimizer})
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        fabric.load(folder / "state", {"model": model, "optimizer": optimizer})
        loaded = values(model.module)
        trained.notes["loaded as saved"] = all(torch.equal(loaded[n], trained.parameters[n]) for n in loaded)
        fabric.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        return trained


class Batches(torch.utils.data.Dataset[Tensor]):
    """This rank's batches, one for each step."""

    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, i: int) -> Tensor:
        return ids(i)


def with_trainer(implementation: str, *options: str) -> Trained:
    """The Trainer with its FSDP2 strategy: accumulation, clipping, validation, a checkpoint, and a second Trainer that resumes from it.

    Option "full": rank 0 saves gathered values to one file.
    """
    with installed(implementation), environment(TORCHELASTIC_RUN_ID="none"):
        lightning = importlib.import_module("lightning.pytorch")
        strategies = importlib.import_module("lightning.pytorch.strategies")
        folder = common_folder()

        class Module(lightning.LightningModule):  # type: ignore[name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.model: Any = None
                self.trained = Trained()

            def configure_model(self) -> None:
                from torch.distributed.fsdp import fully_shard

                if self.model is not None:
                    return
                mesh = self.device_mesh["data_parallel"]
                model = language_model()
                for layer in model.model.layers:
                    fully_shard(layer, mesh=mesh)
                self.model = fully_shard(model, mesh=mesh)

            def training_step(self, batch: Tensor, _: int) -> Tensor:
                loss: Tensor = self.model(input_ids=batch, labels=batch).loss
                self.trained.losses.append(loss.item())
                return loss

            def validation_step(self, batch: Tensor, _: int) -> None:
                self.trained.losses.append(self.model(input_ids=batch, labels=batch).loss.item())

            def on_before_optimizer_step(self, _: torch.optim.Optimizer) -> None:
                self.trained.gradients.append(full_gradients(self.model))

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.AdamW(self.model.parameters(), lr=0.01)

        def fit(epochs: int, path: Path | None) -> tuple[Any, Any]:
            trainer = lightning.Trainer(
                accelerator="cpu",
                devices=dist.get_world_size(),
                strategy=strategies.ModelParallelStrategy(
                    data_parallel_size=dist.get_world_size(),
                    tensor_parallel_size=1,
                    save_distributed_checkpoint="full" not in options,
                ),
                max_epochs=epochs,
                accumulate_grad_batches=2,
                gradient_clip_val=0.1,
                use_distributed_sampler=False,
                num_sanity_val_steps=0,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            module = Module()
            loader = torch.utils.data.DataLoader(Batches(), batch_size=None)
            trainer.fit(module, loader, loader, ckpt_path=None if path is None else str(path))
            return trainer, module

        first, module = fit(1, None)
        first.save_checkpoint(folder / "state")
        resumed, continued = fit(2, folder / "state")
        _, whole = fit(2, None)
        trained: Trained = whole.trained
        trained.parameters = values(whole.model)
        trained.notes = {"class": type(whole.model).__name__, "steps": resumed.global_step}
        got, expected = values(continued.model), trained.parameters
        trained.notes["resumed"] = all(torch.equal(got[name], expected[name]) for name in expected)
        trained.notes["losses again"] = module.trained.losses + continued.trained.losses == trained.losses
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        return trained
