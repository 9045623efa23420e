"""Calls libfsdp.fully_shard with the options of Megatron-FSDP."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from libfsdp._core.model import states_in
from libfsdp._core.placement import ShardPlacementResult
from libfsdp._core.shard import shard
from libfsdp._core.sharded_parameter import identity_of
from libfsdp._fsdp2.fsdp_module import FSDPModule
from libfsdp.megatron._module_order import inner_first
from libfsdp.megatron._placed import describe
from libfsdp.megatron._protocol import attributes_of, is_expert, tensor_parallel_dim

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from libfsdp._core.model import MemberState
    from libfsdp.megatron._config import ShardingStrategy
    from libfsdp.megatron._index import FSDPDistributedIndex
    from libfsdp.megatron._policy import MixedPrecisionPolicy

_MOST_NAMED = 10


@dataclass
class UnitOptions:
    """The options that all units of a model share.

    Attributes:
        index: the ranks.
        strategy: what is sharded over the inner dimension.
        policy: dtypes.
        unit_modules: classes whose modules are units.
        per_module: whether each module with parameters of its own is a unit.
        whole_modules: classes whose modules, with ``per_module``, are one unit with all below them.
        report_nan: whether each backward looks for NaN.
        sums: whether gradients are added up over the ranks and not divided.
        ignored: parameters that stay as they are.
    """

    index: FSDPDistributedIndex
    strategy: ShardingStrategy
    policy: MixedPrecisionPolicy
    unit_modules: tuple[type[nn.Module], ...] = ()
    per_module: bool = False
    whole_modules: tuple[type[nn.Module], ...] = ()
    report_nan: bool = False
    sums: bool = False
    ignored: set[nn.Parameter] = field(default_factory=set)


def classes_of(unit_modules: Sequence[type[nn.Module] | str] | None) -> tuple[type[nn.Module], ...]:
    """Returns the classes that were given, or named as "package.module.Class".

    Raises:
        ValueError: if a name is not that of a class of modules.
    """
    found: list[type[nn.Module]] = []
    if unit_modules is not None and not isinstance(unit_modules, (list, tuple, set, frozenset)):
        raise ValueError(
            f"fsdp_unit_modules is {unit_modules!r}: give a list of classes, or of import paths of classes"
        )
    for one in unit_modules or ():
        cls: Any = one
        if isinstance(one, str):
            module, _, name = one.rpartition(".")
            try:
                cls = getattr(importlib.import_module(module), name)
            except Exception as error:  # what the import runs may raise anything
                raise ValueError(f"fsdp_unit_modules: '{one}' can't be imported: {error}") from error
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise ValueError(f"fsdp_unit_modules: {one!r} is no class of nn.Module, and no import path of one")
        found.append(cls)
    return tuple(found)


def shard_units(root: nn.Module, options: UnitOptions) -> list[MemberState]:
    """Shards a module: first each unit, inner ones before outer ones, and then the remaining parameters.

    Returns:
        The states of all calls, the root's first.
    """
    given = {identity_of(parameter): parameter for parameter in root.parameters()}
    units = _units_in(root, options)
    for module in inner_first(root):
        if module is not root and module in units:
            _shard(module, options, stays_gathered=False)
    _shard(root, options, stays_gathered=root not in units)
    states = [state for _, state, _ in states_in(root)]
    for state in states:
        for i, parameter in enumerate(state.parameters):
            before = given[parameter.identity]
            parameter.attributes.update(attributes_of(before))
            vars(parameter.sharded).update(parameter.attributes)
            tensor_parallel = options.index.tensor_parallel_mesh(is_expert(before))
            describe(state, i, tensor_parallel, tensor_parallel_dim(before))
        _set_divisor(state, options)
    return states


def _units_in(root: nn.Module, options: UnitOptions) -> set[nn.Module]:
    units = _modules_of("fsdp_unit_modules", options.unit_modules, root)
    if not options.per_module:
        return units
    whole = _modules_of("fine_grained_recurse_module_types", options.whole_modules, root)
    # Modules of these classes compute with the parameters of modules below them without calling those.
    below = {inner for module in whole for inner in module.modules() if inner is not module}
    own = {
        module
        for module in root.modules()
        if module not in below and any(p not in options.ignored for p in module.parameters(recurse=False))
    }
    return units | whole | own


def _modules_of(option: str, classes: tuple[type[nn.Module], ...], root: nn.Module) -> set[nn.Module]:
    """Returns the modules of these classes. Rank 0 warns if classes were given, but the model has no such modules."""
    found = {module for module in root.modules() if isinstance(module, classes)}
    if classes and not found and dist.get_rank() == 0:
        given = ", ".join(cls.__qualname__ for cls in classes)
        there = list(dict.fromkeys(type(module).__qualname__ for module in root.modules()))
        more = f" and {len(there) - _MOST_NAMED} more" if len(there) > _MOST_NAMED else ""
        warnings.warn(
            f"{option}: no module is of the classes that were given ({given}), which make no unit. "
            f"The model's modules are of the classes {', '.join(there[:_MOST_NAMED])}{more}",
            stacklevel=4,
        )
    return found


def _shard(module: nn.Module, options: UnitOptions, *, stays_gathered: bool) -> None:
    """Makes a module a unit, whose parameters may stay gathered until their values change."""
    made = shard(
        module,
        options.index.data_parallel_mesh(),
        options.policy.sharding_options(
            reshard_after_forward=False if stays_gathered else None,
            placements=options.strategy.placements,
            outer_placements="optim_if_even" if options.index.hsdp_outer_dp_shard else "no_shard",
            report_nan_in_param_grad=options.report_nan,
        ),
        FSDPModule,
        shard_placement_fn=_places_of_experts(options.index),
        ignored_params=options.ignored,
    )
    if stays_gathered:
        made.set_reshard_after_backward(False, recurse=False)


def _places_of_experts(index: FSDPDistributedIndex) -> Callable[[nn.Parameter], ShardPlacementResult | None] | None:
    if index.expt_device_mesh is None:
        return None
    mesh = index.data_parallel_mesh(is_expert_parallel=True)

    def place(parameter: nn.Parameter) -> ShardPlacementResult | None:
        return ShardPlacementResult(None, mesh) if is_expert(parameter) else None

    return place


def _set_divisor(state: MemberState, options: UnitOptions) -> None:
    """Sets the number by which sums of gradients are divided.

    An expert's gradient is a sum over fewer ranks, but of tokens from all of them.
    """
    if state.unit is None:
        return
    if options.sums:
        state.unit.gradient_divide_factor = 1.0
    elif any(is_expert(parameter.sharded) for parameter in state.parameters):
        state.unit.gradient_divide_factor = float(options.index.data_parallel_mesh().size())
