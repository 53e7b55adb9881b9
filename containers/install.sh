#!/bin/bash
# install.sh MEGATRON-CORE-VERSION: what the Dockerfile and the Apptainer definition add to NGC's PyTorch image.
set -euo pipefail

version=${1:?usage: install.sh MEGATRON-CORE-VERSION}
here=$(dirname "$0")
# Without dependencies: torch and numpy are NGC's own builds, and pip would put others over them.
python3 -m pip install --no-cache-dir --no-deps "megatron-core==$version"
python3 "$here/inside.py" torch megatron.core
