#!/bin/bash
# Keep a sitting: collect.sh RESULTS FOLDER puts what run.sh left into a folder to be committed, without machine paths.
#
# One NAME.log a run, NAME.tensors.jsonl where statistics of tensors were measured, every comparison as .md, and host.txt,
# summary.txt, parse.jsonl, verify.jsonl and compare.json as they were. Afterwards: memory.py.
set -euo pipefail
[ $# = 2 ] || { echo "usage: collect.sh RESULTS FOLDER" >&2; exit 2; }
results=$1 folder=$2
mkdir -p "$folder"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tar -C "$work" -xJf "$results/runs.tar.xz"
for run in "$work"/*/*/; do
    name=$(basename "$(dirname "$run")")
    cat "$run"logs/*.log > "$folder/$name.log" 2>/dev/null || echo "collect.sh: $name has no log" >&2
    [ ! -d "${run}tensor_stats" ] || cat "${run}tensor_stats"/rank*.jsonl > "$folder/$name.tensors.jsonl"
done
for file in "$results"/{host.txt,summary.txt,parse.jsonl,verify.jsonl,compare.md,compare.json} "$work"/*.compare.md; do
    [ ! -f "$file" ] || cp "$file" "$folder/"
done
# Where the checkout and the temporary folder were says nothing to a reader.
checkout=$(sed -n 's/^lists\{0,1\} \(.*\)\/benchmarks\/h200\/lists\/.*/\1/p' "$results/host.txt" | head -1)
find "$folder" -maxdepth 1 -type f -exec sed -i -E \
    "s#/tmp/tmp\.[A-Za-z0-9]+/#/#g; s#/[^ \"']*/site-packages/#/site-packages/#g${checkout:+; s#$checkout#/checkout#g}" {} +
du -sh "$folder"
