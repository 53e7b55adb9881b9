#!/bin/bash
# Can this node train? One line, exit 0 or 1: health.sh [OPTIONS]
# All nodes of a Slurm job, from its batch script: health.sh --all-nodes [OPTIONS]
#
# It reads and changes nothing, needs no root, and takes about a second. What a machine cannot tell is named as skipped.
#   --gpus=N      GPUs that must be there (default: SLURM_GPUS_ON_NODE, else any number)
#   --memory=GIB  free host memory (4)       --shm=GIB   size of /dev/shm (1)
#   --tmp=GIB     free space in /tmp (2)     --used=MIB  GPU memory that others may hold (2048)
#   --skew=S      how far clocks may differ (2)
set -uo pipefail
export LC_ALL=C

here=$(readlink -f "$0")
all_nodes='' clock='' gpus=${SLURM_GPUS_ON_NODE:-} memory=4 shm=1 tmp=2 used=2048 skew=2
options=()
for word in "$@"; do
    case $word in
    --all-nodes) all_nodes=yes && continue ;;
    --clock) clock=yes && continue ;;
    --gpus=*) gpus=${word#*=} ;;
    --memory=*) memory=${word#*=} ;;
    --shm=*) shm=${word#*=} ;;
    --tmp=*) tmp=${word#*=} ;;
    --used=*) used=${word#*=} ;;
    --skew=*) skew=${word#*=} ;;
    *) echo "health.sh: unknown option $word" >&2 && exit 2 ;;
    esac
    if [[ ! ${word#*=} =~ ^[0-9]+$ ]]; then
        echo "health.sh: $word: needs a whole number" >&2
        exit 2
    fi
    options+=("$word")
done

bad=() skipped=()

# A sick GPU can hang nvidia-smi for ever.
smi() { timeout 10 nvidia-smi "$@" 2>/dev/null; }

# below NAME HAS LEAST: HAS in KiB, LEAST in GiB
below() {
    if [ -z "$2" ]; then
        skipped+=("$1")
    elif [ "$2" -lt $(($3 * 1024 * 1024)) ]; then
        bad+=("$1: $(awk -v kib="$2" 'BEGIN { printf "%.1f", kib / 1024 / 1024 }') GiB, wants $3")
    fi
}

check_host() {
    below "free memory" "$(awk '$1 == "MemAvailable:" { print $2 }' /proc/meminfo 2>/dev/null)" "$memory"
    below "/dev/shm" "$(df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 { print $2 }')" "$shm"
    below "free space in /tmp" "$(df -Pk /tmp 2>/dev/null | awk 'NR == 2 { print $4 }')" "$tmp"
}

# ask_gpus NAMES... : "index, value, ..." a line for each GPU; drivers differ in the names that they know.
ask_gpus() {
    local IFS=,
    smi --query-gpu="index,$*" --format=csv,noheader,nounits
}

check_gpus() {
    local found index value values
    if ! command -v nvidia-smi >/dev/null; then
        skipped+=("GPUs (no nvidia-smi)")
        return
    fi
    if ! found=$(ask_gpus memory.used); then
        bad+=("nvidia-smi fails: ${found:-no answer in 10 s}")
        return
    fi
    if [ -n "$gpus" ] && [ "$(wc -l <<<"$found")" -lt "$gpus" ]; then
        bad+=("$(wc -l <<<"$found") of $gpus GPUs")
    fi
    while IFS=', ' read -r index value; do
        [[ $value =~ ^[0-9]+$ && $value -gt $used ]] && bad+=("GPU $index: $value MiB in use before the job")
    done <<<"$found"

    if found=$(ask_gpus ecc.errors.uncorrected.volatile.total); then
        while IFS=', ' read -r index value; do
            [[ $value =~ ^[1-9] ]] && bad+=("GPU $index: $value uncorrected ECC errors")
        done <<<"$found"
    else
        skipped+=("ECC")
    fi
    value=gpu_bus_id,remapped_rows.pending,remapped_rows.failure
    if found=$(smi --query-remapped-rows=$value --format=csv,noheader); then
        while IFS=', ' read -r index values; do
            [[ $values =~ (Yes|[1-9]) ]] && bad+=("GPU $index: memory rows to remap (pending, failed: $values)")
        done <<<"$found"
    else
        skipped+=("remapped rows")
    fi
    check_clocks
    check_nvlink
}

check_clocks() {
    local reasons=(hw_thermal_slowdown hw_power_brake_slowdown sw_thermal_slowdown) found index values
    # Renamed from throttle to event in newer drivers.
    if found=$(ask_gpus "${reasons[@]/#/clocks_event_reasons.}") ||
        found=$(ask_gpus "${reasons[@]/#/clocks_throttle_reasons.}"); then
        while IFS=', ' read -r index values; do
            [[ ", $values" =~ ,\ Active ]] && bad+=("GPU $index: clocks held down by heat or power")
        done <<<"$found"
    else
        skipped+=("clocks")
    fi
}

check_nvlink() {
    local found index values
    # Only a link that is down beside others that are up is a fault: PCIe cards have none.
    found=$(smi nvlink --status | awk '
        /^GPU/ { gpu = $2; sub(/:.*/, "", gpu) }
        /Link [0-9]+:/ { if (/inactive/) down[gpu]++; else up[gpu]++; any++ }
        END { for (g in down) if (up[g]) print "GPU " g ": " down[g] " of " down[g] + up[g] " NVLinks down"
              if (!any) print "none" }')
    case $found in
    none | "") [ "$found" = none ] && skipped+=("NVLink (none here)") ;;
    *) mapfile -t values <<<"$found" && bad+=("${values[@]}") ;;
    esac
    # Without the fabric manager the links are up, and every CUDA program fails at its start.
    found=$(ask_gpus fabric.state fabric.status) || return
    while IFS=', ' read -r index values; do
        [[ $values =~ (Progress|Not\ Started|Fail|Err|Insuff) ]] && bad+=("GPU $index: NVLink fabric: $values")
    done <<<"$found"
}

# Xids that only a reset, a reboot or an exchange heals; others (13, 31, 43, 45) are a program's own faults.
check_kernel_log() {
    local lines count bus xid
    local heavy='48|62|64|74|79|92|94|95|119|120|140'
    if ! lines=$(dmesg --since -1hour 2>/dev/null); then
        skipped+=("Xid (kernel log not readable)")
        return
    fi
    while read -r count bus xid; do
        bad+=("GPU $bus: Xid $xid ($count times in the last hour)")
    done < <(sed -nE "s/.*NVRM: Xid \(PCI:([^)]*)\): ($heavy),.*/\1 \2/p" <<<"$lines" | sort | uniq -c)
}

join() {
    local text
    printf -v text '%s; ' "$@"
    printf '%s' "${text%; }"
}

one_node() {
    local now name
    now=$(date +%s.%N)
    name=${SLURMD_NODENAME:-$(hostname -s)}
    check_host
    check_gpus
    command -v nvidia-smi >/dev/null && check_kernel_log
    # The time is for the batch host, which compares.
    [ -n "$clock" ] && printf '%s ' "$now"
    if [ ${#bad[@]} -gt 0 ]; then
        printf '%s: bad: %s\n' "$name" "$(join "${bad[@]}")"
        exit 1
    fi
    printf '%s: ok%s\n' "$name" "${skipped[0]+, skipped: $(join "${skipped[@]}")}"
}

all_nodes() {
    local began ended answers name line
    began=$(date +%s.%N)
    # One task a node whatever the job's own layout. A node that fails must not take the others' answers away.
    answers=$(timeout 120 srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 \
        --kill-on-bad-exit=0 --mpi=none bash "$here" --clock "${options[@]}" 2>&1)
    ended=$(date +%s.%N)
    for name in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
        line=$(grep -m 1 -E "^[0-9.]+ $name: " <<<"$answers")
        if [ -z "$line" ]; then
            bad+=("$name: bad: no answer")
        elif [[ $line == *": bad: "* ]]; then
            bad+=("${line#* }")
        else
            # A node's clock that agrees with ours reads a time between the two that were read here.
            awk -v at="${line%% *}" -v began="$began" -v ended="$ended" -v most="$skew" 'BEGIN {
                off = at < began ? at - began : at > ended ? at - ended : 0
                exit off > most || -off > most }' ||
                bad+=("$name: bad: clock differs from the first node's by more than $skew s")
            [[ $line == *", skipped: "* ]] && skipped+=("${line##*, skipped: }")
        fi
    done
    if [ ${#bad[@]} -gt 0 ]; then
        printf '%s\n' "${bad[@]}"
        # What srun itself said of a node without an answer.
        grep -v -E '^[0-9.]+ [^ ]+: (ok|bad)|Exited with exit code 1$' <<<"$answers"
        printf 'fp8launch: %d of %d nodes are not healthy\n' "${#bad[@]}" "$SLURM_NNODES"
        exit 1
    fi
    printf 'fp8launch: all %d nodes are healthy%s\n' "$SLURM_NNODES" \
        "${skipped[0]+, skipped: $(printf '%s\n' "${skipped[@]}" | sort -u | paste -sd ';')}"
}

if [ -n "$all_nodes" ]; then all_nodes; else one_node; fi
