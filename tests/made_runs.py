"""Run folders and logs in Megatron's format, with times and losses that a test chooses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fp8launch.report.comparison import Comparison, compare
from fp8launch.report.named_runs import read_runs

SHAPE = {
    "num_layers": 4,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "group_query_attention": True,
    "swiglu": True,
    "padded_vocab_size": 128256,
    "untie_embeddings_and_output_weights": True,
    "seed": 1234,
    "lr": 0.0003,
    "mock_data": True,
    "tensor_model_parallel_size": 1,
    "micro_batch_size": 1,
    "bf16": True,
}


@dataclass(frozen=True)
class Made:
    """A run to write. `ms` is by iteration from 1; the first two lines of a log are slow by themselves."""

    ms: Callable[[int], float] = lambda i: 1000.0
    iterations: int = 10
    world: int = 8
    batch: int = 64
    sequence: int = 4096
    precision: str = "bf16"
    loss: Callable[[int], float | None] = lambda i: 10.0 / (1 + 0.01 * i)
    joules: float | None = None
    end: str = "[after training is done] datetime: 2026-11-20 10:00:00 "
    arguments: Mapping[str, object] = field(default_factory=dict)
    validations: Mapping[int, float] = field(default_factory=dict)  # by iteration

    def text(self) -> str:
        fp8 = {} if self.precision == "bf16" else {"fp8": "hybrid", "fp8_recipe": self.precision}
        values = {
            **SHAPE, "fp8": None, "fp8_recipe": "delayed", **fp8, "seq_length": self.sequence,
            "global_batch_size": self.batch, "world_size": self.world, "data_parallel_size": self.world,
            **self.arguments,
        }  # fmt: skip
        dump = [f"  {k} {'.' * (48 - len(k))} {v}" for k, v in values.items()]
        title = "------------------------ arguments ------------------------"
        lines = [title, *dump, "-------------------- end of arguments ---------------------"]
        for i in range(1, self.iterations + 1):
            slow = {1: 20.0, 2: 10.5}.get(i, 1.0)
            loss = self.loss(i)
            lm_loss = "" if loss is None else f" lm loss: {loss:.6E} |"
            energy = "" if self.joules is None else f" energy per GPU (J/iter/GPU): {self.joules:.1f} |"
            lines.append(
                f" [2026-11-20 09:40:33.207963] iteration {i:8d}/{self.iterations:8d} | consumed samples: {i:12d} |"
                f" elapsed time per iteration (ms): {slow * self.ms(i):.1f} |{energy} learning rate: 1.0E-04 |"
                f" global batch size: {self.batch:5d} |{lm_loss} loss scale: 1.0 | grad norm: {1.2 + i % 5 / 10:.3f} |"
                f" number of skipped iterations:   0 | number of nan iterations: {int(loss is None)} |"
            )
            if i in self.validations:
                lines.append(f" validation loss at iteration {i} | lm loss value: {self.validations[i]:.6E} | ")
        return "\n".join([*lines, self.end, ""])


FP8 = "tensorwise"
OUT_OF_MEMORY = "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."


def write_log(path: Path, made: Made) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(made.text())
    return path


def write_run(folder: Path, made: Made | None, **manifest: Any) -> Path:
    """A run folder as `submit` leaves it; `made` None for a run that has not written a log."""
    nodes = manifest.pop("nodes", 1)
    recipe = {"resources": {"nodes": nodes, "gpu": "h100"}, **manifest.pop("recipe", {})}
    world = made.world if made else 8 * nodes
    record = {
        "run_id": folder.name, "name": "made", "command": ["submit", "made"], "recipe": recipe, "gpu": "h100",
        "layout": {"world": world}, "megatron": {"version": "0.19.2", "argv": []}, "jobs": [], "environment": {},
        "created": "2026-11-20T10:00:00+00:00", **manifest,
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(record))
    if made:
        write_log(folder / "logs" / "1-0.log", made)
    return folder


def write_study(
    root: Path, points: Sequence[tuple[Mapping[str, object], int, int, Made | None]], name: str = "grid", **more: Any
) -> Path:
    """A study folder of (axes' values, nodes, repeat, run)."""
    folder = root / f"{name}-study-abc123"
    planned = []
    for i, (values, nodes, repeat, made) in enumerate(points):
        run = f"run{i:02d}"
        study = {"name": folder.name, "point": dict(values), "repeat": repeat}
        write_run(folder / run, made, nodes=nodes, study=study, jobs=[{"id": str(i)}], **more)
        planned.append({"run": run, "recipe": "recipes/made.yaml", "nodes": nodes, **study, "values": dict(values)})
    record = {"points": planned}
    (folder / "study.json").write_text(json.dumps(record))
    return folder


RATES = {0.001: (2.2, 2.3), 0.003: (0.40, 0.44), 0.01: (0.005, 0.009), 0.03: (0.03, 0.05)}


def write_rates(root: Path) -> Path:
    """A study of four learning rates with two seeds on a CPU. The second seed is slower: 70 ms against 60."""
    points = []
    for lr, losses in RATES.items():
        for seed, loss in enumerate(losses, 1):
            made = Made(
                ms=lambda i, seed=seed: 50.0 + 10 * seed, iterations=40, world=1, batch=8, sequence=64,
                loss=lambda i, loss=loss: loss,
                arguments={"lr": lr, "seed": seed, "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 256},
            )  # fmt: skip
            points.append(({"train.lr": lr, "megatron.seed": seed}, 1, 1, made))
    return write_study(root, points, recipe={"resources": {"gpu": "cpu"}}, gpu="cpu")


# A training in three phases.
PHASES = [("warmup", 0, 10), ("body", 10, 40), ("cooldown", 40, 50)]
LEFT = "[exiting program at iteration {end}] datetime: 2026-11-20 10:00:00 "


def shifted(text: str, begin: int, total: int) -> str:
    """A log whose iterations begin after `begin`, of a training of `total`."""

    def line(found: re.Match[str]) -> str:
        return f"iteration {int(found[1]) + begin:8d}/{total:8d} |"

    return re.sub(r"iteration +(\d+)/ *\d+ \|", line, text)


def phase_log(
    begin: int, end: int, ms: float, precision: str = "bf16", told: int | None = None, ending: str | None = None
) -> str:
    """The log of an attempt that trained from `begin` to `end`; `told` is the end of its phase, if different."""
    told = told or end
    last = told == PHASES[-1][2]
    made = Made(
        lambda i: ms,
        end - begin,
        precision=precision,
        loss=lambda i: 10 / (1 + 0.01 * (begin + i)),
        arguments={} if last else {"exit_interval": told},
    )
    ending = made.end if last else ending or LEFT.format(end=end)
    return shifted(replace(made, end=ending).text(), begin, PHASES[-1][2])


WHOLE = (
    phase_log(0, 10, 1000.0),
    phase_log(10, 40, 500.0, "tensorwise"),
    phase_log(40, 50, 1000.0),
)


def write_phases(folder: Path, *logs: str) -> Path:
    """A run folder in three phases with these logs, one for each attempt."""
    phases = [{"name": name, "begin": begin, "end": end} for name, begin, end in PHASES]
    write_run(folder, None, phases=phases)
    for i, text in enumerate(logs):
        (folder / "logs").mkdir(exist_ok=True)
        (folder / "logs" / f"1-{i}.log").write_text(text)
    return folder


def of(*names: object, gpu: str | None = "h200", **options: Any) -> Comparison:
    """The comparison of runs, studies and logs by their names."""
    return compare(read_runs([str(n) for n in names], gpu), **options)
