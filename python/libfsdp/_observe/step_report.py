"""Where the time of training steps went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from libfsdp import _C
from libfsdp._observe.statistics import engine_of

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ExposedWaits:
    """The waits of this rank for one kind of collective of one unit. Times are in ms per step.

    Attributes:
        unit: the unit's name; empty, or in parentheses, if the collective belongs to no unit.
        operation: "all-gather", "reduce-scatter", ...
        in_backward: whether the computation was in a backward.
        ms: the sum of ``reasons``.
        device_ms: as StepReport's ``device_exposed_ms``, for these waits.
        reasons: the time for each reason, by its name in StepReport.
        late_rank: the rank that was waited for the longest, or None if none was late.
        late_rank_was: the activity of that rank, such as "in forward of 'blocks.3'".
    """

    unit: str
    operation: str
    in_backward: bool
    ms: float
    device_ms: float | None
    reasons: dict[str, float]
    late_rank: int | None
    late_rank_was: str


@dataclass(frozen=True)
class StepReport:
    """Where the time of training steps went on this rank. Times are in ms, as the host sees them, means over the steps.

    ``str()`` gives a table for people, ``line`` one line for a log, and ``scalars()`` numbers for a dashboard.

    Attributes:
        steps: how many steps the report covers; 0 if none has ended, and then all else is 0.
        step_ms: from the beginning of a step to that of the next one, or to the report.
        slowest_step_ms: the time of the longest step.
        forward_ms: until backward begins. Forwards without a backward, such as an evaluation, are a part of it.
        backward_ms: until the last reduction has ended.
        between_ms: the rest: the optimizer, loading data, saving.
        compute_ms: ``step_ms`` without the waits.
        exposed_ms: the waits for collectives: the sum of ``reasons``.
        device_exposed_ms: how long the device's stream waited for gathers and reductions, by the device's clock, where the
            host does not wait for them; None if it was not measured, as on the CPU, and in steps before the program's
            first report.
        reasons: "late rank" (another rank had not made the call yet), "prefetch" (the gather began only when its unit
            was needed), "queue" (earlier collectives were under way), "link" (the data were on their way), and "host"
            (this rank was copying or adding up what had arrived).
        overlap: the share of the time between the call of collectives and their end in which this rank did not wait.
        waits: the longest first.
        slowest_ranks: the ranks that compute the longest, at most three, with their ``compute_ms``; the slowest first,
            and the same on all ranks.
        median_compute_ms: the median of ``compute_ms`` over the ranks.
        sent_bytes: the bytes that this rank sent as messages, per step.
        shared_memory_bytes: the bytes that peers on this host read from its memory, per step.
        peak_bytes: the most bytes that the engine held in these steps.
        peak_unit: the unit that computed at the peak; empty if none did.
        line: one line for a log.
    """

    steps: int
    step_ms: float
    slowest_step_ms: float
    forward_ms: float
    backward_ms: float
    between_ms: float
    compute_ms: float
    exposed_ms: float
    device_exposed_ms: float | None
    reasons: dict[str, float]
    overlap: float
    waits: tuple[ExposedWaits, ...]
    slowest_ranks: tuple[tuple[int, float], ...]
    median_compute_ms: float
    sent_bytes: int
    shared_memory_bytes: int
    peak_bytes: int
    peak_unit: str
    line: str
    _table: str

    def __str__(self) -> str:
        """Returns the line, and a line for each of the longest waits."""
        return self._table

    def scalars(self) -> dict[str, float]:
        """Returns the numbers of the report by name, for a dashboard such as TensorBoard. Reasons are "waits/late_rank_ms" and so on."""
        numbers = {
            name: float(value)
            for name, value in vars(self).items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        return numbers | {f"waits/{name.replace(' ', '_')}_ms": ms for name, ms in self.reasons.items()}


def step_report(module: nn.Module, steps: int = 1) -> StepReport:
    """Reports where the time of the last steps of a model went, and why this rank waited.

    A step begins with the first forward after a backward that gives gradients to the optimizer; under gradient
    accumulation with ``set_requires_gradient_sync(False)`` or ``set_is_last_backward(False)``, after the last one. The
    events that it reads are always written, and cost well under a microsecond each. On a device, the times are those of
    the host, which does not wait for data; but for ``device_exposed_ms``, which is measured from the first report on.

    Collective over the ranks of the model; call it between steps.

    Args:
        module: the root, or any sharded module of the model.
        steps: the number of steps; fewer are reported if fewer have ended, or if their events are no longer kept (some
            16,000 are).

    Raises:
        ValueError: if the module is not sharded, or no forward of the model has run yet.
        Error: if ``steps`` is not positive.
    """
    fields = _C.step_report(engine_of(module), steps)
    fields["waits"] = tuple(ExposedWaits(**waits) for waits in fields["waits"])
    fields["slowest_ranks"] = tuple(fields["slowest_ranks"])
    fields["_table"] = fields.pop("table")
    return StepReport(**fields)
