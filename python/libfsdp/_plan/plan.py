"""Computes the memory and communication of training a model, without ranks, devices or memory."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor

from libfsdp import _C
from libfsdp._comm.mesh import ShardingMesh
from libfsdp._core.arguments import as_bytes, as_flag, check_bytes, check_functions, check_ignored, refuse
from libfsdp._core.placement import dimension_of
from libfsdp._core.sharding_options import (
    ShardingOptions,
    check_options,
    divides_by_all,
    make_options,
)
from libfsdp._core.unit_factory import make_unit, planned_parameter
from libfsdp._core.unit_order import visits_as_registered, visits_of_events
from libfsdp._plan.activations import kept_by_unit
from libfsdp._plan.planned_mesh import PlannedMesh, Sizes
from libfsdp._plan.simulation import LinkRate, Simulation, UnitTime

if TYPE_CHECKING:
    from torch.distributed.tensor import Shard

    from libfsdp._core.sharded_parameter import ShardedParameter

# Which modules become units: their classes, or a function of each module's name and the module.
Units = Callable[[str, nn.Module], bool] | type[nn.Module] | tuple[type[nn.Module], ...]


# Of fully_shard, as ShardingOptions has them; and those that are no part of it.
_SHARDING = {option.name for option in fields(ShardingOptions)}
_SHARDING -= {"memory_budget", "report_nan_in_param_grad", "check_initial_values", "spmd"}
_OPTIONS = _SHARDING | {"shard_placement_fn", "ignored_params"}
# Options that describe a training step, which fully_shard does not have.
_OF_STEPS = {"microbatches", "sync_each_microbatch"}


@dataclass(frozen=True)
class PlannedUnit:
    """The bytes of one unit on a rank, each while it is there.

    Attributes:
        name: the module's name; "(root)" for the root.
        elements: of its parameters.
        main_parameters: this rank's shards.
        main_gradients: their gradients.
        optimizer_state: what the optimizer keeps for them.
        gathered: the unsharded parameters.
        unreduced: the unsharded gradients, before they are reduced.
        communication: receive staging of the reduction.
        padding: the part of ``gathered`` that belongs to no parameter.
        activations: what autograd keeps from its forward to its backward, by what plan() was given.
        checkpoint: what this rank writes of parameters and optimizer state into a checkpoint.
        inputs: of its modules, in bytes: what it keeps if it recomputes. 0 if plan() was given no inputs.
    """

    name: str
    elements: int
    main_parameters: int
    main_gradients: int
    optimizer_state: int
    gathered: int
    unreduced: int
    communication: int
    padding: int
    activations: int
    checkpoint: int
    inputs: int


@dataclass(frozen=True)
class Plan:
    """The memory and communication of a rank in one training step, after steps have become alike.

    ``str()`` returns a table, and a notebook shows a chart.

    Attributes:
        ranks: of the mesh.
        elements: of all parameters.
        peak: bytes at the moment at which the device has to have most, by what they are for: "main_parameters",
            "main_gradients", "optimizer_state", "gathered_parameters", "unreduced_gradients", "communication",
            "unused_slots" (blocks that the engine keeps for later use), "activations"; "device" is their sum, and "host"
            what is offloaded.
        moment: when that is, such as "backward of 'layers.3'".
        memory: the result of :func:`memory_stats` after such a step, if peaks were reset before it.
        wire: what :func:`wire_stats` adds up in such a step.
        links: the same for each dimension of the mesh, by its name.
        units: enclosing ones first.
        moments: the parts of a step in their order, each as its name and the bytes when the device has to have most in it, as
            in ``peak``.
        fsdp2: what FSDP2 (``torch.distributed.fsdp.fully_shard``) needs at its own peak for the same, as in ``peak``:
            "communication" are the buffers of its gathers and reductions, and "gathered_parameters" their copies. None on one
            rank, with options that FSDP2 lacks, with ``reshard_after_forward=False``, and of several microbatches.
        fsdp2_moment: when FSDP2 has its peak.
    """

    ranks: int
    elements: int
    peak: dict[str, int]
    moment: str
    memory: dict[str, int]
    wire: dict[str, int]
    links: dict[str, dict[str, int]]
    units: tuple[PlannedUnit, ...]
    moments: tuple[tuple[str, dict[str, int]], ...]
    fsdp2: dict[str, int] | None
    fsdp2_moment: str | None
    _planned: _C.Plan = field(repr=False, compare=False)

    def fits(self, memory: int | float | str) -> bool:
        """True if a device with this many bytes for the program, also as "80GB" or "80GiB", can hold the peak.

        What torch's allocator and the device's driver need beside it is not in the plan.
        """
        return self.peak["device"] <= as_bytes("memory", memory)

    def saver_memory(self, hosts: int = 0) -> int:
        """The bytes of host memory that ``AsyncSaver`` takes for this rank.

        Buffers of the model, the program's own values and the heads of records are not counted.

        Args:
            hosts: with ``AsyncSaver(memory=...)``, how many there are: two steps lie in memory, each with a copy of another rank's file
                if there are several. 0: without.
        """
        return self._planned.saver_memory(hosts)

    def json(self) -> str:
        """Returns all of the plan as a JSON object, in bytes."""
        return self._planned.json()

    def svg(self) -> str:
        """Returns a picture of the memory over one step: a bar for each of ``moments``, divided by kinds."""
        return self._planned.svg()

    def simulate(
        self,
        *,
        units: Mapping[str, UnitTime] | None = None,
        links: Mapping[str, LinkRate] | None = None,
        update_ms: float = 0.0,
        steps: int = 3,
        slow_ranks: Mapping[int, float] | None = None,
        jitter: float = 0.0,
        seed: int = 0,
    ) -> Simulation:
        """Simulates steps on all ranks: what each computes, begins and waits for, in the order of the planned one.

        A collective begins when all ranks of its process group have called it and the previous one has ended. Host time is not
        simulated, nor links that several groups share. Times are as good as those that you give: measure them on your machine,
        or use the simulation to compare.

        Args:
            units: how long ranks compute for each unit, by its name. Not given: no time.
            links: how fast each dimension of the mesh is, by its name in ``links``. Not given: no time.
            update_ms: of the optimizer.
            steps: how many are simulated.
            slow_ranks: factors of the time that ranks compute, by global rank.
            jitter: each computation takes a time drawn from a log-normal distribution, with this deviation of its logarithm.
            seed: of what is drawn.

        Raises:
            Error: for names that the plan does not have, ranks that do not exist, times that are negative or not finite, and if
                no time is given.
        """
        return Simulation._of_engine(
            self._planned.simulate(
                units={name: (time.forward_ms, time.backward_ms) for name, time in (units or {}).items()},
                links={dim: (rate.latency_us, rate.bytes_per_s) for dim, rate in (links or {}).items()},
                update_ms=update_ms,
                steps=steps,
                slow_ranks=slow_ranks or {},
                jitter=jitter,
                seed=seed,
            )
        )

    def __str__(self) -> str:
        """Returns the plan as a table."""
        return self._planned.text()

    def _repr_html_(self) -> str:
        """Returns a chart of the memory at the peak, one over the step, and the table of the rest, for a notebook."""
        whole = max(self.peak["device"], 1)
        rows = [
            f"<tr><td>{name.replace('_', ' ')}</td><td style='text-align:right'>{_C.size_text(count)}</td>"
            f"<td><div style='background:#4a7ebb;height:0.8em;width:{300 * count / whole:.0f}px'></div></td></tr>"
            for name, count in self.peak.items()
            if count and name not in ("device", "host")
        ]
        title = f"{self.ranks:,} ranks: {_C.size_text(whole)} of a device, in {html.escape(self.moment)}"
        return (
            f"<div><b>{title}</b><table>{''.join(rows)}</table>{self.svg()}"
            f"<details><summary>all</summary><pre>{html.escape(str(self))}</pre></details></div>"
        )


def _predicate(units: Units | None) -> Callable[[str, nn.Module], bool]:
    if units is None:
        return lambda name, module: False
    if isinstance(units, (type, tuple)):
        classes = units
        return lambda name, module: isinstance(module, classes)
    if not callable(units):
        refuse("units", units, "classes of modules, or a function of a name and a module")
    return units


def _parameter(
    name: str, parameter: nn.Parameter, ranks: ShardingMesh, options: ShardingOptions, shard_dim: int
) -> ShardedParameter:
    if isinstance(parameter, DTensor) or parameter.ndim == 0 or hasattr(parameter, "_libfsdp_shard"):
        raise ValueError(f"plan() takes unsharded parameters, and '{name}' is a scalar, a DTensor or a shard")
    return planned_parameter(parameter, name, shard_dim, ranks, options)


def plan(
    module: nn.Module,
    mesh: PlannedMesh,
    *,
    units: Units | None = None,
    optimizer_values: int = 2,
    inputs: tuple[Any, ...] | Mapping[str, Any] | None = None,
    activations: Mapping[str, int | float | str] | None = None,
    prefetch_depth: int = 1,
    **options: Any,
) -> Plan:
    """Returns the memory and communication of a rank if the module is sharded by :func:`fully_shard` with these options, and trained.

    The engine itself runs steps of it over memory that has sizes and no bytes, so a plan and a run are the same to the
    byte: :func:`memory_stats` and :func:`wire_stats` of a run are the plan's ``memory`` and ``wire``. Without ``inputs``,
    modules are taken to be used in the order in which they were registered, and parameters of a module that has units within
    it before and after those. The module may be on the meta device; it is not changed, and no
    value is read. No process group is needed, and no other rank takes part.

    Args:
        module: the root.
        mesh: the ranks.
        units: which modules below the root fully_shard is called on, by their classes, or by a function of each module's
            name and the module.
        optimizer_values: the number of values that the optimizer keeps for each element of a shard, in its dtype: 2 for
            AdamW, 1 for SGD with momentum.
        inputs: the arguments of one forward, as a tuple, or by name; of tensors, only shapes and dtypes are used. The forward
            runs without memory: the plan has its order, and what autograd keeps of each unit as its activations. Give a model that
            computes its loss all that it needs for it. Kernels are chosen as on a CPU. Modules that recompute keep what they keep
            in a run; what they compute again in backward is not in the plan.
        activations: the bytes of activations that stay from a unit's forward to its backward, by the unit's name, in place
            of those that ``inputs`` give.
        prefetch_depth: the number of units that are gathered ahead.
        options: of all calls of fully_shard: reshard_after_forward (None means True, except for the root, where it means
            False), shard_placement_fn, mp_policy, offload_policy, ignored_params, placements, outer_placements,
            gather_format, grad_comm_format, keep_gathered_bytes, follow_grad_dtype, main_params_dtype and main_grads_dtype. With
            outer_placements="optim_if_even", parameters that are not cut over both dimensions are in a unit of their own,
            "... (replicated)". And of a step: microbatches, the number of backwards before each update, whose gradients add up
            (1), and sync_each_microbatch, whether each of them reduces its gradients (True) or the last one alone, as with
            ``set_requires_gradient_sync(False)`` before the others. The plan's memory and wire are those of all of them.

    Raises:
        ValueError: for options that fully_shard would refuse, for parameters that are scalars, shards, DTensors, or in two
            units, if ``units`` matches no module below the root, and for ``inputs`` of a module whose forward depends on values of tensors.
        Error: if the mesh has a device type that is not known.
        TypeError: if an argument is of another type, or an option is not known; it is named.
    """
    if not isinstance(module, nn.Module):
        refuse("module", module, "a module")
    if not isinstance(mesh, PlannedMesh):
        refuse("mesh", mesh, "a PlannedMesh, as PlannedMesh(ranks=8)")
    if not (inputs is None or isinstance(inputs, tuple | Mapping)):
        refuse("inputs", inputs, "a tuple of arguments, or arguments by their names")
    check_bytes("optimizer_values", optimizer_values)
    measured = {name: as_bytes(f"activations['{name}']", count) for name, count in (activations or {}).items()}
    unknown = set(options) - _OPTIONS - _OF_STEPS
    if unknown:
        refuse("options", sorted(unknown), f"those of {sorted(_OPTIONS | _OF_STEPS)}")
    microbatches = options.get("microbatches", 1)
    check_bytes("microbatches", microbatches)
    if microbatches < 1:
        raise ValueError(f"microbatches is {microbatches}: give 1 or more")
    syncs = as_flag("sync_each_microbatch", options.get("sync_each_microbatch", True))
    ranks = ShardingMesh(Sizes(mesh.sizes), mesh.of_engine())
    of_units = make_options(**{name: value for name, value in options.items() if name in _SHARDING})
    check_functions(shard_placement_fn=options.get("shard_placement_fn"))
    check_options(of_units, ranks)
    found = _units_in(module, _predicate(units), check_ignored(options.get("ignored_params")))
    if units is not None and len(found) == 1:
        raise ValueError(f"units is {units!r}, and no module below the root is one: give None if the root is the only unit")
    names = [one.name for one in found]
    no_units = set(measured) - set(names)
    if no_units:
        raise ValueError(f"activations are given for {sorted(no_units)}, which are no units: they are {names}")
    dim_of = _dim_of(options.get("shard_placement_fn"), ranks, of_units)
    kept: dict[str, int] = {}
    of_inputs: dict[str, int] = {}
    events = None
    if inputs is not None:
        modules = {one.name: one.module for one in found}
        kept, of_inputs, events = kept_by_unit(module, modules, inputs, of_units.mp_policy.param_dtype)
    kept |= measured
    made: list[tuple[_C.ShownUnit, int | None, int]] = []
    positions_of: list[list[int]] = []  # of each module's units, in the engine; none if it has no parameters
    places: dict[nn.Parameter, tuple[int, int]] = {}  # of parameters: in which of these, and where there
    of_no_unit: dict[int, int] = {}  # activations of modules that have no parameters, by the unit that holds them
    if_even = of_units.outer_placements == "optim_if_even"
    for k, one in enumerate(found):
        parent = one.parent
        while parent is not None and not positions_of[parent]:
            parent = found[parent].parent
        around = None if parent is None else positions_of[parent][-1]
        positions_of.append([])
        if not one.parameters:  # The unit around it holds its activations, or the first one.
            of_no_unit[around or 0] = of_no_unit.get(around or 0, 0) + kept.pop(one.name, 0)
        outer = {p: not if_even or divides_by_all(ranks, p, dim_of(p)) for p in one.parameters}
        for is_outer in sorted(set(outer.values()), reverse=True):  # Others are not cut over the outer dimension.
            chosen = [p for p in one.parameters if outer[p] == is_outer]
            of_unit = of_units if is_outer else replace(of_units, outer_placements="no_shard")
            parameters = [_parameter(one.parameters[p], p, ranks, of_unit, dim_of(p)) for p in chosen]
            unit_name = one.name if is_outer else f"{one.name} (replicated)"
            unit = _unit(unit_name, parameters, ranks, of_unit, is_root=k == 0)
            unit.requires_gradient_sync = unit.requires_all_reduce = syncs
            positions_of[k].append(len(made))
            places.update({p: (len(made), place) for place, p in enumerate(chosen)})
            made.append((unit, around, kept.pop(one.name, 0)))
            around = len(made) - 1
    if not made:
        raise ValueError(f"{type(module).__name__} has no parameters to plan for")
    for k, count in of_no_unit.items():
        unit, around, held = made[k]
        made[k] = (unit, around, held + count)
    if events is None:
        visits = visits_as_registered(
            [module],
            {one.module: positions for one, positions in zip(found, positions_of, strict=True)},
            {(m, name): places[p] for m in module.modules() for name, p in m._parameters.items() if p in places},
        )
    else:
        visits = visits_of_events(
            events,
            dict(zip(names, positions_of, strict=True)),
            {name: places[p] for name, p in module.named_parameters() if p.requires_grad and p in places},
        )
    planned = _C.plan(
        ranks.engine_mesh,
        made,
        visits,
        optimizer_values=optimizer_values,
        prefetch_depth=prefetch_depth,
        keep_gathered_bytes=of_units.keep_gathered_bytes,
        microbatches=microbatches,
    )
    return _read(planned, of_inputs)


@dataclass
class _Found:
    """A module that becomes a unit.

    Attributes:
        parent: the position of the module around it.
        parameters: those of the unit, with their names.
    """

    name: str
    module: nn.Module
    parent: int | None
    parameters: dict[nn.Parameter, str] = field(default_factory=dict)


def _units_in(root: nn.Module, is_unit: Callable[[str, nn.Module], bool], ignored: set[nn.Parameter]) -> list[_Found]:
    """Returns the modules that become units, enclosing ones first."""
    found: list[_Found] = []
    position_of: dict[nn.Module, int] = {}
    unit_of: dict[nn.Parameter, int] = {}

    def walk(module: nn.Module, name: str, unit: int | None) -> None:
        if module not in position_of and (unit is None or is_unit(name, module)):
            position_of[module] = len(found)
            found.append(_Found(name or "(root)", module, unit))
        own = position_of.get(module, unit)
        assert own is not None
        for own_name, parameter in module.named_parameters(recurse=False):
            if parameter in ignored:
                continue
            full_name = f"{name}.{own_name}" if name else own_name
            if unit_of.setdefault(parameter, own) != own:
                raise ValueError(
                    f"parameter '{full_name}' is in two units, '{found[unit_of[parameter]].name}' and '{found[own].name}': tied "
                    "parameters belong to one unit"
                )
            found[own].parameters.setdefault(parameter, full_name)
        for child_name, child in module._modules.items():
            if child is not None:
                walk(child, f"{name}.{child_name}" if name else child_name, own)

    walk(root, "", None)
    return found


def _dim_of(
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None, ranks: ShardingMesh, options: ShardingOptions
) -> Callable[[nn.Parameter], int]:
    """Returns a function from a parameter to the dimension that is cut."""

    def dim_of(parameter: nn.Parameter) -> int:
        placement = None if shard_placement_fn is None or options.is_replicated else shard_placement_fn(parameter)
        if hasattr(placement, "mesh_info"):
            refuse("shard_placement_fn's result", placement, "Shard(dim) or None: a plan has one mesh")
        return dimension_of(placement, ranks.shard_size, parameter)

    return dim_of


def _unit(
    name: str, parameters: list[ShardedParameter], ranks: ShardingMesh, options: ShardingOptions, *, is_root: bool
) -> _C.ShownUnit:
    """Returns the unit, with the settings that a state of fully_shard gives it."""
    after_forward, size = options.after_forward, options.post_forward_size(ranks.shard_size)
    if is_root and options.reshard_after_forward is None:  # Backward begins with the root.
        after_forward = _C.AfterForward.UNTIL_BACKWARD
    return make_unit(name, parameters, ranks, options, after_forward=after_forward, post_forward_size=size)


def _read(planned: _C.Plan, inputs: Mapping[str, int]) -> Plan:
    values: dict[str, Any] = json.loads(planned.json())
    return Plan(
        ranks=values["ranks"],
        elements=values["elements"],
        peak=values["peak"],
        moment=values["moment"],
        memory={f"{kind}.{which}": count for kind, use in values["memory"].items() for which, count in use.items()},
        wire=values["wire"],
        links={link["dim"]: link["sent"] for link in values["links"]},
        units=tuple(PlannedUnit(**unit, inputs=inputs.get(unit["name"], 0)) for unit in values["units"]),
        moments=tuple((moment["what"], moment["most"]) for moment in values["moments"]),
        fsdp2=values["fsdp2"] and values["fsdp2"]["peak"],
        fsdp2_moment=values["fsdp2"] and values["fsdp2"]["moment"],
        _planned=planned,
    )
