"""Trains a byte-level GPT on text, sharded over processes, from Python.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --steps 400

`make train-python` does this with the package of the build folder. By default the text is LibTorch's own headers, which
every machine with torch has. Each run has a folder with its configuration, a log and checkpoints; Ctrl-C saves, and
`--resume FOLDER` goes on. The log says where the time of a step goes, too; with `--tensorboard`, TensorBoard shows it.
"""

import argparse
import fcntl
import json
import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from libfsdp import AsyncSaver, fully_shard, load_latest, step_report, stop_requested

DIM, HEADS, CONTEXT = 256, 4, 256
SEQUENCES = 4  # per step, over all ranks
LR, WARMUP, CLIP = 1e-3, 30, 1.0
KEPT = 2  # checkpoints
BETWEEN_ROWS = 20  # of the log, steps


class Block(nn.Module):
    """Causal self-attention and a two-layer network, each behind a norm and around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(DIM), nn.LayerNorm(DIM)])
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """Bytes in, logits of the bytes that follow out."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, DIM)
        self.positions = nn.Embedding(CONTEXT, DIM)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                adds = name.endswith(("out.weight", "mlp.2.weight"))  # to the residual stream, 2 * layers times
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if adds else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def read_text(path: Path) -> tuple[Tensor, Tensor]:
    """The bytes of a file, or of all text files below a folder; the last twentieth is for validation."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    texts = [file.read_bytes() for file in files]
    text = torch.frombuffer(bytearray().join(text for text in texts if b"\0" not in text), dtype=torch.uint8)
    return text[: -len(text) // 20], text[-len(text) // 20 :]


def cut(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """The sequences that start there, and the bytes that follow each of theirs."""
    sequences = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
    return sequences[:, :-1], sequences[:, 1:]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def sum_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def lr_at(step: int, steps: int) -> float:
    """Linear warm-up, times a cosine from 1 to 0.05."""
    return LR * min(1.0, (step + 1) / WARMUP) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def load_newest(options: argparse.Namespace, model: nn.Module, optimizer: AdamW) -> int:
    """The step of the newest checkpoint, in memory or in the run's folder; 0, if there is none."""
    if not options.resume:
        return 0
    folders = [options.memory, options.resume] if options.memory else options.resume
    loaded = load_latest(folders, model, optimizer)
    if loaded and dist.get_rank() == 0:
        print(f"goes on after step {loaded.extra['step']}, from {loaded.origin}", flush=True)
    return loaded.extra["step"] if loaded else 0


class Log:
    """log.jsonl in the folder of a run, and the terminal, for rank 0 alone. Rows of steps up to `keep_until` stay.

    With `tensorboard`, TensorBoard (a package of its own) gets all numbers, too: `tensorboard --logdir FOLDER` shows them.
    """

    def __init__(self, run: Path, keep_until: int, tensorboard: bool) -> None:
        self.path = run / "log.jsonl"
        self.board = None
        if dist.get_rank() == 0:
            if tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                self.board = SummaryWriter(str(run), purge_step=keep_until + 1)
            rows = self.path.read_text().splitlines() if self.path.exists() else []
            kept = [row for row in rows if row.endswith("}") and json.loads(row)["step"] <= keep_until]
            self.path.write_text("".join(f"{row}\n" for row in kept))

    def write(self, text: str, step: int, **numbers: float) -> None:
        if dist.get_rank() == 0:
            print(text, flush=True)
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step, **numbers}) + "\n")
        if self.board is not None:
            for name, value in numbers.items():
                self.board.add_scalar(name, value, step)
            self.board.flush()


def saved_options(run: Path) -> dict[str, object]:
    """What config.json of a run says; nothing where there is none, or where another program's file has this name."""
    path = run / "config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    return config if isinstance(config, dict) and {"steps", "layers", "save_every", "data"} <= config.keys() else {}


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a byte-level GPT on text, sharded over processes.")
    parser.add_argument("--steps", type=int, default=400, help="default: %(default)s, some minutes on two cores")
    parser.add_argument("--layers", type=int, default=6, help="transformer blocks, each a unit; default: %(default)s")
    headers = Path(torch.__file__).parent / "include"
    parser.add_argument("--data", type=Path, default=headers, help="a text file, or a folder of them: %(default)s")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints: %(default)s")
    parser.add_argument(
        "--memory", type=Path, help="a folder in tmpfs, such as /dev/shm/RUN, for checkpoints in memory"
    )
    parser.add_argument("--memory-every", type=int, default=10, help="steps between those in memory: %(default)s")
    parser.add_argument("--tensorboard", action="store_true", help="write the log's numbers for TensorBoard, too")
    parser.add_argument("--folder", type=Path, help="for configuration, log and checkpoints; a new one below runs/")
    parser.add_argument("--resume", type=Path, help="a run's folder: go on with it, with its configuration")
    options = parser.parse_args()
    run = options.resume
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) and options.folder and saved_options(options.folder):
        run = options.folder  # torchrun has restarted the ranks of this run
    if not run and options.folder and (options.folder / "config.json").exists():
        parser.error(
            f"--folder {options.folder} holds a run: go on with --resume, or choose another folder"
            if saved_options(options.folder)
            else f"--folder {options.folder} has a config.json that is not of a run: choose another folder"
        )
    if run:
        saved = saved_options(run)
        if not saved:
            parser.error(f"--resume {run} is not the folder of a run: it has no config.json of one")
        parser.set_defaults(**saved)
        options = parser.parse_args()  # What is given here overrides what is written there.
        options.folder = options.resume = run
    return options


