"""More programs of others that shard by FSDP2's names, as clients.py has them: their packages are installed in `make nightly` only."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from support.clients import (
    ARGUMENTS,
    TokenData,
    Trained,
    common_folder,
    environment,
    language_model,
    reset_accelerate,
    train_steps,
    values,
)
from support.models import VOCABULARY, next_token_loss
from support.training import installed


def with_transformers(implementation: str, *options: str) -> Trained:
    """transformers' own FSDP2: from_pretrained shards on meta, then loads. Options: "bf16" is its mixed precision; "checkpointing"."""
    with installed(implementation), environment(LOCAL_RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size())):
        from transformers import AutoModelForCausalLM, DistributedConfig

        folder = common_folder()
        if dist.get_rank() == 0:
            language_model().save_pretrained(folder)
        dist.barrier()
        config = DistributedConfig(fsdp_size=dist.get_world_size(), fsdp_mixed_precision="bf16" in options)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float32)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        model.train()
        if "checkpointing" in options:
            model.gradient_checkpointing_enable()
        trained = train_steps(model)
        trained.notes["class"] = type(model).__name__
        return trained


def _tokenizer() -> Any:
    """A tokenizer whose words are numbers. The data set has tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {str(i): i for i in range(VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="0", eos_token="1")


def with_trl(implementation: str, *options: str) -> Trained:
    """trl's SFT, whose loss multiplies hidden states by lm_head.weight, outside of lm_head's forward. Option "bf16"."""
    with installed(implementation), environment(ACCELERATE_USE_CPU="true"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from accelerate.state import PartialState
        from accelerate.utils import DistributedType
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        reset_accelerate()
        with tempfile.TemporaryDirectory() as folder:
            arguments = SFTConfig(
                output_dir=folder,
                max_steps=3,
                save_strategy="no",
                bf16="bf16" in options,
                gradient_checkpointing=False,
                fsdp="full_shard",
                **ARGUMENTS,
            )
            PartialState().distributed_type = DistributedType.MULTI_GPU
            data = Dataset.from_list([{"input_ids": TokenData()[i]["input_ids"].tolist()} for i in range(16)])
            trainer = SFTTrainer(language_model(), arguments, train_dataset=data, processing_class=_tokenizer())
            trainer.train()
        trained = Trained(parameters=values(trainer.model))
        trained.losses = [entry[k] for entry in trainer.state.log_history for k in ("loss", "grad_norm") if k in entry]
        trained.notes["class"] = type(trainer.model_wrapped).__name__
        trained.notes["warnings"] = [str(one.message) for one in caught if "backward" in str(one.message)]
        return trained


def with_automodel(implementation: str, *options: str) -> Trained:
    """NeMo AutoModel's FSDP2Manager with its default, which passes offload_policy=None, computes in bf16 and sends fp32."""
    with installed(implementation), environment():
        from nemo_automodel.components.distributed.config import FSDP2Config
        from nemo_automodel.components.distributed.fsdp2 import FSDP2Manager
        from nemo_automodel.components.distributed.mesh import MeshContext

        config = FSDP2Config()
        context = MeshContext.build(config)
        model = FSDP2Manager(config, context.device_mesh).parallelize(language_model())
        trained = train_steps(model)
        trained.notes["class"] = type(model).__name__
        return trained


def with_verl(implementation: str, *options: str) -> Trained:
    """verl's apply_fsdp2 with the arguments of its engine. Options: "prefetch" in forward; "keep" sets FSDP2's private state."""
    with installed(implementation), environment():
        from torch.distributed.fsdp import MixedPrecisionPolicy
        from verl.utils.fsdp_utils import apply_fsdp2, set_reshard_after_forward

        model = language_model()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
        keywords = {"mesh": mesh, "mp_policy": policy, "offload_policy": None, "reshard_after_forward": True}
        apply_fsdp2(model, keywords, {"forward_prefetch": "prefetch" in options})
        if "keep" in options:
            set_reshard_after_forward(model, False)
        trained = train_steps(model)
        trained.notes["class"] = type(model).__name__
        return trained


def with_torchtune(implementation: str, *options: str) -> Trained:
    """torchtune's shard_model and its loading of full state dicts, as its recipes call them."""
    with installed(implementation), environment():
        from torchtune import training
        from torchtune.models.llama3 import llama3

        torch.manual_seed(0)
        model: Any = llama3(VOCABULARY, num_layers=2, num_heads=2, num_kv_heads=1, embed_dim=16, max_seq_len=16, intermediate_dim=24)
        full_state = model.state_dict()
        training.shard_model(model, [lambda name, _: name.startswith("layers.") and name.count(".") == 1], cpu_offload=False)
        training.load_from_full_model_state_dict(model, full_state, torch.device("cpu"), strict=True)

        trained = train_steps(model, loss_of=lambda batch: next_token_loss(model, (batch,)))
        trained.notes["class"] = type(model).__name__
        return trained
