#!/bin/bash
# Text to a trained model, on Slurm if one answers, else right here: tokenizer, dataset, run, its numbers, what it writes.
set -euo pipefail

run() {
    printf '\n$ fp8launch %s\n' "$*"
    "$FP8LAUNCH" "$@"
}

# Where Slurm is installed and no controller answers, submit would refuse to train on this machine by itself.
here=()
scontrol ping > /dev/null 2>&1 || here=(--backend local)
made=$PWD/build/demo
rm -rf "$made"
run data tokenizer docs --vocab-size 512 --out "$made/tokenizer"
run data build docs --tokenizer "$made/tokenizer" --out "$made/docs"
run submit recipes/tiny_text.yaml --set "data.blend=[\"$made/docs\"]" "${here[@]}" --wait
run parse latest
run data sample latest --prompt "The checkpoint" --temperature 0.5
