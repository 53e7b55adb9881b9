#!/bin/bash
# Keep what run.sh left in RESULTS under NAME in logs.tar.xz, without machine paths: collect.sh RESULTS NAME
#
# Kept: one NAME/RUN.log per run, the exit status and power of each run (summary.txt), the host (host.txt), and endings.txt if
# rehearsed.sh wrote it. Parsed records and comparisons are left out, because the logs make them again. Files are ordered by
# their own names, because logs of one recipe have most lines in common. Afterwards: memory.py.
set -euo pipefail
[ $# = 2 ] || { echo "usage: collect.sh RESULTS NAME" >&2; exit 2; }
results=$1 archive=$(cd "$(dirname "$0")" && pwd)/logs.tar.xz
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
folder=$work/all/$2
mkdir -p "$folder" "$work/runs"
[ ! -f "$archive" ] || tar -C "$work/all" -xJf "$archive"
tar -C "$work/runs" -xJf "$results/runs.tar.xz"
for run in "$work"/runs/*/*/; do
    [ -d "$run" ] || continue
    name=$(basename "$(dirname "$run")")
    cat "$run"logs/*.log > "$folder/$name.log" 2>/dev/null || echo "collect.sh: $name has no log" >&2
done
for file in "$work"/runs/*/*.{log,json}; do # of other commands (`run` in a list)
    [ ! -f "$file" ] || cp "$file" "$folder/"
done
cp "$results/host.txt" "$folder/"
[ ! -f "$results/endings.txt" ] || cp "$results/endings.txt" "$folder/"
grep -E '^[^ ]+: (exit|skipped)' "$results/summary.txt" > "$folder/summary.txt"
# Where the checkout and the temporary folder were says nothing to a reader.
checkout=$(sed -n 's/^lists\{0,1\} \([^ ]*\)\/benchmarks\/h200\/lists\/.*/\1/p' "$results/host.txt" | head -1)
find "$folder" -maxdepth 1 -type f -exec sed -i -E \
    "s#/tmp/tmp\.[A-Za-z0-9]+/#/#g; s#/[^ \"']*/site-packages/#/site-packages/#g${checkout:+; s#$checkout#/checkout#g}" {} +
(cd "$work/all" && find -- * -type f | awk -F/ '{print $NF "\t" $0}' | sort | cut -f2) > "$work/order"
tar -C "$work/all" --owner=0 --group=0 -c -T "$work/order" |
    xz --lzma2=preset=9e,dict=64MiB,lc=4,pb=0,nice=273 > "$work/logs.tar.xz"
mv "$work/logs.tar.xz" "$archive"
ls -l "$archive"
