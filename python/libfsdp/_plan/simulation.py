"""Simulates the time of planned steps, and the useful part of the time of a run with failures."""

from __future__ import annotations

from dataclasses import dataclass, fields

from libfsdp import _C


@dataclass(frozen=True)
class UnitTime:
    """The time that a rank computes for one unit in a step.

    Attributes:
        forward_ms: in forward.
        backward_ms: in backward, with what is computed again.
    """

    forward_ms: float = 0.0
    backward_ms: float = 0.0


@dataclass(frozen=True)
class LinkRate:
    """The speed of a collective over one dimension of a mesh: its latency, and the rate of a rank's bytes.

    Attributes:
        latency_us: of each collective.
        bytes_per_s: what a rank sends in a second; 0: any number of bytes takes no time.
    """

    latency_us: float = 0.0
    bytes_per_s: float = 0.0


@dataclass(frozen=True)
class Simulation:
    """The times of simulated steps, in milliseconds.

    Attributes:
        step_ms: of each step, from the end of the one before, on the rank that ends last.
        average_ms: of these.
        compute_ms: what a rank computes in a step, on average.
        exposed_ms: what a rank waits in a step, on average.
        exposed_by_unit_ms: the same by the unit whose parameters or gradients it waits for.
    """

    step_ms: tuple[float, ...]
    average_ms: float
    compute_ms: float
    exposed_ms: float
    exposed_by_unit_ms: dict[str, float]

    @staticmethod
    def _of_engine(simulation: _C.Simulation) -> Simulation:
        return Simulation(
            step_ms=tuple(simulation.step_ms),
            average_ms=simulation.average_ms(),
            compute_ms=simulation.compute_ms,
            exposed_ms=simulation.exposed_ms,
            exposed_by_unit_ms=simulation.exposed_by_unit_ms,
        )


@dataclass(frozen=True)
class Goodput:
    """How the time of a run was used, in seconds.

    Attributes:
        seconds: from the beginning to the end.
        failures: how many there were.
        fraction: the part of the time in which training that lasted was done.
        checkpoints: what checkpoints took that were saved.
        lost: training and checkpoints that failures undid.
        restarts: what restarts took, failed ones included.
    """

    seconds: float
    failures: int
    fraction: float
    checkpoints: float
    lost: float
    restarts: float


def simulate_failures(
    *, between_failures: float, checkpoint: float, restart: float, interval: float, training: float, seed: int = 0
) -> Goodput:
    """Simulates a long training run that saves checkpoints and sometimes fails. All times are in seconds.

    Failures are independent of each other, and also happen in checkpoints and restarts; each returns to the last checkpoint that was saved.

    Args:
        between_failures: the average time from one failure of the whole world to the next: a rank's, divided by the ranks.
        checkpoint: for how long a checkpoint keeps training from going on.
        restart: from a failure to the first step after it.
        interval: of training between two checkpoints.
        training: how much training is to be done.
        seed: of the failures that are drawn.

    Raises:
        Error: unless ``between_failures``, ``interval`` and ``training`` are positive and the others not negative; and if the
            run would not end within a million failures.
    """
    goodput = _C.simulate_failures(
        between_failures=between_failures,
        checkpoint=checkpoint,
        restart=restart,
        interval=interval,
        training=training,
        seed=seed,
    )
    return Goodput(**{one.name: getattr(goodput, one.name) for one in fields(Goodput)})


def best_checkpoint_interval(between_failures: float, checkpoint: float) -> float:
    """Returns the interval between checkpoints, in seconds, for which training takes the shortest time.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (2006).

    Args:
        between_failures: the average time from one failure of the whole world to the next, in seconds.
        checkpoint: for how long a checkpoint keeps training from going on, in seconds.

    Raises:
        Error: unless both are positive.
    """
    return _C.best_checkpoint_interval(between_failures, checkpoint)
