#!/bin/bash
# From text to a trained model, on Slurm if it answers, else on this machine: tokenizer, dataset, run, numbers, a sample.
set -euo pipefail

run() {
    printf '\n$ fp8launch %s\n' "$*"
    "$FP8LAUNCH" "$@"
}

# If Slurm is installed but no controller answers, submit does not train on this machine unless told to.
here=()
scontrol ping > /dev/null 2>&1 || here=(--backend local)
made=$PWD/build/demo
rm -rf "$made"
run data tokenizer docs --vocab-size 512 --out "$made/tokenizer"
run data build docs --tokenizer "$made/tokenizer" --out "$made/docs"
run submit recipes/tiny_text.yaml --set "data.blend=[\"$made/docs\"]" "${here[@]}" --wait
run parse latest
run data sample latest --prompt "The checkpoint" --temperature 0.5
