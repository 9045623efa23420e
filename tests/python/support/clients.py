"""Programs of others that shard by FSDP2's names, each a small training run: called on all ranks alike.

They differ in what they want of their surroundings; none of them is meant for CPU ranks, so each is told what it has to know.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from support import hugging_face
from support.models import VOCABULARY, Transformer, next_token_loss
from support.training import Gradients, full, full_gradients, installed

STEPS = 3


@dataclass
class Trained:
    """What a program has seen and left."""

    losses: list[float] = field(default_factory=list)
    gradients: list[Gradients] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


def installed_packages(*names: str) -> bool:
    """Whether they are all there."""
    return all(importlib.util.find_spec(name) is not None for name in names)


def has_transformers(*version: int) -> bool:
    """Whether transformers is there in this version, or a later one."""
    if not installed_packages("transformers"):
        return False
    return tuple(map(int, importlib.metadata.version("transformers").split(".")[: len(version)])) >= version


def language_model(family: str = "llama") -> Any:
    """A small random model of transformers, the same on every rank."""
    torch.manual_seed(0)
    return hugging_face.CASES[family].build()


def ids(step: int) -> Tensor:
    """This rank's batch of tokens."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(VOCABULARY, (2, 8), generator=generator)


def values(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, gathered."""
    return {name: full(p) for name, p in model.named_parameters()}


def common_folder() -> Path:
    """An empty folder that all ranks name."""
    name = [tempfile.mkdtemp(prefix="fsdp-client-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    return Path(name[0])


@contextmanager
def environment(**variables: str) -> Any:
    """Variables that are as before afterwards."""
    before = dict(os.environ)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", OMP_NUM_THREADS="1", **variables)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def train_steps(model: Any, parameters: Any = None, loss_of: Callable[[Tensor], Tensor] | None = None) -> Trained:
    """A plain loop over a language model, or over what `loss_of` makes of it."""
    trained = Trained()
    optimizer = torch.optim.AdamW(parameters or model.parameters(), lr=0.01)
    for step in range(STEPS):
        batch = ids(step)
        loss = loss_of(batch) if loss_of else model(input_ids=batch, labels=batch).loss
        loss.backward()
        trained.losses.append(loss.item())
        trained.gradients.append(full_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    trained.parameters = values(model)
    return trained


# accelerate, and transformers' Trainer upon it.


def reset_accelerate() -> None:
    """It keeps its state in classes. And on CPU ranks it takes DDP for FSDP2, so these call themselves others."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU


# Both Trainers take these.
ARGUMENTS: dict[str, Any] = {
    "use_cpu": True,
    "per_device_train_batch_size": 2,
    "logging_steps": 1,
    "learning_rate": 0.01,
    "report_to": [],
    "disable_tqdm": True,
    "fsdp_config": {
        "version": 2,
        "reshard_after_forward": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": "SHARDED_STATE_DICT",
    },
}


def with_accelerate(implementation: str, *options: str) -> Trained:
    """Accumulation, clipping, a checkpoint that is loaded back, and a step after it.

    Options: "bf16"; "efficient" loads from rank 0; "checkpointing" repeats forwards; "full" gathers the checkpoint; "hsdp" has two
    replicas; "offload" keeps what lasts in host memory.
    """
    with (
        installed(implementation),
        environment(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", ACCELERATE_USE_CPU="true"),
    ):
        from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
        from torch.distributed.fsdp import CPUOffloadPolicy

        reset_accelerate()
        dims = ParallelismConfig(dp_replicate_size=2, dp_shard_size=dist.get_world_size() // 2)
        accelerator = Accelerator(
            parallelism_config=dims if "hsdp" in options else None,
            cpu=True,
            gradient_accumulation_steps=2,
            mixed_precision="bf16" if "bf16" in options else "no",
            fsdp_plugin=FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
                reshard_after_forward=True,
                cpu_ram_efficient_loading="efficient" in options,
                activation_checkpointing="checkpointing" in options,
                state_dict_type="FULL_STATE_DICT" if "full" in options else "SHARDED_STATE_DICT",
                cpu_offload=CPUOffloadPolicy(pin_memory=False) if "offload" in options else None,
            ),
        )
        model = language_model()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        weight = next(model.parameters())
        assert isinstance(weight, DTensor)
        trained = Trained(notes={"class": type(model).__name__, "placements": str(weight.placements)})
        folder = common_folder()
        for step in range(2 * STEPS):
            with accelerator.accumulate(model):
                batch = ids(step)
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    trained.notes[f"norm {step}"] = full(accelerator.clip_grad_norm_(model.parameters(), 0.1)).item()
                    trained.gradients.append(full_gradients(model))
                optimizer.step()
                optimizer.zero_grad()
                trained.losses.append(loss.item())
            if step == 3:
                accelerator.save_state(str(folder / "state"))
                saved = values(model)
        accelerator.load_state(str(folder / "state"))
        loaded = values(model)
        trained.notes["loaded as saved"] = all(torch.equal(loaded[name], saved[name]) for name in saved)
        state = accelerator.get_state_dict(model)
        trained.notes["state dict"] = {name: (tuple(t.shape), t.double().sum().item()) for name, t in state.items()}
        trained.parameters = loaded
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        return trained


class TokenData(torch.utils.data.Dataset):
    """Random sequences with themselves as labels."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        tokens = torch.randint(VOCABULARY, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens}


def with_distributed_config(implementation: str, *options: str) -> Trained:
    """transformers' own FSDP2: from_pretrained shards on the meta device, loads each rank's rows, and ties afterwards.

    Options: "bf16"; "hsdp" has two replicas; "untied" embedding and head.

    The rows of the tied parameter divide by the ranks: otherwise FSDP2 pads them for each of the two units, and one of them computes with
    the values from before training.
    """
    with installed(implementation), environment():
        from transformers import DistributedConfig

        folder = common_folder()
        even = {**hugging_face.DECODER, "vocab_size": VOCABULARY + VOCABULARY % 2}
        torch.manual_seed(0)
        plain: Any = hugging_face.build("Qwen2", "Qwen2ForCausalLM", **even, tie_word_embeddings="untied" not in options)()
        if dist.get_rank() == 0:
            plain.save_pretrained(folder)
        dist.barrier()
        replicas = 2 if "hsdp" in options else 1
        config = DistributedConfig(
            fsdp_size=dist.get_world_size() // replicas,
            dp_replicate_size=replicas,
            fsdp_mixed_precision="bf16" in options,
        )
        model = type(plain).from_pretrained(folder, distributed_config=config, dtype=torch.float32)
        trained = Trained(notes={"class": type(model).__name__})
        trained.notes["tied"] = model.lm_head.weight is model.model.embed_tokens.weight
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(STEPS):
            for microbatch in range(2):
                loss = model(input_ids=(batch := ids(2 * step + microbatch)), labels=batch).loss
                loss.backward()
                trained.losses.append(loss.item())
            trained.gradients.append(full_gradients(model))
            trained.losses.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item())
            optimizer.step()
            optimizer.zero_grad()
        trained.parameters = values(model)
        model.save_pretrained(folder / "saved")
        dist.barrier()
        again = type(plain).from_pretrained(folder / "saved", dtype=torch.float32)
        saved = {name: full(p) for name, p in again.named_parameters()}
        trained.notes["loaded as saved"] = all(torch.equal(saved[name], p) for name, p in trained.parameters.items())
        return trained


def with_trainer(implementation: str, *options: str) -> Trained:
    """transformers' Trainer: evaluation, saved checkpoints, and a second Trainer that resumes from the first of them.

    Options: "bf16"; "checkpointing"; "hsdp" has two replicas; "offload" keeps what lasts in host memory.
    """
    with installed(implementation), environment(ACCELERATE_USE_CPU="true"):
        from accelerate import ParallelismConfig
        from accelerate.state import PartialState
        from accelerate.utils import DistributedType
        from torch.distributed.fsdp import CPUOffloadPolicy
        from transformers import Trainer, TrainingArguments

        folder = common_folder()
        dims = ParallelismConfig(dp_replicate_size=2, dp_shard_size=dist.get_world_size() // 2)

        def trainer(name: str) -> Any:
            reset_accelerate()
            arguments = TrainingArguments(
                output_dir=str(folder / name),
                max_steps=4,
                save_steps=2,
                eval_strategy="steps",
                eval_steps=2,
                bf16="bf16" in options,
                gradient_checkpointing="checkpointing" in options,
                parallelism_config=dims if "hsdp" in options else None,
                fsdp="full_shard offload" if "offload" in options else "full_shard",
                **ARGUMENTS,
            )
            PartialState().distributed_type = DistributedType.MULTI_GPU
            made = Trainer(language_model(), arguments, train_dataset=TokenData(), eval_dataset=TokenData())
            if "offload" in options:  # The policy that it makes pins memory, which needs a GPU.
                assert isinstance(made.accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)
                made.accelerator.state.fsdp_plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
            return made

        first = trainer("first")
        first.train()
        wrapped: Any = first.model_wrapped
        trained = Trained(parameters=values(first.model), notes={"class": type(wrapped).__name__})
        trained.notes["placements"] = str(next(wrapped.parameters()).placements)
        trained.losses = [
            entry[k] for entry in first.state.log_history for k in ("loss", "eval_loss", "grad_norm") if k in entry
        ]
        second = trainer("second")
        second.train(resume_from_checkpoint=str(folder / "first" / "checkpoint-2"))
        resumed = values(second.model)
        trained.notes["resumed"] = all(torch.equal(resumed[name], trained.parameters[name]) for name in resumed)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        return trained


# peft.


def with_peft(implementation: str, *options: str) -> Trained:
    """LoRA: the base is frozen, and the adapters' parameters lie in the same units. Option "bf16": the base has that dtype."""
    with installed(implementation):
        from peft import LoraConfig, get_peft_model
        from peft.utils import get_peft_model_state_dict
        from torch.distributed.fsdp import fully_shard

        base = language_model()
        if "bf16" in options:
            base = base.to(torch.bfloat16)
        model: Any = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        for layer in model.base_model.model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        trained = train_steps(model, [p for p in model.parameters() if p.requires_grad])
        adapter = get_peft_model_state_dict(model)
        trained.notes["adapter"] = sorted(adapter)
        trained.notes["trained"] = sum(gradient is not None for gradient in trained.gradients[-1].values())
        assert len(adapter) == trained.notes["trained"]
        return trained


# torchtitan.


class Decoder(nn.Module):
    """What torchtitan calls a decoder: its function needs these names."""

    def __init__(self, model: Any, *, tied: bool) -> None:
        super().__init__()
        self.tok_embeddings, self.norm, self.lm_head = model.embedding, model.norm, model.head
        self.layers = nn.ModuleDict({str(i): block for i, block in enumerate(model.blocks)})
        self.enable_weight_tying = tied

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def torchtitans_function() -> Callable[..., None]:
    """apply_fsdp_to_decoder, which needs nothing of its package but a logger."""
    found = importlib.util.find_spec("torchtitan")
    assert found is not None
    assert found.submodule_search_locations is not None
    folder = Path(found.submodule_search_locations[0])
    package = types.ModuleType("torchtitan.distributed")
    package.__path__ = [str(folder / "distributed")]
    sys.modules["torchtitan.distributed"] = (
        package  # Its __init__ imports what is not needed here, and not on every index.
    )
    function: Callable[..., None] = importlib.import_module("torchtitan.distributed.fsdp").apply_fsdp_to_decoder
    return function


def with_torchtitan(implementation: str, *options: str) -> Trained:
    """Options: "tied" embedding and head; "bf16"; "hsdp"; "compile" of each block, before it is sharded."""
    world = dist.get_world_size()
    with installed(implementation):
        from torch.distributed.fsdp import FSDPModule

        apply = torchtitans_function()
        sizes, names = ((2, world // 2), ("dp_replicate", "fsdp")) if "hsdp" in options else ((world,), ("fsdp",))
        torch.manual_seed(0)
        model = Decoder(Transformer(blocks=3, tied="tied" in options), tied="tied" in options)
        if "compile" in options:
            torch._dynamo.reset()
            for layer in model.layers.values():
                layer.compile(backend="aot_eager", fullgraph=True)
        apply(
            model,
            dp_mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names),
            param_dtype=torch.bfloat16 if "bf16" in options else torch.float32,
            reduce_dtype=torch.float32,
            pp_enabled=False,
        )
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # Gloo's sums have no factor, which FSDP2 would want.
        return train_steps(model, loss_of=lambda batch: next_token_loss(model, (batch,)))


# A model of text and images.


class TextAndImages(nn.Module):
    """Images, if there are any, become tokens before the text's.

    Args:
        always_sees: without images, the vision part sees zeros, which change nothing.
    """

    def __init__(self, *, always_sees: bool) -> None:
        super().__init__()
        self.always_sees = always_sees
        text = Transformer(blocks=2)
        self.embedding, self.blocks, self.norm, self.head = text.embedding, text.blocks, text.norm, text.head
        self.vision = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 16))

    def forward(self, tokens: Tensor, images: Tensor | None) -> Tensor:
        x = self.embedding(tokens)
        length = x.size(1)
        if images is not None:
            x = torch.cat((self.vision(images), x), dim=1)
        elif self.always_sees:
            x = x + 0 * self.vision(torch.zeros(1, 1, 12)).sum()
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x[:, -length:]))
        return logits


