#!/bin/bash
# From text to a trained model, on Slurm if it answers, else on this machine: tokenizer, dataset, run, numbers, a sample.
# Then what works without a GPU for FP8: a check with a rehearsal, and a plan.
set -euo pipefail

run() {
    # Quoted, so that the line can be copied.
    printf '\n$ fp8launch'
    for word in "$@"; do
        if [[ $word =~ ^[A-Za-z0-9_./:=,-]+$ ]]; then printf ' %s' "$word"; else printf " '%s'" "$word"; fi
    done
    printf '\n'
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
run data sample latest --prompt "The checkpoint" --temperature 0.5
run check llama8b_fp8 --rehearse
run plan llama8b_fp8 --gpu h200 --gpus 2 --top 2
cat << 'END'

Next:
  fp8launch init cluster                    describe your Slurm cluster
  fp8launch submit llama8b_fp8 --dry-run    see what would run there
  fp8launch parse latest                    read the numbers of this run again
docs/first_steps.md compares several runs.
END
