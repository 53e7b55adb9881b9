#!/bin/bash
# What the GPUs say to runs that a rehearsal let pass or refused: rehearsed.sh [SECONDS]
#
# Runs the list LIST (default `rehearsed`) with run.sh, six runs beside each other on each GPU, and adds to its results (OUT, by default
# ./h200-rehearsed) endings.txt: a line for each run with its exit status and its last error.
# PACK or SITE as for run.sh. The list and its recipes come from tools/rehearse_random.py.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export OUT=${OUT:-h200-rehearsed} SHARE=${SHARE:-6} EACH=${EACH:-200} NEED=${NEED:-60}
"$here/run.sh" "${LIST:-rehearsed}" "${1:-570}"
unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
tar -C "$unpacked" -xJf "$OUT/runs.tar.xz"
: > "$OUT/endings.txt"
while read -r name status; do
    name=${name%:}
    cat "$unpacked/$name"/*/logs/*.log > "$unpacked/$name.log" 2>/dev/null
    error=$(grep -ahoE '([A-Za-z_.]+(Error|Exception)|Assertion failed)\b.*' "$unpacked/$name.log" |
        grep -avE 'ChildFailedError|SignalException|DistBackendError|DistNetworkError|\($' | head -1)
    iterations=$(grep -acE 'iteration +[0-9]+/' "$unpacked/$name.log")
    echo "$name: $status; $iterations iterations; ${error:-no error}" >> "$OUT/endings.txt"
done < <(grep -E '^[^ ]+: (exit|skipped)' "$OUT/summary.txt")
cat "$OUT/endings.txt"
