"""Published results as Megatron's arguments: the recipes of older_runs.yaml and blind_runs.yaml.

Half of the older runs, chosen by a hash of their names, served to fit the terms of the speed model; the others are held
out. Blind runs were written before they were predicted, and nothing was fitted to them.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from published_runs import Run

from fp8launch.check.resolved_run import resolve_run
from fp8launch.job.prepared import prepare
from fp8launch.megatron.flops import flops_per_token
from fp8launch.plugins.plan.settings import timed_arguments

FILE = Path(__file__).resolve().parent / "older_runs.yaml"
BLIND = FILE.with_name("blind_runs.yaml")


@dataclass(frozen=True)
class OlderRun:
    """A published result, with the release of its software and whether it is held out.

    `repeats` is whether a newer figure, which may have served to fit parameters, has the same layout.
    """

    run: Run
    release: str
    held_out: bool
    repeats: bool = False


def older_runs(rows: Path = FILE) -> Iterator[OlderRun]:
    """Yield the results in `rows`, in the order of the file."""
    with tempfile.TemporaryDirectory() as folder:
        for row in yaml.safe_load(rows.read_text()):
            file = Path(folder) / f"{row['name']}.yaml"
            file.write_text(yaml.safe_dump({"name": row["name"], **row["recipe"]}))
            run = resolve_run(prepare(str(file)))
            args = dict(timed_arguments(run))
            speed = row.get("tokens_per_s_per_gpu")
            if speed is None:
                flops = flops_per_token(args)
                assert flops is not None
                speed = row["tflops_per_gpu"] * 1e12 / flops
            world, batch = run.layout.world, run.layout.global_batch
            held_out = int(hashlib.sha256(row["name"].encode()).hexdigest(), 16) % 2 == 1
            result = Run(row["name"], row["family"], run.gpu.name, world, batch, args, speed)
            yield OlderRun(result, row["release"], held_out)
