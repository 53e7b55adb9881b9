#!/bin/bash
# Run a list of recipes on the GPUs of this machine and bring their logs and numbers back: run.sh LIST [SECONDS]
#
# LIST is a name in lists/ or a file, or several with commas between. Each line is one run, `GPUS NAME RECIPE [submit
# options]`, where RECIPE is a file or a name in recipes/. In the options {here} is this folder, {runs} the folder of the line's
# results, {data} is DATA, and {text} a dataset made of this machine's Python library by tools/text_dataset.py. GPUS is how many it takes; lines that fit beside
# each other run at once (their numbers are then good for evidence, not for speed), unless SERIAL=1. A run that takes more than EACH
# seconds (default 150), or past SECONDS (default 540), is ended, and none starts with less than NEED seconds left (default
# EACH). A line `GPUS NAME run COMMAND...` runs any other command, and `compare TITLE NAME...` compares runs at the end.
#
#   OUT    where results go (default ./h200-results): runs.tar.xz with every run folder, parse.jsonl, verify.jsonl,
#          compare.json, compare.md, summary.txt, host.txt, submit.log; in runs.tar.xz also TITLE.compare.json and .md
#   SITE   an unpacked site folder with Transformer Engine, megatron-core and pydantic; or
#   PACK   the folder that pack.sh made, which is unpacked into a temporary one
#          (megatron-bridge-*.tar.xz in it is unpacked beside megatron-core, for recipes `bridge:NAME`)
#          (flash3.tar.xz in it is FlashAttention 3, which only runs with attention_backend flash get)
#   AO     an unpacked torchao for the peers; PACK may hold it as torchao-*.tar.xz with a folder ao/
#   SHARE  how many runs of one GPU share it (default 1): small ones that leave it idle, and whose speed does not matter
#   TOGETHER  1: ranks of a line that needs more GPUs than there are share one, for what such a run says, never for its speed
#   DATA   the prefix of a dataset, for {data} in a list
#   BARE   1: no reports at the end, only runs.tar.xz, from which they can be made elsewhere
#   SET    submit options for every run, such as "--set launch.profile_iteration=6"
set -uo pipefail
[ $# -ge 1 ] || { sed -n '2,25p' "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../.." && pwd)
limit=${2:-540} each=${EACH:-150}
need_s=${NEED:-$each}
lists=()
# Random recipes, drawn to compare rehearsals with GPUs, and their lists share one archive.
[ -d "$here/recipes/rehearsed" ] || tar -C "$here/recipes" -xJf "$here/recipes/rehearsed.tar.xz"
for name in ${1//,/ }; do
    for list in "$name" "$here/lists/$name.txt" "$here/recipes/rehearsed/$name.txt" ""; do
        [ ! -f "$list" ] || break
    done
    [ -n "$list" ] || { echo "run.sh: no list $name in $here/lists" >&2; exit 2; }
    lists+=("$list")
done
out=${OUT:-h200-results}
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
list=$work/list
cat "${lists[@]}" > "$list"

. "$here/setup.sh"
export FP8LAUNCH_RUNS=$work/runs
mkdir -p "$FP8LAUNCH_RUNS"
fp() { python3 -m fp8launch "$@"; }

{
    host_facts
    echo "lists ${lists[*]}, limit $limit s, options: ${SET:-none}"
} > "$out/host.txt" 2>&1

gpus=${GPUS:-$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')}
free=($(for _ in $(seq "${SHARE:-1}"); do seq 0 $((gpus - 1)); done))
declare -A taken=()
: > "$out/submit.log"
: > "$out/summary.txt"

sample_power() { # GPU-IDS: power (W) and SM clock (MHz) of these GPUs, twice a second, until it is killed
    exec nvidia-smi --id="$1" --query-gpu=power.draw,clocks.sm --format=csv,noheader,nounits --loop-ms=500 2> /dev/null
}

busy_power() { # FILE: medians of the samples of busy GPUs, above 300 W
    python3 - "$1" << 'PY'
import statistics, sys
rows = [line.split(",") for line in open(sys.argv[1]) if line.count(",") == 1 and "[" not in line]
busy = [(float(watts), float(clock)) for watts, clock in rows if float(watts) > 300]
if busy:
    watts, clocks = map(statistics.median, zip(*busy))
    print(f", {watts:.0f} W at {clocks:.0f} MHz (medians of {len(busy)} samples above 300 W)")
PY
}

one() { # NAME GPU-IDS RECIPE OPTIONS...: one run, in its own run root so that runs at once do not mix
    local name=$1 ids=$2 recipe=$3 began=$SECONDS most=$((limit - SECONDS < each ? limit - SECONDS : each))
    shift 3
    export FP8LAUNCH_RUNS=$work/runs/$name
    mkdir -p "$FP8LAUNCH_RUNS"
    [ -z "$together" ] || export PYTHONPATH=$here/one_gpu:$PYTHONPATH
    if [[ "$*" = *attention_backend=flash* ]] || grep -qs 'attention_backend: flash' "$recipe"; then
        export PYTHONPATH=$work/flash3:$PYTHONPATH
    fi
    sample_power "$ids" > "$work/$name.power" &
    local sampler=$!
    local command=(python3 -m fp8launch submit "$recipe" --backend local --wait --yes ${SET:-} "$@")
    if [ "$recipe" = run ]; then
        command=("$@")
        # torchtitan and torchao without the packages beside Transformer Engine.
        export PYTHONPATH=$work/titan:${AO:-}:$top/launchers TORCHINDUCTOR_CACHE_DIR=$work/inductor
    fi
    CUDA_VISIBLE_DEVICES=$ids timeout --signal=TERM --kill-after=15 "$most" "${command[@]}" > "$work/$name.out" 2>&1
    local status=$?
    [ "$recipe" != run ] || cp "$work/$name.out" "$FP8LAUNCH_RUNS/$name.log"
    kill "$sampler" 2> /dev/null
    # A submission that ran out of time leaves its processes: end what it started, by its folder (`latest` may be another's).
    local folder
    folder=$(ls -td "$FP8LAUNCH_RUNS"/*/ 2>/dev/null | head -1)
    [ "$status" = 0 ] || [ ! -f "${folder}manifest.json" ] ||
        python3 -m fp8launch cancel "${folder%/}" >> "$work/$name.out" 2>&1
    echo "$name: exit $status after $((SECONDS - began)) s$(busy_power "$work/$name.power")" | tee -a "$out/summary.txt"
    { echo "== $name"; cat "$work/$name.out"; } >> "$out/submit.log"
}

reap() { # wait for one run and take its GPUs back
    local pid=
    wait -n -p pid
    [ -n "$pid" ] && free+=(${taken[$pid]//,/ }) && unset "taken[$pid]"
}

if grep -q '^[^#].*{text}' "$list"; then
    python3 "$top/tools/text_dataset.py" "$work/text" >> "$out/host.txt" || exit 3
fi

declare -A titles=()
while read -r need name recipe options <&3; do
    [[ -z "$need" || "$need" == \#* ]] && continue
    [ "$need" = compare ] && { titles[$name]="$recipe $options"; continue; }
    together=
    [ -z "${TOGETHER:-}" ] || [ "$need" -le "$gpus" ] || { together=1 need=1; }
    [ "$need" -le "$gpus" ] || { echo "$name: skipped, needs $need GPUs of $gpus" | tee -a "$out/summary.txt"; continue; }
    while [ "${#free[@]}" -lt "$need" ] || { [ -n "${SERIAL:-}" ] && [ "${#taken[@]}" -gt 0 ]; }; do reap; done
    if [ $((SECONDS + need_s)) -gt "$limit" ]; then
        echo "$name: skipped, no time left" | tee -a "$out/summary.txt"
        continue
    fi
    ids=$(IFS=,; echo "${free[*]:0:need}")
    free=("${free[@]:need}")
    [ -f "$recipe" ] || [[ "$recipe" == *:* || "$recipe" = run ]] || recipe=$here/recipes/$recipe.yaml
    options=${options//\{here\}/$here}
    options=${options//\{runs\}/$work/runs/$name}
    options=${options//\{data\}/${DATA:-}}
    one "$name" "$ids" "$recipe" ${options//\{text\}/$work/text} &
    taken[$!]=$ids
done 3< "$list"
while [ "${#taken[@]}" -gt 0 ]; do reap; done

: > "$out/parse.jsonl"
: > "$out/verify.jsonl"
folders=()
for root in "$work"/runs/*/; do
    [ -z "${BARE:-}" ] || break
    run=$(ls -td "$root"*/ 2>/dev/null | head -1)
    [ -f "${run}manifest.json" ] || continue
    folders+=("$run")
    name=$(basename "$root")
    for verb in parse verify; do
        fp $verb "$run" --json 2> "$work/err" | python3 -c '
import json, sys
text = sys.stdin.read()
print(json.dumps({"name": sys.argv[1], **(json.loads(text) if text.strip() else {"error": open(sys.argv[2]).read()})}))
' "$name" "$work/err" >> "$out/$verb.jsonl"
    done
    { echo "== $name"; fp verify "$run"; fp parse "$run" | head -12; } >> "$out/summary.txt" 2>&1
done
for title in "${!titles[@]}"; do
    these=()
    for name in ${titles[$title]}; do
        run=$(ls -td "$work/runs/$name"/*/ 2>/dev/null | head -1)
        [ -f "${run}manifest.json" ] && these+=("$run")
    done
    [ "${#these[@]}" -gt 1 ] || { echo "$title: fewer than two runs to compare" | tee -a "$out/summary.txt"; continue; }
    made=$work/runs/$title.compare
    fp compare "${these[@]}" --force --md "$made.md" --json > "$made.json" 2>> "$out/submit.log"
    { echo "== $title"; cat "$made.md"; } >> "$out/summary.txt" 2>&1
done
if [ "${#folders[@]}" -gt 0 ]; then
    fp compare "${folders[@]}" --force --md "$out/compare.md" --json > "$out/compare.json" 2>> "$out/submit.log"
fi
# Every log and manifest; checkpoints, data indices and the copied code stay behind.
tar -C "$work/runs" --exclude=code --exclude=checkpoints --exclude=cache -cJf "$out/runs.tar.xz" .
cat "$out/summary.txt"
