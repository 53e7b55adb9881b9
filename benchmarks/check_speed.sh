#!/bin/bash
# benchmarks/check_speed.sh: time `fp8launch check` for one recipe, for each additional recipe, and for the whole pack.
# Needs hyperfine and `make test`'s virtual environment, and Megatron's wheels in the cache (the first run fetches them).
# Prints a markdown table.
set -euo pipefail
cd "$(dirname "$0")/.."

fp8launch=$PWD/.venv/bin/fp8launch
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The same recipe under twenty names, so that twenty are checked.
for i in $(seq 1 20); do
    printf 'extends: [llama8b_fp8]\nname: copy_%s\n' "$i" >"$work/copy_$i.yaml"
done

# Each check starts without cached verdicts of Megatron's validators, which are kept here.
verdicts=${XDG_CACHE_HOME:-$HOME/.cache}/fp8launch/verdicts
hyperfine --shell=none --prepare "rm -rf $verdicts" --warmup 2 --runs "${RUNS:-15}" --ignore-failure --export-json "$work/times.json" \
    --command-name 'one recipe' "$fp8launch check recipes/llama8b_fp8.yaml" \
    --command-name 'twenty recipes' "$fp8launch check $work" \
    --command-name 'the pack' "$fp8launch check recipes" >&2

nproc | sed 's/$/ cores/'
"$PWD/.venv/bin/python" - "$work/times.json" "$(find recipes -maxdepth 1 -name '*.yaml' | wc -l)" <<'PYTHON'
import json
import sys

times = {result["command"]: result for result in json.load(open(sys.argv[1]))["results"]}
one, twenty, pack = (times[name]["median"] for name in ("one recipe", "twenty recipes", "the pack"))
print("| what | median |\n|---|---|")
print(f"| one recipe, cold | {one:.2f} s |")
print(f"| each further recipe | {(twenty - one) / 19 * 1000:.0f} ms |")
print(f"| the pack ({sys.argv[2]} recipes) | {pack:.2f} s |")
PYTHON
