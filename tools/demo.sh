#!/bin/bash
# The main job on this machine: a recipe becomes a run, on Slurm if one answers, else right here; then its numbers.
set -euo pipefail

run() {
    printf '\n$ fp8launch %s\n' "$*"
    "$FP8LAUNCH" "$@"
}

# Where Slurm is installed and no controller answers, submit would refuse to train on this machine by itself.
here=()
scontrol ping > /dev/null 2>&1 || here=(--backend local)
run submit recipes/tiny_cpu.yaml "${here[@]}" --wait
run parse latest
