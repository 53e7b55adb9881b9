#!/bin/bash
# tools/setup.sh train|test VENV: set up what `make demo` and `make test` need. Says what it downloads first.
set -euo pipefail

what=$1 venv=$2
# What was tested together. megatron-core asks for Python 3.12 since 0.17 and runs on 3.11 as well.
torch=2.13.0
megatron=0.19.2
older_megatrons=(0.17.1 0.18.2)

say() { printf 'setup: %s\n' "$*" >&2; }

find_python() {
    local name
    for name in ${PYTHON:-python3.12 python3.13 python3.11 python3 python3.10}; do
        if "$name" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    say "needs Python 3.10 to 3.13 on PATH, or PYTHON=/path/to/python"
    exit 1
}

make_venv() {
    [ ! -x "$venv/bin/pip" ] || return 0
    local python
    python=$(find_python)
    say "a virtual environment of $("$python" -V) in $venv"
    if ! "$python" -c 'import ensurepip' 2>/dev/null; then
        # Debian keeps this part of Python in a package of its own.
        say "downloads the distribution's python3-venv"
        apt-get update -qq && apt-get install -y -qq --no-install-recommends "$(basename "$python")-venv" >/dev/null
    fi
    "$python" -m venv "$venv"
}

pip_install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

make_venv
case $what in
train)
    say "downloads fp8launch's own dependencies (10 MB), PyTorch $torch (about 200 MB where pip finds a CPU build of it,"
    say "else 2.8 GB with CUDA), numpy, psutil (20 MB) and megatron-core $megatron (2.4 MB)"
    pip_install --editable .
    pip_install "torch==$torch" numpy packaging psutil typing_extensions
    pip_install --no-deps --ignore-requires-python "megatron-core==$megatron"
    ;;
test)
    say "downloads pytest, hypothesis, ruff, mypy, matplotlib, tensorboard (150 MB), megatron-core ${older_megatrons[*]} (4 MB),"
    say "and NeMo-Run with its 120 dependencies (500 MB) into an environment of its own, .cache/nemo_run;"
    say "as root, the tests also download the distribution's Slurm, MariaDB, Charliecloud and shellcheck (90 MB)"
    pip_install --editable '.[test]'
    for version in "${older_megatrons[@]}"; do
        [ -d ".cache/megatron/$version/megatron" ] ||
            pip_install --no-deps --ignore-requires-python --target ".cache/megatron/$version" "megatron-core==$version"
    done
    [ -x .cache/nemo_run/bin/python ] || "$venv/bin/python" -m venv .cache/nemo_run
    .cache/nemo_run/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[nemo-run]'
    ;;
esac
touch "$venv/.$what"
