#!/bin/bash
# Convert small models from Hugging Face and back, and train between, on two GPUs: convert.sh [GPU] (see convert.py)
#
#   OUT        where results go (default ./h200-convert): convert.jsonl, one line a model, convert.log, host.txt
#   SITE, PACK as for run.sh, with megatron-bridge-*.tar.xz in PACK
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../.." && pwd)
out=${OUT:-h200-convert}
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
. "$here/setup.sh"
{ host_facts; echo "convert $*"; } > "$out/host.txt" 2>&1
python3 "$here/convert.py" "$work/models" "${1:-h200}" 2> "$out/convert.log" | tee "$out/convert.jsonl"
