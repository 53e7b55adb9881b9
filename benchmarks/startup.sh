#!/bin/bash
# benchmarks/startup.sh: how long the commands take that people run all day, beside Python itself and `import nemo_run`.
# Needs hyperfine and `make test`'s virtual environment; makes one for NeMo-Run (500 MB) in .cache. Prints a markdown table.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$PWD/.venv/bin/python fp8launch=$PWD/.venv/bin/fp8launch nemo=$PWD/.cache/nemo_run
if [ ! -x "$nemo/bin/python" ]; then
    echo "startup: downloads nemo-run and its 120 dependencies (500 MB) into $nemo" >&2
    "$python" -m venv "$nemo"
    # Without the bound on leptonai, nemo-run 0.11 cannot be imported.
    "$nemo/bin/pip" install --quiet 'nemo-run>=0.11,<0.12' 'leptonai<0.28'
fi

out=$(mktemp)
trap 'rm -f "$out"' EXIT
# Without a shell in between: its start would be part of each time. The first command is what the ratios divide by.
hyperfine --shell=none --warmup 3 --runs "${RUNS:-20}" --export-markdown "$out" \
    --command-name 'python -c pass' "$python -c pass" \
    --command-name 'fp8launch --help' "$fp8launch --help" \
    --command-name 'fp8launch render llama8b_fp8' "$fp8launch render recipes/llama8b_fp8.yaml" \
    --command-name 'fp8launch check llama8b_fp8' "$fp8launch check recipes/llama8b_fp8.yaml" \
    --command-name 'python -c "import nemo_run"' "$nemo/bin/python -c 'import nemo_run'" >&2
nproc | sed 's/$/ cores/'
cat "$out"
