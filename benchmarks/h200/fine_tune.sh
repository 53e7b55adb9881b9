#!/bin/bash
# Fine-tune a model with random weights by Megatron-Bridge on one GPU: fine_tune.sh [GPU] (see fine_tune.py)
#
#   OUT        where results go (default ./h200-fine-tune): fine_tune.jsonl, one line a step, runs.tar.xz, host.txt
#   SITE, PACK as for run.sh, with megatron-bridge-*.tar.xz in PACK, and the wheels of transformers 5.12, tokenizers,
#              omegaconf, hydra-core and antlr4-python3-runtime 4.9; lm-eval and what it needs, to evaluate as well
#   LIMIT      seconds after which it ends (default 1200)
#   ROOM       folder for models and checkpoints (default: a temporary one; the 1B model needs 60 GB)
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../.." && pwd)
out=${OUT:-h200-fine-tune}
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
room=${ROOM:-$work}/fine_tune
trap 'rm -rf "$work" "$room"' EXIT
. "$here/setup.sh"
{ host_facts; echo "fine_tune $*"; } > "$out/host.txt" 2>&1
timeout --signal=INT --kill-after=10 "${LIMIT:-1200}" python3 -u "$here/fine_tune.py" "$room" "${1:-h100}" 2> >(tee "$out/errors.txt" >&2) | tee "$out/fine_tune.jsonl"
tar -C "$room" --exclude=code --exclude='*.safetensors' --exclude='iter_*' --exclude=packed -cJf "$out/runs.tar.xz" runs data
