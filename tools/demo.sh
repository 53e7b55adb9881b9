#!/bin/bash
# The main job on this machine: a recipe becomes a run, on Slurm if one answers, else right here; then its numbers.
set -euo pipefail

run() {
    printf '\n$ fp8launch %s\n' "$*"
    "$FP8LAUNCH" "$@"
}

run submit recipes/tiny_cpu.yaml --wait
run parse latest
