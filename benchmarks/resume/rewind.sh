#!/bin/bash
# Do `health.actions` work with FP8 state? On a host with one GPU: rewind.sh
#
# Three runs with delayed scaling, whose loss is NaN or zero from step 7 on: two go back to their checkpoint of step 4 and
# skip the batches, without and with FP8 parameter gather; one stops. SITE, PACK and OUT as for ../h200/run.sh. Losses,
# gradient norms and the report of `parse` go to OUT/NAME.txt.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../.." && pwd)
out=${OUT:-rewind-results}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
. "$top/benchmarks/h200/setup.sh"

broken() { # NAME KIND,FIRST,LAST ACTIONS OPTIONS...
    local name=$1 breaks=$2 actions=$3 run
    shift 3
    export FP8LAUNCH_RUNS=$work/runs/$name
    mkdir -p "$FP8LAUNCH_RUNS"
    timeout 280 python3 -m fp8launch submit "$here/delayed.yaml" --set "name=$name" --backend local --yes --wait \
        --set train.iterations=16 --set survive.attempts=3 --set "launch.script=$top/tests/broken_loss.py" \
        --set "env.BREAKS=$breaks" --set "health.actions=$actions" "$@" > "$work/$name.out" 2>&1
    run=$(ls -d "$FP8LAUNCH_RUNS"/*/)
    {
        for log in "$run"logs/*.log; do
            echo "== $(basename "$log")"
            sed -n 's/.* iteration *\([0-9]*\)\/.*lm loss: \([^ ]*\).*grad norm: \([^ ]*\).*/\1 \2 \3/p' "$log"
        done
        ls "${run}ck"
        python3 -m fp8launch parse "$run"
    } > "$out/$name.txt" 2>&1
}

broken rewound nan,7,7 '{nan: {rewind: 1}}' &
broken gathered nan,7,7 '{nan: {rewind: 1}}' --set precision.param_gather=true &
broken stopped zero,7,16 '{zero-grad-norm: stop}' &
wait
head -n 40 "$out"/{rewound,gathered,stopped}.txt
