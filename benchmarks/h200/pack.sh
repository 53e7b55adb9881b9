#!/bin/bash
# What an H200 host without a network lacks, in one folder: pack.sh FOLDER SITE.tar.xz [TORCHAO.tar.xz]
#
# SITE.tar.xz holds Transformer Engine, megatron-core and pydantic for the host's Python 3.12 and torch (a folder to put
# on PYTHONPATH). Added here are the wheels of fp8launch's other dependencies, through pip's ordinary configuration, and
# the committed files of this checkout, for a host that has none. run.sh takes the folder as PACK.
set -euo pipefail
[ $# = 2 ] || [ $# = 3 ] || { echo "usage: pack.sh FOLDER SITE.tar.xz [TORCHAO.tar.xz]" >&2; exit 2; }
folder=$1 site=$2
mkdir -p "$folder/whl"
python3 -m pip download --quiet --only-binary=:all: --no-deps --python-version 3.12 --dest "$folder/whl" \
    'PyYAML>=6.0.1,<7' 'click>=8.1.7,<9' 'rich>=13.9,<16' markdown-it-py mdurl pygments nvidia-ml-py 'orjson>=3.10,<4'
# DeepSpeed, for the peers: no wheels are published, and it needs none of its kernels here.
DS_BUILD_OPS=0 python3 -m pip wheel --quiet --no-deps --wheel-dir "$folder/whl" 'deepspeed>=0.19.8,<0.20'
python3 -m pip download --quiet --only-binary=:all: --no-deps --python-version 3.12 --dest "$folder/whl" \
    hjson 'msgpack>=1,<2' ninja py-cpuinfo einops
[ "$site" -ef "$folder/hopper-site.tar.xz" ] || cp "$site" "$folder/hopper-site.tar.xz"
# torchao, in a folder ao/, for the peers; a name that run.sh looks for.
[ $# = 2 ] || [ "$3" -ef "$folder/torchao-peers.tar.xz" ] || cp "$3" "$folder/torchao-peers.tar.xz"
# FlashAttention 3, for the lines of a list that ask for it.
here=$(cd "$(dirname "$0")" && pwd)
if [ ! -f "$folder/flash3.tar.xz" ]; then
    cut=$(mktemp -d)
    trap 'rm -rf "$cut"' EXIT
    python3 "$here/flash3/cut.py" "$cut"
    tar -C "$cut" -c . | xz -T0 > "$folder/flash3.tar.xz"
fi
top=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)
git -C "$top" archive HEAD pyproject.toml launchers recipes clusters containers tools/text_dataset.py \
    benchmarks/h200/{run.sh,rehearsed.sh,one_gpu,setup.sh,tune.sh,convert.sh,convert.py,ceiling.py,lists,recipes} |
    xz -T0 > "$folder/code.tar.xz"
du -sh "$folder"
