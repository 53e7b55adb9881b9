#!/bin/bash
# Does a run with delayed scaling go on as the same run? On a host with one or two GPUs: run.sh
#
# Eight steps in one go, against a run whose rank is killed after its checkpoint of step 4 and that the launcher
# resumes: by its supervisor without parameter gather, by `fp8launch resume` with it. Then two changes of precision.
# SITE, PACK and OUT as for ../h200/run.sh. Losses and gradient norms go to OUT/resume.txt.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../.." && pwd)
out=${OUT:-resume-results}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
. "$top/benchmarks/h200/setup.sh"
last=$(($(nvidia-smi -L | wc -l) - 1))

submit() { # NAME GPU OPTIONS...
    local name=$1 gpu=$2
    shift 2
    mkdir -p "$work/runs/$name"
    FP8LAUNCH_RUNS=$work/runs/$name CUDA_VISIBLE_DEVICES=$gpu timeout 250 python3 -m fp8launch submit \
        "$here/delayed.yaml" --set "name=$name" --backend local --yes "$@" > "$work/$name.out" 2>&1
    echo "$name: submit ended with $?"
}

losses() { # NAME: iteration, loss and gradient norm, as Megatron printed them
    grep -h ' iteration .*lm loss' "$work/runs/$1"/*/logs/*.log |
        sed 's/.*iteration *\([0-9]*\)\/.*lm loss: \([^ ]*\).*grad norm: \([^ ]*\).*/\1 \2 \3/'
}

killed_and_resumed() { # NAME GPU OPTIONS...
    local name=$1 gpu=$2 run
    shift 2
    submit "${name}_whole" "$gpu" --wait "$@"
    submit "${name}_killed" "$gpu" "$@"
    run=$(ls -d "$work/runs/${name}_killed"/*/)
    for _ in $(seq 600); do [ -s "$run/ck/latest_checkpointed_iteration.txt" ] && break; sleep 0.2; done
    pkill -KILL -f "${name}_killed-.*rank/worker.py"
    if [[ "$*" != *survive.attempts* ]]; then
        # Refused until the processes of the first attempt are gone.
        for _ in $(seq 60); do
            FP8LAUNCH_RUNS=$work/runs/${name}_killed CUDA_VISIBLE_DEVICES=$gpu python3 -m fp8launch resume "$run" &&
                break
            sleep 1
        done
    fi
    for _ in $(seq 120); do [ "$(cat "$run/ck/latest_checkpointed_iteration.txt")" = 8 ] && break; sleep 1; done
    sleep 5
    { echo "== $name, whole"; losses "${name}_whole"; echo "== $name, killed"; losses "${name}_killed"; } |
        tee -a "$out/resume.txt"
    grep -h 'fp8launch: NVTE' "$run"/logs/*.log
}

phases() { # NAME GPU SECOND OPTIONS...: four steps with delayed scaling, then four with SECOND
    local name=$1 gpu=$2 second=$3
    shift 3
    submit "$name" "$gpu" --wait "$@" --set "phases={first: {iterations: 4}, second: {precision: $second}}"
    { echo "== $name"; losses "$name"; } | tee -a "$out/resume.txt"
}

none='amax_history: null, amax_algo: null'
(
    killed_and_resumed gather 0 --set precision.param_gather=true
    phases to_tensorwise 0 "{recipe: tensorwise, $none}"
) &
(
    killed_and_resumed plain "$last" --set survive.attempts=3
    phases to_bf16 "$last" "{recipe: bf16, format: null, param_gather: false, $none}" \
        --set precision.param_gather=true --set megatron.dist_ckpt_optim_fully_reshardable=true
) &
wait
[ "$last" = 0 ] ||
    killed_and_resumed gather_2gpus 0,1 --set precision.param_gather=true --set resources.gpus_per_node=2
tar -C "$work/runs" --exclude=code --exclude=ck -cJf "$out/runs.tar.xz" .
