"""Rehearse random recipes from the pack's parts that pass `check`.

    rehearse_random.py RESULTS.jsonl --count 200 [--first 0] [--jobs 2] [--roles 2]
    rehearse_random.py RESULTS.jsonl --gpus 2 --count 200
    rehearse_random.py RESULTS.jsonl --report
    rehearse_random.py RESULTS.jsonl --select benchmarks/h200

Writes one JSON object per seed to RESULTS.jsonl: the recipe, the result of `check`, and the result of the rehearsal.
Skips seeds that the file already has. `--gpus` draws small runs for one or two H200, without a network. `--report`
prints counts.
"""

from __future__ import annotations

import argparse
import json
import lzma
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

from fp8launch.check.resolved_run import resolve_run
from fp8launch.diagnostics import UserError
from fp8launch.job.prepared import prepare
from fp8launch.plugins.estimate.fit import run_estimate
from random_recipes import drawn
from rehearsal_runs import PREPARING, checked, close_servers, imports, one

BATCH = 720
# Every Nth recipe is rehearsed in the requested number of roles, the others only in the first.
ALL_ROLES = 4
# Estimated GiB of a run, because six share an H200, and features that none of its hosts has.
MOST_GIB = 20
NOT_CARRIED = {"DeepEP's kernels", "HybridEP's kernels", "Muon's iterations"}


def examine(seeds: Sequence[int], gpus: int, roles: int, write: Callable[[dict[str, Any]], None]) -> None:
    """Check these seeds' recipes at once, and rehearse those that pass."""
    answers, runs = [], []
    with PREPARING, tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            recipe = drawn(seed, gpus)
            answer: dict[str, Any] = {"seed": seed, "recipe": recipe, "verdict": "check", "codes": ["recipe"]}
            answers.append(answer)
            path = Path(folder) / f"{seed}.yaml"
            path.write_text(yaml.safe_dump(recipe))
            try:
                runs.append((answer, prepare(str(path))))
            except UserError as exc:
                answer["message"] = str(exc)[:200]
        found = checked([run for _, run in runs])
    passed = []
    for (answer, run), codes in zip(runs, found, strict=True):
        answer["codes"] = codes
        if not codes:
            passed.append((answer, run))
    for answer in answers:
        if answer["codes"]:
            write(answer)
    # One import serves the runs of the same software, GPU and variables.
    passed.sort(key=lambda each: imports(each[1]))
    for answer, run in passed:
        answer |= one(run, roles if answer["seed"] % ALL_ROLES == 0 else 1)
        print(answer["verdict"], answer["seed"], answer.get("processor_seconds"), answer.get("message", "")[:150],
              answer.get("at", ""), flush=True)  # fmt: skip
        write(answer)


def needed_gib(recipe: Path) -> float:
    """Return the estimated memory of a run on its GPU, or infinity if there is no estimate."""
    found = [run_estimate(resolve_run(part)) for part in prepare(str(recipe)).parts]
    return max((each.total / 2**30 if each else float("inf")) for each in found)


def report(results: Path) -> None:
    """Print counts of results, with refusals by message."""
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    print(Counter(row["verdict"] for row in rows))
    print("check:", Counter(code for row in rows for code in row.get("codes", [])[:1]).most_common(30))
    kinds: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        if row["verdict"] in ("refused", "unknown", "error"):
            kinds.setdefault((row["verdict"], f"{row.get('message', '')[:300]} ({row.get('at')})"), []).append(
                row["seed"]
            )
    for (verdict, sentence), seeds in sorted(kinds.items(), key=lambda item: -len(item[1])):
        print(len(seeds), verdict, sentence, seeds[:6])


