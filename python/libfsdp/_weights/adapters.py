"""LoRA adapters as peft attaches them: their products, the weights to which these are added, and the weights' names without adapters."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import Replicate

from libfsdp import _C
from libfsdp._core.packed_weights import is_packed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from torch import nn

    from libfsdp._core.model import MemberState

_OF_LORA = ("base_layer", "lora_A", "lora_B", "scaling")  # attributes


class Product(NamedTuple):
    """scale * up @ down, which is added to a weight.

    Attributes:
        up: the name of B in ``state_dict()``.
        down: that of A.
        scale: the factor.
        transposed: whether the weight is the transpose of what is usual, [in, out] (fan_in_fan_out).
    """

    up: str
    down: str
    scale: float
    transposed: bool


@dataclass
class Adapters:
    """The active adapters of a model.

    Attributes:
        names: the names in the base model, by those in ``state_dict()``, of the tensors that are sent. Adapters are not
            sent.
        products: what is added to a weight, by each of its names in ``state_dict()``.
    """

    names: dict[str, str]
    products: dict[str, list[Product]] = field(default_factory=dict)

    def merged_into(self, names: Collection[str]) -> list[_C.WeightAdapter]:
        """Returns each of these weights with the products that are added to it. A tied weight, which has several names, is listed once."""
        of_weight = {id(products): (name, products) for name, products in self.products.items() if name in names}
        return [_C.WeightAdapter(name, *product) for name, products in of_weight.values() for product in products]


def adapters_of(model: nn.Module, values: dict[str, Any], states: list[MemberState]) -> Adapters:
    """Returns the active adapters. They are known by their attributes; peft is not imported.

    Args:
        model: the module whose weights are sent.
        values: its ``state_dict(keep_vars=True)``.
        states: the states in it.

    Raises:
        Error: if there are none, or some that can't be merged.
    """
    return _Search(model, values, states).found()


class _Search:
    """Looks for adapters.

    Args: those of adapters_of.
    """

    def __init__(self, model: nn.Module, values: dict[str, Any], states: list[MemberState]) -> None:
        self._model = model
        self._names: dict[int, list[str]] = {}  # by the id of a tensor
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                self._names.setdefault(id(value), []).append(name)
        self._found = Adapters({name: name for names in self._names.values() for name in names})
        specs = {id(p.sharded): p.whole_spec for state in states for p in state.parameters}
        self._tensor_parallel = {
            one
            for one, spec in specs.items()
            if spec is not None and not all(isinstance(placement, Replicate) for placement in spec.placements)
        }

    def found(self) -> Adapters:
        layers = 0
        # The modules of a layer follow it.
        for path, module in self._model.named_modules():
            if all(hasattr(module, attribute) for attribute in _OF_LORA):
                self._take_layer(path, module)
                layers += 1
            elif "original_module" in module._modules and "modules_to_save" in module._modules:
                self._take_wrapper(module)
            elif hasattr(module, "adapter_layer_names") and ("base_layer" in module._modules or _has_tokens(module)):
                raise _C.Error(
                    f"full_weights: module '{path}' is a {type(module).__name__}, whose adapter is not LoRA's: "
                    "merge_adapters can't merge it"
                )
        if layers == 0:
            raise _C.Error(f"full_weights: merge_adapters, but {type(self._model).__name__} has no LoRA layers")
        tuner: Any = self._model._modules.get("base_model")
        if hasattr(self._model, "peft_config") and tuner is not None and "model" in tuner._modules:
            kept = self._found.names
            self._found.names = {name: base.removeprefix("base_model.model.") for name, base in kept.items()}
        return self._found

    def _take_layer(self, path: str, layer: Any) -> None:
        """Takes the active adapters of a LoRA layer."""
        for child in (child for name, child in layer.named_children() if name != "base_layer"):
            self._leave_out(child)
        base = layer.base_layer
        self._rename(base, "base_layer.", "")
        weight = getattr(base, "weight", None)
        names = self._names.get(id(weight), [])
        label = f"'{names[0]}'" if names else f"of module '{path}'"
        adapters = list(layer.active_adapters)
        fault = _fault_of_layer(layer, weight, adapters)
        matrices = [
            (layer.lora_A[one].weight, layer.lora_B[one].weight, one) for one in adapters if one in layer.lora_A
        ]
        if not fault and any(name in self._found.products or not name.endswith("base_layer.weight") for name in names):
            fault = f"it is tied ({', '.join(names)}), and its adapter belongs to one module alone"
        if not fault and any(
            id(one) in self._tensor_parallel for one in (weight, *(m for a, b, _ in matrices for m in (a, b)))
        ):
            fault = "it, or its adapter, is tensor-parallel"
        if fault:
            raise _C.Error(
                f"full_weights: merge_adapters, but parameter {label} can't be merged with its adapter: {fault}"
            )
        transposed = bool(getattr(layer, "fan_in_fan_out", False))
        products = [
            Product(self._names[id(up)][0], self._names[id(down)][0], float(layer.scaling[one]), transposed)
            for down, up, one in matrices
        ]
        if products:
            self._found.products.update(dict.fromkeys(names, products))

    def _take_wrapper(self, wrapper: Any) -> None:
        """For a module that is trained completely beside adapters (modules_to_save), takes the copy with which the model computes."""
        active = next(iter(wrapper.active_adapters), None)
        for name, child in wrapper.named_children():
            if name == "original_module" and active is not None:
                self._leave_out(child)
            elif name == "original_module":
                self._rename(child, "original_module.", "")
            elif name == "modules_to_save":
                for adapter, module in child.named_children():
                    if adapter == active:
                        self._rename(module, f"modules_to_save.{adapter}.", "")
                    else:
                        self._leave_out(module)

    def _leave_out(self, module: nn.Module) -> None:
        for _, tensor in _tensors(module):
            for name in self._names.get(id(tensor), []):
                self._found.names.pop(name, None)

    def _rename(self, module: nn.Module, old: str, new: str) -> None:
        """Replaces what stands in names before those in the module."""
        names = self._found.names
        for within, tensor in _tensors(module):
            for name in self._names.get(id(tensor), []):
                if name in names and names[name].endswith(old + within):
                    names[name] = names[name].removesuffix(old + within) + new + within


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return itertools.chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    )


def _has_tokens(module: nn.Module) -> bool:
    return "token_adapter" in module._modules


def _fault_of_layer(layer: Any, weight: Any, adapters: list[str]) -> str:
    """Returns why the adapters of a LoRA layer are no products that can be added to its weight; empty if they are."""
    if getattr(layer, "merged_adapters", None):
        return "it is merged already; call unmerge_adapter() before"
    if getattr(layer, "disable_adapters", False):
        return "adapters are disabled; enable them, or give names that do not have any"
    if hasattr(layer.base_layer, "base_layer"):
        return "it has several layers of adapters"
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point() or is_packed(weight):
        return "its module has no weight of ordinary numbers"
    sizes = list(weight.shape)[::-1] if getattr(layer, "fan_in_fan_out", False) else list(weight.shape)
    for adapter in adapters:
        if adapter in getattr(layer, "lora_embedding_A", ()):
            return f"adapter '{adapter}' is one of an embedding"
        if adapter not in layer.lora_A:
            continue
        if getattr(layer, "use_dora", {}).get(adapter) or adapter in getattr(layer, "lora_magnitude_vector", ()):
            return f"adapter '{adapter}' is DoRA, which is no sum"
        if adapter in getattr(layer, "lora_variant", ()) or hasattr(layer, "parameter_name"):
            return f"adapter '{adapter}' is a variant of LoRA"
        if getattr(layer.lora_B[adapter], "bias", None) is not None:
            return f"adapter '{adapter}' has a bias"
        down, up = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
        if len(sizes) != 2 or down.dim() != 2 or up.dim() != 2 or sizes != [up.size(0), down.size(1)]:
            return f"adapter '{adapter}' is no product of two matrices (that of a convolution, say)"
    return ""
