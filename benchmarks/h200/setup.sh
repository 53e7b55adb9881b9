# The environment of H200 hosts without a network, for run.sh and tune.sh, which say what SITE, PACK and AO are.
# Sourced with $top (the checkout) and $work (a temporary folder); sets SITE and exports the rest.
unpack() { # FOLDER WHEEL...
    local folder=$1 wheel
    for wheel in "${@:2}"; do
        [ ! -f "$wheel" ] || python3 -m zipfile -e "$wheel" "$folder" || exit 3
    done
}

if [ -z "${SITE:-}" ] && [ -n "${PACK:-}" ]; then
    SITE=$work/site
    mkdir -p "$SITE"
    tar -C "$SITE" -xJf "$PACK/hopper-site.tar.xz" || exit 3
    # pip would not add megatron-bridge to the folder megatron, which it shares with megatron-core.
    unpack "$SITE" "$PACK"/whl/*.whl
    unpack "$work/titan" "$PACK"/titan/*.whl
    for bundle in "$PACK"/megatron-bridge-*.tar.xz; do
        # A namespace package: Bridge lies beside megatron-core.
        [ -f "$bundle" ] && tar -C "$work" -xJf "$bundle" && cp -r "$work/src/megatron/bridge" "$SITE/megatron/"
    done
    mkdir -p "$work/flash3"
    [ ! -f "$PACK/flash3.tar.xz" ] || tar -C "$work/flash3" -xJf "$PACK/flash3.tar.xz" || exit 3
    for bundle in "$PACK"/torchao-*.tar.xz; do
        [ -f "$bundle" ] && tar -C "$work" -xJf "$bundle" && AO=$work/ao
    done
fi
# torch wants the cuDNN and NCCL that came with it; Transformer Engine would find older ones of the system.
nvidia=$(python3 -c 'import os, nvidia.cudnn as c; print(os.path.dirname(list(c.__path__)[0].rstrip("/")))' 2>/dev/null)
if [ -n "$nvidia" ]; then
    export CUDNN_HOME=$nvidia/cudnn
    export LD_LIBRARY_PATH=$nvidia/cudnn/lib:$nvidia/cu13/lib:$nvidia/nccl/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
export PYTHONPATH=${SITE:+$SITE:}$top/launchers${AO:+:$AO}${PYTHONPATH:+:$PYTHONPATH}
# A shared NVLink fabric: no multicast.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export XDG_STATE_HOME=$work/state

host_facts() { # when, on what GPUs and with what software
    date -u +%FT%TZ
    nvidia-smi --query-gpu=index,name,driver_version,clocks.sm,clocks.max.sm,power.limit --format=csv 2>/dev/null
    python3 -V
    python3 -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)'
    git -C "$top" rev-parse HEAD 2>/dev/null
}
