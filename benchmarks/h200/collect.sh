#!/bin/bash
# Keep a sitting: collect.sh RESULTS FOLDER puts what run.sh left into a folder to be committed, without machine paths.
#
# One NAME.log a run, NAME.tensors.jsonl where statistics of tensors were measured, and summary.txt go into a folder of
# the sitting's name in logs.tar.xz, with every comparison as .md: one archive for all sittings, because their logs have most
# lines in common. host.txt goes into FOLDER. Parsed records are left out, because the logs make them again. Afterwards: memory.py.
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
for file in "$results"/{host.txt,summary.txt,compare.md} "$work"/*.compare.md; do
    [ ! -f "$file" ] || cp "$file" "$folder/"
done
# Where the checkout and the temporary folder were says nothing to a reader.
checkout=$(sed -n 's/^lists\{0,1\} \(.*\)\/benchmarks\/h200\/lists\/.*/\1/p' "$results/host.txt" | head -1)
find "$folder" -maxdepth 1 -type f -exec sed -i -E \
    "s#/tmp/tmp\.[A-Za-z0-9]+/#/#g; s#/[^ \"']*/site-packages/#/site-packages/#g${checkout:+; s#$checkout#/checkout#g}" {} +
(
    cd "$folder"
    shopt -s nullglob
    mkdir -p "$work/sittings/${PWD##*/}"
    [ ! -f ../logs.tar.xz ] || tar -C "$work/sittings" -xJf ../logs.tar.xz
    mv -- *.log *.tensors.jsonl *compare.md summary.txt "$work/sittings/${PWD##*/}/"
    tar -C "$work/sittings" --sort=name --owner=0 --group=0 -c . --transform 's#^\./##' |
        xz -9e --lzma2=preset=9e,dict=64MiB > "$work/logs.tar.xz"
    mv "$work/logs.tar.xz" ../logs.tar.xz
)
du -sh "$folder"
