#!/bin/bash
# tools/setup.sh train|test|bridge VENV: set up what `make demo`, `make test` and the tests with Megatron-Bridge's own
# code need. Says what it downloads first.
set -euo pipefail

what=$1 venv=$2
# Versions that were tested together. megatron-core requires Python 3.12 since 0.17, but runs on 3.11 as well.
torch=2.13.0
# Every release in SUPPORTED of megatron/versions.py is tested. The demo trains with the newest one.
mapfile -t megatrons < <(sed -n 's/^    "[0-9.]*": "\([0-9.]*\)",$/\1/p' launchers/fp8launch/megatron/versions.py)
megatron=${megatrons[-1]}
older_megatrons=("${megatrons[@]:0:${#megatrons[@]}-1}")
# The peers of recipes/peers.
peers=('accelerate>=1.15,<2' 'transformers>=5.23,<6' 'torchao>=0.18,<0.19' 'deepspeed>=0.19.8,<0.20')

# The newest release in the index of recipes, and what its wheel requires. The wheel is for Python 3.12 by its metadata,
# but is Python code that runs on 3.11 as well.
bridge=0.6.2
beside_bridge=('transformers<=5.12.1,>=5.8' 'hydra-core<1.4,>=1.3.4')

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
        # Debian has this part of Python in a separate package.
        say "downloads the distribution's python3-venv"
        apt-get update -qq && apt-get install -y -qq --no-install-recommends "$(basename "$python")-venv" >/dev/null
    fi
    "$python" -m venv "$venv"
}

pip_install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

has() { # PYTHON MODULE...: whether this Python finds all of these modules
    local python=$1
    shift
    [ -x "$python" ] && "$python" -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))' "$@" 2>/dev/null
}

# NAME REQUIREMENT...: an environment in .cache that also sees the packages of $venv, torch among them. Megatron imports
# W&B and transformers wherever it finds them, and every training of the tests would wait for that.
beside() {
    local env=.cache/$1 site
    shift
    "$venv/bin/python" -m venv --without-pip "$env"
    site=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$venv/bin/python" -c 'import site; print(*map(str, site.getsitepackages()), sep="\n")' > "$site/beside.pth"
    "$venv/bin/python" -m pip --python "$env/bin/python" --quiet --disable-pip-version-check install "$@"
}

required_by() { # EXTRA...: what these extras of pyproject.toml require, a line each
    "$venv/bin/python" - "$@" <<'END'
import sys
from importlib.metadata import requires

from packaging.requirements import Requirement

for each in map(Requirement, requires("fp8launch") or []):
    if each.marker and any(each.marker.evaluate({"extra": extra}) for extra in sys.argv[1:]):
        print(f"{each.name}{each.specifier}")
END
}

set_up_train() {
    say "fp8launch's own dependencies and those of its extra data: tokenizers, Parquet (250 MB on disk)"
    pip_install --editable '.[data]'
    has "$venv/bin/python" torch ||
        say "downloads PyTorch $torch: about 200 MB where pip finds a CPU build of it, else 2.8 GB with CUDA"
    pip_install "torch==$torch" typing_extensions --editable '.[rehearse]'
    has "$venv/bin/python" megatron || say "downloads megatron-core $megatron (2.4 MB)"
    pip_install --no-deps --ignore-requires-python "megatron-core==$megatron"
}

set_up_test() {
    local packages
    has "$venv/bin/python" pytest xdist hypothesis mypy matplotlib tensorboard pyarrow tokenizers gigatoken hydra material ||
        say "downloads pytest, hypothesis, ruff, mypy, matplotlib, tensorboard, pyarrow, tokenizers and MkDocs (250 MB)"
    pip_install --editable '.[test]'
    at_once set_up_older_megatrons set_up_nemo_run set_up_trackers set_up_peer set_up_bridge set_up_evaluate
    packages=$("$venv/bin/python" tools/system_packages.py --missing)
    if [ -n "$packages" ]; then
        say "the distribution's packages that tests use and this machine lacks: ${packages//$'\n'/, }"
        "$venv/bin/python" tools/system_packages.py
    fi
}

at_once() { # FUNCTION...: run them at the same time, and fail if one of them failed
    local each pids=() failed=0
    # Processes in the background ignore Ctrl-C.
    trap 'trap - TERM; kill -TERM 0' INT TERM
    for each in "$@"; do
        "$each" &
        pids+=($!)
    done
    for each in "${pids[@]}"; do
        wait "$each" || failed=$?
    done
    trap - INT TERM
    return "$failed"
}

set_up_older_megatrons() {
    local version
    for version in "${older_megatrons[@]}"; do
        [ ! -d ".cache/megatron/$version/megatron" ] || continue
        say "downloads megatron-core $version (2 MB)"
        pip_install --no-deps --ignore-requires-python --target ".cache/megatron/$version" "megatron-core==$version"
    done
}

set_up_nemo_run() {
    if ! has .cache/nemo_run/bin/python nemo_run; then
        say "downloads NeMo-Run and its 120 dependencies (500 MB) into an environment of its own, .cache/nemo_run"
        "$venv/bin/python" -m venv .cache/nemo_run
    fi
    .cache/nemo_run/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[nemo-run]'
}

set_up_trackers() {
    local trackers
    has .cache/trackers/bin/python wandb mlflow ||
        say "downloads W&B and MLflow with their 80 dependencies (700 MB on disk) into .cache/trackers"
    readarray -t trackers < <(required_by wandb mlflow)
    beside trackers "${trackers[@]}"
}

set_up_peer() {
    has .cache/peer/bin/python accelerate transformers torchao deepspeed ||
        say "downloads accelerate, transformers, torchao and DeepSpeed (220 MB on disk) into .cache/peer"
    DS_BUILD_OPS=0 beside peer "${peers[@]}"
}

# The next two need an index; without one the tests with Bridge's own code and with lm-eval are skipped.
set_up_bridge() {
    has .cache/bridge/bin/python megatron.bridge transformers ||
        say "downloads megatron-bridge $bridge (2 MB) and transformers (60 MB) into .cache/bridge"
    bridge_in bridge || say "no Megatron-Bridge: the tests with its own code are skipped"
}

set_up_evaluate() {
    local evaluation
    has .cache/evaluate/bin/python megatron.bridge lm_eval ||
        say "downloads megatron-bridge $bridge and lm-eval with its 50 dependencies (550 MB on disk) into .cache/evaluate"
    readarray -t evaluation < <(required_by evaluate)
    bridge_in evaluate "${evaluation[@]}" || say "no lm-eval: the tests of evaluations are skipped"
}

bridge_in() { # NAME REQUIREMENT...: an environment in .cache with Bridge and further packages
    beside "$@" "${beside_bridge[@]}" &&
        "$venv/bin/python" -m pip --python ".cache/$1/bin/python" --quiet --disable-pip-version-check install \
            --no-deps --ignore-requires-python "megatron-bridge==$bridge"
}

make_venv
"set_up_$what"
touch "$venv/.$what"
