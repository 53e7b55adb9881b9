#!/bin/bash
# Tune a recipe on the GPUs of this machine: tune.sh RECIPE [tune options], such as --numerics allow --minutes 9
#
#   OUT        where results go (default ./h200-tune): tune.txt (the table), tune.log, result.json, state.json, tune.png,
#              tuned.yaml, host.txt, runs.tar.xz (the study with every run folder)
#   RUNS       folder of the runs (default a temporary one); with the same folder a second call goes on
#   SITE, PACK as for run.sh
set -uo pipefail
[ $# -ge 1 ] || { sed -n '2,7p' "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../.." && pwd)
out=${OUT:-h200-tune}
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
. "$here/setup.sh"
export FP8LAUNCH_RUNS=${RUNS:-$work/runs}
mkdir -p "$FP8LAUNCH_RUNS"
export PYTHONPATH=$work/flash3:$PYTHONPATH
{ host_facts; echo "tune $*"; } > "$out/host.txt" 2>&1

rm -f "$out/tuned.yaml"
python3 -m fp8launch tune "$@" --backend local --yes --write "$out/tuned.yaml" \
    > "$out/tune.txt" 2> >(tee "$out/tune.log" >&2)
status=$?
cat "$out/tune.txt"
newest=$(ls -td "$FP8LAUNCH_RUNS"/*/tune 2>/dev/null | head -1)
[ -n "$newest" ] && cp "$newest"/{state.json,result.json,tune.png} "$out/" 2>/dev/null
tar -C "$FP8LAUNCH_RUNS" --exclude=code --exclude=checkpoints --exclude=cache -cJf "$out/runs.tar.xz" .
exit "$status"
