"""Rehearse every recipe of the pack: rehearse_pack.py RESULTS.jsonl [--megatron 0.19] [--only WORD] [--jobs 2]

Writes one JSON object per recipe and Megatron version to RESULTS.jsonl, and skips those that it already has. With
`--bridge`, the recipes are Megatron-Bridge's pre-training recipes of its newest release.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fp8launch.diagnostics import UserError
from fp8launch.job.prepared import prepare
from fp8launch.plugins.bridge import index
from rehearsal_runs import PREPARING, checked, close_servers, one

TOP = Path(__file__).resolve().parents[1]
# The release of Transformer Engine that each Megatron was published with (containers/images.yaml), the newest else.
ENGINES = {"0.17": "2.14", "0.18": "2.16", "0.19": "2.20"}


def whole_recipes() -> list[Path]:
    """Recipes with a name of their own that are not only parts."""
    return [*sorted((TOP / "recipes").glob("*.yaml")), *sorted((TOP / "recipes/studies").rglob("*.yaml"))]


def of_bridge() -> list[str]:
    """Return the names of Bridge's performance recipes for pre-training, as users write them."""
    return [f"bridge:{recipe.name}" for recipe in index.select() if recipe.task == "pretrain" and not recipe.library]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--megatron", action="append", help="versions (default: what each recipe says)")
    parser.add_argument("--only", help="recipes whose name contains this")
    parser.add_argument("--bridge", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--roles", type=int, default=9)
    options = parser.parse_args()
    known = set()
    if options.results.exists():
        known = {(r["recipe"], r["megatron"]) for r in map(json.loads, options.results.read_text().splitlines())}
    with options.results.open("a") as file, ThreadPoolExecutor(options.jobs) as pool:

        def do(task: tuple[str, str | None]) -> None:
            name, version = task
            answer: dict[str, Any] = {"recipe": name, "megatron": version}
            overrides = []
            if version is not None:
                # Quoted: a version is text.
                overrides = [f"software.megatron='{version}'", f"software.transformer_engine='{ENGINES[version]}'"]
            try:
                with PREPARING:
                    run = prepare(name if options.bridge else str(TOP / "recipes" / name), overrides)
                    codes = checked([run])[0]
                answer |= {"verdict": "check", "message": codes} if codes else one(run, options.roles)
            except UserError as exc:
                answer |= {"verdict": "check", "message": str(exc)[:300]}
            except Exception as exc:
                answer |= {"verdict": "error", "message": repr(exc)[:500]}
            file.write(json.dumps(answer) + "\n")
            file.flush()
            line = [answer["verdict"], name, version, answer.get("processor_seconds"), answer.get("memory_mib"),
                    str(answer.get("message", ""))[:200], answer.get("at", "")]  # fmt: skip
            print(*line, flush=True)

        names = of_bridge() if options.bridge else [str(path.relative_to(TOP / "recipes")) for path in whole_recipes()]
        tasks = []
        for version in options.megatron or [None]:
            for name in names:
                if (name, version) not in known and (not options.only or options.only in name):
                    tasks.append((name, version))
        list(pool.map(do, tasks))
    close_servers()


if __name__ == "__main__":
    main()
