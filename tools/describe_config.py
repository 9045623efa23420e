"""Describes a model of transformers to `fsdp plan`, which runs this text by `python -c`: CONFIG_JSON [TOKENS].

The model is made on the meta device by transformers itself. One JSON object on stdout has its parameters, its blocks, and,
if TOKENS is given, the operations of a forward over one sequence of so many tokens; or what is wrong.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def make_model(path: str) -> Any:
    """The model of a config.json, on the meta device: of the class that it names, or of its type's class with a head."""
    import torch
    import transformers

    # Code that a configuration may name is not run.
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    config._experts_implementation = "batched_mm"  # The others need values to count what experts compute.
    named = [getattr(transformers, name, None) for name in config.architectures or []]
    # Several of these may know a type; the first ones are for the larger models.
    kinds = ("ForImageTextToText", "ForSpeechSeq2Seq", "ForSeq2SeqLM", "ForCausalLM", "")
    mappings = [getattr(transformers, f"AutoModel{kind}")._model_mapping for kind in kinds]
    of_type = [mapping[type(config)] for mapping in mappings if type(config) in mapping]
    made = next((found for found in [*named, *of_type] if found is not None), None)
    if made is None:
        raise ValueError(f"transformers has no model of model_type {config.model_type!r}")
    with torch.device("meta"):
        return made(config)


def blocks_of(model: Any) -> list[str]:
    """The elements of the outermost lists of modules."""
    from torch import nn

    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return [f"{name}.{k}" for name in outermost for k in range(len(model.get_submodule(name)))]


def embedding_and_head(model: Any) -> list[str]:
    """Their names, if they are not tied."""
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    weights = [getattr(module, "weight", None) for module in modules]
    if weights[0] is weights[1]:
        return []
    return [name for name, module in model.named_modules() if any(module is one for one in modules)]


def operations(model: Any, tokens: int, names: list[str]) -> dict[str, float]:
    """Of a forward over one sequence, by module and for the whole model (''). Attention that is causal looks at half."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AttentionInterface

    of_attention = dict.fromkeys(["", *names], 0.0)
    name_of = {module: name for name, module in model.named_modules()}

    def attend(module: Any, query: Any, key: Any, value: Any, *_: Any, **options: Any) -> tuple[Any, None]:
        batch, heads, length, width = query.shape
        seen = min(key.shape[2], options.get("sliding_window") or key.shape[2])
        is_causal = getattr(module, "is_causal", True) and length == key.shape[2]
        pairs = seen * length - seen * seen / 2 if is_causal else length * seen
        counted = 2 * batch * heads * pairs * (width + value.shape[3])
        for name in of_attention:
            if not name or f"{name_of[module]}.".startswith(f"{name}."):
                of_attention[name] += counted
        return query.new_empty(batch, length, heads, value.shape[3]), None

    AttentionInterface.register("counted", attend)
    model.set_attn_implementation("counted")
    inputs = {model.main_input_name: torch.zeros(1, tokens, dtype=torch.int64, device="meta")}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs[model.main_input_name]
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(**inputs)
    counts = counter.get_flop_counts()
    found = {name: sum(counts.get(f"{type(model).__name__}.{name}", {}).values()) for name in names}
    found[""] = counter.get_total_flops()
    return {name: found[name] + of_attention[name] for name in found}


def describe(path: str, tokens: int | None) -> dict[str, Any]:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        return {"error": str(error), "has_transformers": False}
    try:
        model = make_model(path)
        first: dict[int, str] = {}
        parameters = [
            {
                "name": name,
                "shape": list(parameter.shape),
                "trained": parameter.requires_grad,
                "same_as": first.setdefault(id(parameter), name),
            }
            for name, parameter in model.named_parameters(remove_duplicate=False)
        ]
        blocks, apart = blocks_of(model), embedding_and_head(model)
        found = {"parameters": parameters, "blocks": blocks, "embedding_and_head": apart}
        return found if tokens is None else {**found, "operations": operations(model, tokens, [*blocks, *apart])}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "has_transformers": True}


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    with os.fdopen(os.dup(1), "w") as out, open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1)  # Packages that transformers imports print of their own.
        json.dump(describe(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None), out)