def select(results: Path, top: Path, counts: tuple[int, int], without: Sequence[str], name: str) -> None:
    """Write recipes and the list `name` for benchmarks/h200/run.sh: the passed ones that differ most from each other
    and from those that are there, and refused ones of as many sentences as there are. `without` are seeds, or parts of
    sentences that are known.
    """
    folder = top / "recipes" / "rehearsed"
    archive = folder.with_suffix(".tar.xz")
    if archive.is_file():
        with tarfile.open(archive) as packed:
            packed.extractall(folder.parent, filter="data")
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for row in map(json.loads, results.read_text().splitlines()) if str(row["seed"]) not in without]
    there = [yaml.safe_load(path.read_text()) for path in folder.glob("passed_*.yaml")]
    passed = [row for row in rows if row["verdict"] == "passed" and on_hosts(row)]
    chosen = unlike(passed, there, counts[0], folder)
    refused = refusals([row for row in rows if row["verdict"] == "refused"], without, counts[1], folder)
    # Of a list that is not run to its end both kinds have run.
    every = max(1, len(chosen) // max(len(refused), 1))
    ordered = [row for at, row in enumerate(chosen) for row in ([row, *refused[at // every : at // every + 1]]
                if at % every == every - 1 else [row])]  # fmt: skip
    ordered += [row for row in refused if row not in ordered]
    head = "# Drawn and chosen by tools/rehearse_random.py, of what a rehearsal let pass and of what it refused."
    (top / "lists" / f"{name}.txt").write_text("\n".join([head, *map(line_of, ordered)]) + "\n")
    with lzma.open(archive, "wb", preset=9 | lzma.PRESET_EXTREME) as out, tarfile.open(fileobj=out, mode="w") as packed:
        packed.add(folder, folder.name)
    print(len(chosen), "passed,", len(refused), "refused")


def on_hosts(row: Mapping[str, Any]) -> bool:
    """Whether the hosts have the packages of a recipe: of FlashAttention the third alone, which has no dropout."""
    flags, model = row["recipe"]["megatron"], row["recipe"].get("model", {})
    dropout = flags.get("attention_backend") == "flash" and model.get("attention_dropout")
    emerging = flags.get("optimizer", "adam") not in ("adam", "sgd")
    return not (dropout or emerging or NOT_CARRIED & set(row.get("not_rehearsed", ())))


def unlike(rows: Sequence[Any], there: Sequence[Any], most: int, folder: Path) -> list[dict[str, Any]]:
    """Write those of these rows whose features occur least, also among recipes that are there."""
    seen = Counter(feature for recipe in there for feature in features(recipe))
    waiting = list(rows)
    chosen: list[dict[str, Any]] = []
    while waiting and len(chosen) < most:
        best = max(waiting, key=lambda row: sum(1 / (1 + 2 * seen[feature]) for feature in features(row["recipe"])))
        waiting.remove(best)
        if written_small(best, folder):
            chosen.append(best)
            seen.update(features(best["recipe"]))
    return chosen


def refusals(rows: Sequence[Any], without: Sequence[str], most: int, folder: Path) -> list[dict[str, Any]]:
    """Write at most so many refused rows, of each sentence and place one before the second of any."""
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        said = row.get("message", "")
        if not any(part in said for part in without):
            kinds.setdefault((said[:40], row["at"]), []).append(row)
    turns = [row for turn in zip_longest(*kinds.values()) for row in turn if row is not None]
    chosen: list[dict[str, Any]] = []
    for row in turns:
        if len(chosen) < most and written_small(row, folder):
            chosen.append(row)
    return chosen


def written_small(row: Mapping[str, Any], folder: Path) -> bool:
    """Write the row's recipe; not one that needs so much memory that six of them do not share a GPU."""
    recipe = {"extends": row["recipe"]["extends"], **row["recipe"], "name": f"{row['verdict']}_{row['seed']}"}
    said = "trains"
    if row["verdict"] == "refused":
        said = f"{row['exception']}: {row['message'][:300]} ({row['at']})"
    text = yaml.safe_dump(recipe, sort_keys=False, width=110, default_flow_style=None)
    path = folder / f"{recipe['name']}.yaml"
    path.write_text(f"# Seed {row['seed']}. Rehearsal: {said}\n{text}")
    if needed_gib(path) <= MOST_GIB:
        return True
    path.unlink()
    return False


def line_of(row: Mapping[str, Any]) -> str:
    """The line of a list for run.sh."""
    name = f"{row['verdict']}_{row['seed']}"
    backend = row["recipe"]["megatron"].get("attention_backend")
    # run.sh gives FlashAttention to the lines that name it.
    option = " --set megatron.attention_backend=flash" if backend == "flash" else ""
    return f"{row['recipe']['resources']['gpus_per_node']} {name} rehearsed/{name}{option}"


def features(recipe: Mapping[str, Any]) -> list[str]:
    """What distinguishes a recipe from others: its parts, layout and flags."""
    found = [str(part) for part in recipe["extends"]]
    for section in ("parallel", "megatron", "precision", "model"):
        found += [f"{section}.{name}={value}" for name, value in recipe.get(section, {}).items()]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--count", type=int, default=100, help="seeds to look at")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--roles", type=int, default=2, help="roles of each run, first and last first")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=0, help="draw small runs for so many H200")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--select", type=Path, help="write passed and refused recipes here (benchmarks/h200)")
    parser.add_argument("--counts", type=int, nargs=2, default=(30, 10), metavar=("PASSED", "REFUSED"))
    parser.add_argument("--list", default="rehearsed", help="name of the list that --select writes")
    parser.add_argument("--without", nargs="*", default=[], help="seeds, or parts of sentences, not to select")
    options = parser.parse_args()
    if options.select:
        select(options.results, options.select, tuple(options.counts), options.without, options.list)
        return
    if options.report:
        report(options.results)
        return
    known = set()
    if options.results.exists():
        known = {json.loads(line)["seed"] for line in options.results.read_text().splitlines()}
    seeds = [seed for seed in range(options.first, options.first + options.count) if seed not in known]
    batches = [seeds[start : start + BATCH] for start in range(0, len(seeds), BATCH)]
    with options.results.open("a") as file, ThreadPoolExecutor(options.jobs) as pool:

        def write(answer: dict[str, Any]) -> None:
            file.write(json.dumps(answer) + "\n")
            file.flush()

        def do(batch: Sequence[int]) -> None:
            try:
                examine(batch, options.gpus, options.roles, write)
            except Exception as exc:
                print("error", batch, repr(exc)[:500], flush=True)

        list(pool.map(do, batches))
    close_servers()


if __name__ == "__main__":
    main()
