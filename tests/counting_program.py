"""The program of the engine in `counting_engine.py`: it counts, and prints a line of JSON for each step."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--quantize", default="")
    parser.add_argument("--keep-in", type=Path)
    parser.add_argument("--continue-from", type=Path)
    # torchrun's own parser takes the separator away.
    ours = parser.parse_args(sys.argv[2:] if sys.argv[1] == "--" else sys.argv[1:])
    begin = 0
    if ours.continue_from is not None and (ours.continue_from / "count").is_file():
        begin = int((ours.continue_from / "count").read_text())
    for step in range(begin + 1, ours.steps + 1):
        record = {"step": step, "of": ours.steps, "ms": 5.0 + step % 2, "loss": 2.0 / step, "batch": 8}
        print(json.dumps(record), flush=True)
        if step == begin + 1 and os.environ.get("COUNTING_REPORT") == "1":
            print(f"fp8launch-probe: {json.dumps(report(ours.quantize))}", flush=True)
        if ours.keep_in is not None:
            ours.keep_in.mkdir(exist_ok=True)
            (ours.keep_in / "count").write_text(f"{step}\n")


def report(quantize: str) -> dict[str, object]:
    """What its four linear layers did, in the format of fp8launch's own module report."""
    linears = 4 if quantize else 0
    group = {"modules": "linear", "class": "Counter", "role": "linear", "n": 4, "ran_fp8": bool(quantize)}
    totals = {"linears": 4, "fp8": linears, "explained": 0, "unexplained": 4 - linears, "weights": 4, "fp8_weights": 0}
    return {"totals": totals, "groups": [{**group, "recipe": "Float8CurrentScaling" if quantize else None}]}


if __name__ == "__main__":
    main()