def images_of(step: int, rank: int) -> Tensor | None:
    """The last step has none at all, in the others one rank has none."""
    if step == STEPS - 1 or rank == step % 2:
        return None
    return torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(1000 * step + rank))


def with_images(implementation: str, *options: str) -> Trained:
    """Option "own": the vision part is a unit, which all ranks have to enter; else it belongs to the root's."""
    with installed(implementation):
        from torch.distributed.fsdp import FSDPModule, fully_shard

        torch.manual_seed(0)
        model: Any = TextAndImages(always_sees="own" in options)
        for block in model.blocks:
            fully_shard(block)
        if "own" in options:
            fully_shard(model.vision)
        fully_shard(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_reduce_scatter_unused_params(True)  # FSDP2 wants it; libfsdp does so in any case.
        trained = Trained()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(STEPS):
            loss = next_token_loss(lambda tokens, s=step: model(tokens, images_of(s, dist.get_rank())), (ids(step),))
            loss.backward()
            trained.losses.append(loss.item())
            trained.gradients.append(full_gradients(model))
            optimizer.step()
            optimizer.zero_grad()
        trained.parameters = values(model)
        return trained


def images_in_one_process(world: int, *options: str) -> Trained:
    """The same training on replicas: means over the ranks, to which a rank without images adds zeros."""
    torch.manual_seed(0)
    model = TextAndImages(always_sees="own" in options)
    trained = Trained()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(world):
            generator = torch.Generator().manual_seed(100 * step + rank)
            batch = torch.randint(VOCABULARY, (2, 8), generator=generator)
            (
                next_token_loss(lambda tokens, s=step, r=rank: model(tokens, images_of(s, r)), (batch,)) / world
            ).backward()
        trained.gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
    trained.parameters = {name: p.detach() for name, p in model.named_parameters()}
    return trained