class Lock:
    """Keeps other processes from training in a folder. The system lets go of it when rank 0 ends, in whatever way."""

    def __init__(self, run: Path) -> None:
        refused = [""]
        if dist.get_rank() == 0:
            self.file = (run / ".lock").open("a")
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                refused = [f"another training goes on in {run}: wait for its end, or end it"]
        dist.broadcast_object_list(refused)
        if refused[0]:
            if dist.get_rank() == 0:
                print(refused[0], file=sys.stderr, flush=True)
            dist.barrier()  # torchrun, which sees a rank end, stops the others
            sys.exit(1)


def begin_run(options: argparse.Namespace, lock: Lock | None) -> tuple[Path, Lock]:
    """The folder of the run, with its configuration; rank 0 makes it, unless it is one that goes on."""
    chosen = [options.folder or Path("runs", time.strftime("%Y%m%d-%H%M%S"))]
    dist.broadcast_object_list(chosen)
    run = chosen[0]
    if dist.get_rank() == 0:
        run.mkdir(parents=True, exist_ok=True)
    lock = lock or Lock(run)
    if dist.get_rank() == 0:
        print(f"run folder: {run}", flush=True)
        config = {name: getattr(options, name) for name in ("steps", "layers", "save_every")}
        config["data"] = str(options.data.absolute())
        (run / "config.json").write_text(json.dumps(config))
    return run, lock


def main() -> None:
    options = read_options()
    ranks = int(os.environ["WORLD_SIZE"])
    if SEQUENCES % ranks:  # before ranks connect: none waits for one that has gone
        sys.exit(f"{SEQUENCES} sequences of a step do not divide among {ranks} ranks")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    lock = Lock(options.resume) if options.resume else None
    train, validation = read_text(options.data)
    torch.manual_seed(1)  # the same first values on all ranks
    model = GPT(options.layers)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    first = load_newest(options, model, optimizer)
    if first >= options.steps:
        if rank == 0:
            print(f"nothing is left to train: {options.resume} has made {first} steps; for more, raise --steps")
        dist.destroy_process_group()
        return
    # Nothing of a run changes before its checkpoint is loaded.
    run, lock = begin_run(options, lock)
    log = Log(run, first, options.tensorboard)

    saver = AsyncSaver(model, optimizer, memory=options.memory)
    share = SEQUENCES // ranks
    begin = time.monotonic()
    for step in range(first, options.steps):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, options.steps)
        draws = torch.Generator().manual_seed(step * ranks + rank)  # each rank its own part of the batch
        loss = loss_of(model, *cut(train, torch.randint(len(train) - CONTEXT, (share,), generator=draws)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

        done = step + 1
        mean = sum_over_ranks(loss.item()) / ranks
        if done % BETWEEN_ROWS == 0 or done in (1, options.steps):
            speed = (done - first) * SEQUENCES * CONTEXT / (time.monotonic() - begin)
            times = step_report(model, min(BETWEEN_ROWS, done - first))
            text = f"step {done:5}  loss {mean:.4f}  {speed:7.0f} tokens/s  waits {times.exposed_ms:.0f} of {times.step_ms:.0f} ms"
            log.write(text, step=done, loss=mean, **{f"times/{name}": value for name, value in times.scalars().items()})
        ends = stop_requested()  # by Ctrl-C, or SIGTERM
        if ends or done % options.save_every == 0 or done == options.steps:
            saver.save(run / f"step-{done}", {"step": done}, keep_last=KEPT)
        elif options.memory and done % options.memory_every == 0:
            saver.save_in_memory(f"step-{done}", {"step": done})
        if ends and done < options.steps:
            log.write(f"ended by a signal after step {done}; to go on: --resume {run}", step=done)
            break
    else:
        with torch.no_grad():
            starts = torch.linspace(0, len(validation) - CONTEXT - 1, 64).long()[rank::ranks]
            bits = sum_over_ranks(loss_of(model, *cut(validation, starts)).item()) / ranks / math.log(2)
        text = f"done: {options.steps} steps in {time.monotonic() - begin:.0f} s, validation {bits:.3f} bits per byte"
        log.write(text, step=options.steps, validation_bits_per_byte=bits)
    saver.remove_memory()  # waits for the last save; a restart would find nothing left to do
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
