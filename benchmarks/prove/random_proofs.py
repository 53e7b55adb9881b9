"""Prove random recipes from the pack's parts that pass `check`.

    random_proofs.py RESULTS.jsonl --count 200 [--first 0] [--part parts/megatron_fsdp]
    random_proofs.py RESULTS.jsonl --report

Writes one JSON object per recipe to RESULTS.jsonl: the recipe and its proof, or why there is none. Skips seeds that the
file already has. `--report` prints counts, and what differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from fp8launch.check.checker import check_all
from fp8launch.diagnostics import UserError
from fp8launch.job.prepared import prepare
from fp8launch.plugins.prove.part import parts_of
from fp8launch.plugins.prove.proof import prove_part
from fp8launch.plugins.prove.session import Servers
from random_recipes import drawn


def proven(seed: int, folder: Path, servers: Servers) -> dict[str, Any]:
    """Draw the recipe of a seed, check it and prove it."""
    recipe = drawn(seed, 0)
    answer: dict[str, Any] = {"seed": seed, "recipe": recipe}
    file = folder / f"{seed}.yaml"
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    try:
        run = prepare(str(file))
        (result,) = check_all([run])
    except UserError as refused:
        return {**answer, "verdict": "check", "codes": [problem.code for problem in refused.problems]}
    errors = [problem.code for problem in result.problems if problem.severity == "error"]
    if errors:
        return {**answer, "verdict": "check", "codes": errors}
    try:
        (part,) = parts_of(run, print)
        proof = prove_part(part, (), servers, lambda: None, again=True)
    except UserError as refused:
        return {**answer, "verdict": "none", "message": refused.problems[0].message}
    return {**answer, "verdict": "agrees" if proof.ok else "differs", "proof": proof.as_json()}


def report(results: Path) -> None:
    """Print the number of each verdict, the time of a proof, and each recipe without an agreement."""
    rows = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    print(dict(Counter(row["verdict"] for row in rows)))
    seconds = sorted(row["proof"]["seconds"] for row in rows if "proof" in row)
    if seconds:
        print(f"seconds of a proof: median {seconds[len(seconds) // 2]:.0f}, at most {seconds[-1]:.0f}")
    print(dict(Counter(row["proof"]["compared"] for row in rows if "proof" in row)))
    for row in rows:
        if row["verdict"] == "none":
            print(row["seed"], row["message"][:300])
        for check in row.get("proof", {}).get("checks", ()):
            if not check["ok"]:
                tensors = [(one["tensor"], one["factor"], one["relative"]) for one in check["differences"][:3]]
                print(row["seed"], row["proof"]["compared"], check["name"], check["detail"], tensors)
                print("    right with", row["proof"]["nearest_right"], "; reads", row["proof"]["settings"])
        for text in row.get("proof", {}).get("not_covered", ()):
            if text.startswith(("resume", "reshard")):
                print(row["seed"], text[:300])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--count", type=int, default=200, help="number of recipes to prove")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--part", help="prove only recipes that extend this part")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    if options.report:
        report(options.results)
    else:
        prove_more(options.results, options.first, options.count, options.part)


def prove_more(results_file: Path, first: int, most: int, part: str | None) -> None:
    """Prove recipes of the seeds from `first` on, until `most` of them have passed `check`.

    If `part` is given, recipes that do not extend it are skipped.
    """
    known = set()
    if results_file.exists():
        known = {json.loads(line)["seed"] for line in results_file.read_text(encoding="utf-8").splitlines()}
    seed, count = first, 0
    with tempfile.TemporaryDirectory() as folder, Servers() as servers, results_file.open("a") as results:
        while count < most:
            if seed not in known and (part is None or part in drawn(seed, 0)["extends"]):
                answer = proven(seed, Path(folder), servers)
                results.write(json.dumps(answer) + "\n")
                results.flush()
                count += answer["verdict"] != "check"
                print(seed, answer["verdict"], answer.get("message", "")[:150], flush=True)
            seed += 1


if __name__ == "__main__":
    main()
