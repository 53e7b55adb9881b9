"""A training program whose speed depends on its settings as a test says: real processes, Megatron's log lines.

It takes Megatron's arguments. At micro batch 8 it takes memory until the limit that it sets itself ends it. It waits
for the file named in GATE, if the settings equal GATE_FOR.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path

LINE = (
    " [2026-11-22 18:00:00.{i:06d}] iteration {i:8d}/{n:8d} | consumed samples: {i:12d} | elapsed time per iteration "
    "(ms): {ms:.1f} | learning rate: 1.0E-03 | global batch size: {batch:5d} | lm loss: 2.0E+00 | loss scale: 1.0 | "
    "grad norm: 1.000 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)


def value(flag: str) -> int:
    return int(sys.argv[sys.argv.index(flag) + 1])


def main() -> None:
    micro, threads = value("--micro-batch-size"), int(os.environ["OMP_NUM_THREADS"])
    gate = os.environ.get("GATE")
    while gate and os.environ["GATE_FOR"] == f"{micro} {threads}" and not Path(gate).is_file():
        time.sleep(0.05)
    if micro == 8:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        taken = []
        while True:
            taken.append(bytearray(50_000_000))
    usual = {1: 160.0, 2: 100.0, 4: 80.0}[micro]
    # Two threads make the steps vary so much that seven of them decide nothing, and their first run was a lucky one.
    spread = 0.05 if threads == 2 else 0.001
    if threads == 2 and "-r1-" in os.environ["FP8LAUNCH_LOCAL_RUN"]:
        usual *= 0.98
    number, batch = value("--train-iters"), value("--global-batch-size")
    for i in range(1, number + 1):
        ms = usual * (1 + spread * (i * 7 % 5 - 2))
        print(LINE.format(i=i, n=number, ms=ms, batch=batch), flush=True)
    print("[after training is done] datetime: 2026-11-22 18:00:00", flush=True)


if __name__ == "__main__":
    main()
