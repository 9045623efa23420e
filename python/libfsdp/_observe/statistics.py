"""Statistics of the engine: memory, communication, units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from libfsdp._core.model import states_in
from libfsdp._core.sharded_parameter import names_of_places
from libfsdp._fsdp2.fsdp_module import FSDPModule
from libfsdp._weights.tensor_parallel import known_further_meshes

if TYPE_CHECKING:
    import torch
    from torch import nn

    from libfsdp import _C
    from libfsdp._core.model import Model


def memory_stats(module: nn.Module) -> dict[str, int]:
    """Returns the bytes that the engine holds for a model on this rank, counted exactly: live and peak, for each kind and in total.

    Gradients that were given to the shards' ``.grad`` belong to the user, and are not counted. Peaks are those since the first
    forward, or since :func:`reset_peak_memory_stats`.

    Args:
        module: the root, or any sharded module of the model.

    Raises:
        ValueError: if the module is not sharded, or no forward of the model has run yet.
    """
    return engine_of(module).memory_stats()


def reset_peak_memory_stats(module: nn.Module) -> None:
    """Resets the peaks of :func:`memory_stats` to the bytes that are held now. The first steps may need more than later ones.

    Args:
        module: the root, or any sharded module of the model.

    Raises:
        ValueError: if the module is not sharded, or no forward of the model has run yet.
    """
    engine_of(module).reset_peak_memory_stats()


def wire_stats(module: nn.Module) -> dict[str, int]:
    """Returns what this rank has sent, in bytes, and the number of collectives that it has started, since the meshes were made.

    Rows of tensor parallelism, over which weights are exported, count, too.

    `shared_memory_bytes` is the number of these bytes that peers on this host read from this rank's memory. The rest was sent as messages.

    Args:
        module: the root, or any sharded module of the model.

    Raises:
        ValueError: if the module is not sharded, or no forward of the model has run yet.
    """
    engine = engine_of(module)
    return engine.wire_stats(known_further_meshes(state for _, state, _ in states_in(module)))


def explain(module: nn.Module) -> str:
    """Returns the choice of a memory budget for a model, and the reasons: a line for each option.

    Args:
        module: the root, or any sharded module of the model.

    Raises:
        ValueError: if the module is not sharded, or no forward of the model has run yet.
    """
    return _model_of(module).memory_choice.explanation


@dataclass(frozen=True)
class UnitInfo:
    """One unit of a sharded model, as seen from this rank.

    Attributes:
        name: the module's name; "(root)" for the root.
        parameters: the names of its parameters in the module that unit_info was called on.
        whole_bytes: the bytes of the gathered parameters, without padding; extended parameters count in the computation's dtype.
        shard_bytes: the bytes of this rank's shards, which the optimizer updates.
        param_dtypes: the dtypes of computation, which `whole_bytes` counts, each once.
        main_dtypes: the dtypes of the shards, each once.
        reshard_after_forward: the setting: True, False, or a number of neighbours.
        mesh: the sizes of its ranks' dimensions, by name.
    """

    name: str
    parameters: tuple[str, ...]
    whole_bytes: int
    shard_bytes: int
    param_dtypes: tuple[torch.dtype, ...]
    main_dtypes: tuple[torch.dtype, ...]
    reshard_after_forward: bool | int
    mesh: dict[str, int]


class Units(list[UnitInfo]):
    """A list of units, which is printed as a table."""

    def __str__(self) -> str:
        """Returns a line for each unit, and one for the totals."""
        lines = [("unit", "parameters", "whole bytes", "shard bytes", "reshard", "mesh")]
        for unit in self:
            reshards = unit.reshard_after_forward
            lines.append(
                (
                    unit.name,
                    str(len(unit.parameters)),
                    _with_dtypes(unit.whole_bytes, unit.param_dtypes),
                    _with_dtypes(unit.shard_bytes, unit.main_dtypes),
                    ("yes" if reshards else "no") if isinstance(reshards, bool) else str(reshards),
                    " x ".join(f"{name}={size}" for name, size in unit.mesh.items()),
                )
            )
        parameters = sum(len(unit.parameters) for unit in self)
        sums = (sum(unit.whole_bytes for unit in self), sum(unit.shard_bytes for unit in self))
        lines.append(("all", str(parameters), str(sums[0]), str(sums[1]), "", ""))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        numbers = range(1, 4)
        return "\n".join(
            "  ".join(
                text.rjust(width) if k in numbers else text.ljust(width)
                for k, (text, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )


def _with_dtypes(count: int, dtypes: tuple[torch.dtype, ...]) -> str:
    return f"{count} {'+'.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}".rstrip()


def unit_info(module: nn.Module) -> Units:
    """Returns the units in and below a sharded module, enclosing ones first, as a list that is printed as a table.

    Args:
        module: a sharded module, or one that has sharded modules below it.

    Raises:
        ValueError: if there are none.
    """
    states = [(name, state) for name, state, _ in states_in(module) if state.unit is not None]
    if not states:
        raise ValueError(f"{type(module).__name__} is not sharded; call fully_shard on it first")
    names = names_of_places(module)
    units = Units()
    for name, state in states:
        mesh = state.mesh.mesh
        dims = mesh.mesh_dim_names or tuple(f"dim_{dim}" for dim in range(mesh.ndim))
        dtypes = [p.compute_dtype(state.mp_policy) for p in state.parameters]
        sizes = [p.shape.numel() * dtype.itemsize for p, dtype in zip(state.parameters, dtypes, strict=True)]
        units.append(
            UnitInfo(
                name=name or "(root)",
                parameters=tuple(p.name_among(names) for p in state.parameters),
                whole_bytes=sum(sizes),
                shard_bytes=sum(p.local.numel() * p.local.element_size() for p in state.parameters),
                param_dtypes=tuple(dict.fromkeys(dtypes)),
                main_dtypes=tuple(dict.fromkeys(p.local.dtype for p in state.parameters)),
                reshard_after_forward=state.reshard_after_forward,
                mesh=dict(zip(dims, mesh.shape, strict=True)),
            )
        )
    return units


def engine_of(module: nn.Module) -> _C.HookedModel:
    return _model_of(module).engine


def _model_of(module: nn.Module) -> Model:
    if not isinstance(module, FSDPModule):
        raise ValueError(f"{type(module).__name__} is not sharded; call fully_shard on it first")
    model = module._get_fsdp_state().model
    if model is None:
        raise ValueError("the engine counts from the model's first forward on; run one first")
    return model
