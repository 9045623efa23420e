"""The models that run.py and compare.py measure, each with its pace."""

from __future__ import annotations

from dataclasses import dataclass

from contenders.gpt import GPTConfig
from contenders.workloads import OTHERS

from harness.measure import ModelCase, Pace

VOCAB, CONTEXT, SEQUENCES = 4096, 128, 4


@dataclass(frozen=True)
class PacedModel:
    """A model, and the pace at which it is measured."""

    model: ModelCase
    pace: Pace


# All contenders of a case live at the same time, at d = 512 with more than 1 GiB for each of their ranks.
LARGE = frozenset({"libfsdp", "libfsdp_no_reshard", "local_cpp", "libfsdp_python", "fsdp2", "fsdp2_tuned", "ddp", "local"})
MEGATRON = frozenset({"libfsdp_megatron", "megatron_fsdp", "fsdp2", "local"})


def step(name: str, dim: int, layers: int, pace: Pace, only: frozenset[str] = frozenset()) -> PacedModel:
    """A GPT that is trained by the ranks."""
    config = GPTConfig(VOCAB, dim, layers, heads=8, context=CONTEXT)
    return PacedModel(ModelCase(name, config, SEQUENCES, only=only), pace)


# Who takes part where options, or models that nobody tuned for, are measured.
VARIANTS = frozenset({"libfsdp_python", "libfsdp_python_no_reshard", "fsdp2", "fsdp2_tuned", "ddp", "local"})
OF_SHARDING = frozenset({"libfsdp_python", "fsdp2", "fsdp2_tuned"})


def variant(name: str, *options: str, ranks: int = 2, only: frozenset[str] = VARIANTS) -> PacedModel:
    """The GPT of d256 with options of contender.py."""
    config = GPTConfig(VOCAB, 256, 8, heads=8, context=CONTEXT)
    return PacedModel(ModelCase(name, config, SEQUENCES, ranks=ranks, options=options, only=only), Pace(rounds=6, turn=2))


def other(name: str) -> PacedModel:
    """A model of workloads.py."""
    only = VARIANTS | {"libfsdp_python_fuse"}
    return PacedModel(ModelCase(name, None, 0, options=("--model", name), only=only), Pace(rounds=6, turn=2))


def host(name: str, world: int, layers: int, pace: Pace) -> PacedModel:
    """Blocks so tiny that a step is little but host time, of a lone rank whose collectives move nothing."""
    return PacedModel(ModelCase(name, GPTConfig(vocab=64, dim=16, layers=layers, heads=2, context=4), 1, world), pace)


MODELS = {
    case.model.name: case
    for case in (
        step("d256", 256, 8, Pace(rounds=12, turn=3)),
        step("d512", 512, 12, Pace(rounds=8, turn=2), LARGE),
        step("d512_megatron", 512, 12, Pace(rounds=8, turn=2), MEGATRON),
        variant("ranks4", ranks=4),
        variant("bf16", "--bf16", "1", only=OF_SHARDING),
        variant("accumulate", "--microbatches", "4"),
        variant("recompute", "--recompute", "1"),
        variant("hsdp", "--replicas", "2", ranks=4, only=OF_SHARDING),
        *(other(name) for name in OTHERS),
        # A batch so small that a step waits for the link, though two cores compute for four ranks.
        PacedModel(
            ModelCase("hosts", GPTConfig(VOCAB, 512, 12, heads=8, context=CONTEXT), 1, ranks=4),
            Pace(rounds=6, turn=2),
        ),
        PacedModel(
            ModelCase(
                "hosts_bf16",
                GPTConfig(VOCAB, 512, 12, heads=8, context=CONTEXT),
                1,
                ranks=4,
                options=("--bf16", "1"),
                only=frozenset({"libfsdp_python", "fsdp2", "ddp"}),
            ),
            Pace(rounds=6, turn=2),
        ),
        # Rounded gathers and gradients, beside the floor of plain training on the same cores.
        PacedModel(
            ModelCase(
                "hosts_rounded",
                GPTConfig(VOCAB, 512, 12, heads=8, context=CONTEXT),
                1,
                ranks=4,
                only=frozenset({"libfsdp", "libfsdp_8bit", "libfsdp_4bit", "ddp_powersgd", "local_cpp"}),
            ),
            Pace(rounds=6, turn=2),
        ),
        host("world8", 8, 48, Pace(rounds=12, turn=20)),
        host("world1024", 1024, 48, Pace(rounds=12, turn=20)),
        # As many units as a model of many experts has.
        host("units4000", 8, 4000, Pace(rounds=8, turn=4)),
    )
}

# Beside d256 and d512: those with options or with other models, of the Python contenders alone.
VARIANTS_OF_STEPS = [name for name, paced in MODELS.items() if not paced.model.takes("libfsdp") and not name.startswith("hosts")]
