"""Measure how fast logs are read, compared with `grep -c 'elapsed time'` on the same file.

    python benchmarks/parse_speed.py [--size 1000] [--per-mille 5] [--keep FILE]

Writes a log of SIZE MB with NCCL, torchrun and warning lines. Of a thousand lines, PER_MILLE are iterations and one is
a memory line; a checkpoint comes every few thousand. Then times grep (into a pipe: it stops at the
first hit when writing to /dev/null), the block reader alone (`scan_file`) and the whole of `fp8launch parse`
(`summarise`), best of three each, and prints the memory that the reader took.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "launchers"))

from fp8launch.logs import scan_file
from fp8launch.report.throughput import read_logs, summarise

HEAD = """using world size: 8, data-parallel size: 8
------------------------ arguments ------------------------
  fp8 ............................................. hybrid
  fp8_recipe ...................................... tensorwise
  hidden_size ..................................... 4096
  num_attention_heads ............................. 32
  num_layers ...................................... 32
  seq_length ...................................... 8192
  vocab_size ...................................... 128256
-------------------- end of arguments ---------------------
"""


def write_log(path: Path, megabytes: int, per_mille: float) -> int:
    """Write the log, and return its number of iteration lines."""
    rng = random.Random(8)
    noise = [
        f"node{rng.randrange(64):03}:{rng.randrange(99999)}:{rng.randrange(99999)} [{i % 8}] NCCL INFO "
        f"Channel {i % 24:02}/0 : {i % 8}[{i % 8}] -> {(i + 1) % 8}[{(i + 1) % 8}] via P2P/CUMEM/read"
        for i in range(3000)
    ]
    noise += [
        f"[rank{i % 8}]:[W1120 09:41:{i % 60:02}.{rng.randrange(10**6):06} ProcessGroup.cpp:{i}] Warning: a collective "
        "took longer than expected; this may be the network, or a rank that waits for its data."
        for i in range(500)
    ]
    noise += [
        f"INFO:megatron.core.distributed.param_and_grad_buffer:Number of buckets for gradient all-reduce: {i}"
        for i in range(500)
    ]
    iterations = 0
    written = 0
    with path.open("w") as out:
        out.write(HEAD)
        while written < megabytes * 1_000_000:
            lines = []
            for _ in range(5000):
                dice = 1000 * rng.random()
                if dice < per_mille:
                    iterations += 1
                    lines.append(iteration_line(iterations, rng))
                elif dice > 999:
                    lines.append(
                        f"[Rank 0] (after {iterations} iterations) memory (MB) | allocated: 76096.10 | max allocated: "
                        "107804.33 | reserved: 108878.00 | max reserved: 108878.00"
                    )
                else:
                    lines.append(rng.choice(noise))
            lines.append(
                f"[2026-11-20 09:40] saving checkpoint at iteration {iterations:7d} to /ckpt in torch_dist format"
            )
            text = "\n".join(lines) + "\n"
            out.write(text)
            written += len(text)
    return iterations


def iteration_line(i: int, rng: random.Random) -> str:
    ms = 4318 + rng.gauss(0, 8)
    return (
        f" [2026-11-20 {i // 3600 % 24:02}:{i // 60 % 60:02}:{i % 60:02}.207963] iteration {i:8d}/10000000 | consumed "
        f"samples: {i * 128:12d} | elapsed time per iteration (ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): "
        f"{3373200 / ms:.1f} | learning rate: 3.000000E-04 | global batch size:   128 | lm loss: {12 / i**0.1:.6E} | "
        f"loss scale: 1.0 | grad norm: {rng.uniform(0.5, 2):.3f} | number of skipped iterations:   0 | number of nan "
        "iterations:   0 |"
    )


def best(run: Callable[[], object], times: int = 3) -> float:
    durations = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        durations.append(time.perf_counter() - begin)
    return min(durations)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1000, help="MB of log (1000)")
    parser.add_argument("--per-mille", type=float, default=5.0, help="iteration lines per thousand lines (5)")
    parser.add_argument("--keep", type=Path, help="write the log here and leave it there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.keep or Path(folder) / "megatron.log"
        iterations = write_log(path, options.size, options.per_mille)
        grep = ["grep", "-c", "elapsed time", str(path)]
        counted = int(subprocess.run(grep, stdout=subprocess.PIPE, check=True).stdout)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = scan_file(path)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if not counted == len(found.table) == iterations:
            raise SystemExit(f"counts differ: written {iterations}, grep {counted}, reader {len(found.table)}")
        seconds = {
            "grep": best(lambda: subprocess.run(grep, stdout=subprocess.PIPE, check=True)),
            "scan_file": best(lambda: scan_file(path)),
            "summarise": best(lambda: summarise(read_logs([path]), gpu="h200")),
        }
        print(
            json.dumps(
                {
                    "python": platform.python_version(),
                    "bytes": path.stat().st_size,
                    "iteration_lines": iterations,
                    "seconds": {k: round(v, 3) for k, v in seconds.items()},
                    "speed_against_grep": {k: round(seconds["grep"] / v, 3) for k, v in seconds.items()},
                    "reader_memory_mib": round((after - before) / 1024, 1),
                },
                indent=2,
            )
        )


if __name__ == "__main__":
    main()
