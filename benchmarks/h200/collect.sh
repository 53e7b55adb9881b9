#!/bin/bash
# Keep a sitting: collect.sh RESULTS FOLDER puts what run.sh left into a folder to be committed, without machine paths.
#
# One NAME.log a run and the exit status and power of each (summary.txt) go into a folder of the sitting's name in
# logs.tar.xz: one archive for all sittings, in the order of the runs' names, because their logs have most lines in common.
# host.txt goes into FOLDER. Parsed records and comparisons are left out, because the logs make them again. Afterwards:
# memory.py.
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
done
cp "$results/host.txt" "$folder/"
grep -E '^[^ ]+: (exit|skipped)' "$results/summary.txt" > "$folder/summary.txt"
# Where the checkout and the temporary folder were says nothing to a reader.
checkout=$(sed -n 's/^lists\{0,1\} \([^ ]*\)\/benchmarks\/h200\/lists\/.*/\1/p' "$results/host.txt" | head -1)
find "$folder" -maxdepth 1 -type f -exec sed -i -E \
    "s#/tmp/tmp\.[A-Za-z0-9]+/#/#g; s#/[^ \"']*/site-packages/#/site-packages/#g${checkout:+; s#$checkout#/checkout#g}" {} +
(
    cd "$folder"
    shopt -s nullglob
    mkdir -p "$work/sittings/${PWD##*/}"
    [ ! -f ../logs.tar.xz ] || tar -C "$work/sittings" -xJf ../logs.tar.xz
    mv -- *.log summary.txt "$work/sittings/${PWD##*/}/"
    (cd "$work/sittings" && find -- * -type f | awk -F/ '{print $NF "\t" $0}' | sort | cut -f2) > "$work/order"
    tar -C "$work/sittings" --owner=0 --group=0 -c -T "$work/order" |
        xz --lzma2=preset=9e,dict=64MiB,lc=4,pb=0,nice=273 > "$work/logs.tar.xz"
    mv "$work/logs.tar.xz" ../logs.tar.xz
)
du -sh "$folder"
