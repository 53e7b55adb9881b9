#!/bin/bash
# Every setting from the environment with a default; flags added to one string; output shown or only written.
TP="${TP:-2}"
SEQ="${SEQ_LENGTH:-2048}"
FP8="${TE_FP8:-1}"
STEPS="${TOTAL_ITERS:-12}"
GC="${GEMM_TUNING:-0}"
export GPU_MAX_HW_QUEUES="${GPU_MAX_HW_QUEUES:-2}"
export NVTE_CK_USES_BWD_V3="${NVTE_CK_USES_BWD_V3:-1}"
if [ "$GC" -eq 1 ]; then export TE_HIPBLASLT_TUNING=1; fi
GPT_ARGS="
    --tensor-model-parallel-size ${TP}
    --num-layers 32
    --hidden-size 4096
    --num-attention-heads 32
    --seq-length ${SEQ}
    --max-position-embeddings ${SEQ}
    --bf16
"
EXTRA=""
if [ "$FP8" -eq 1 ]; then
    EXTRA="$EXTRA --transformer-impl=transformer_engine --fp8-margin=0 --fp8-format=hybrid"
fi
if [ "${NO_TRAINING:-0}" -eq 0 ]; then
    run="torchrun --nproc_per_node ${GPUS:-8} pretrain_gpt.py $GPT_ARGS --train-iters $STEPS $EXTRA"
fi
if [ "${TEE_OUTPUT:-1}" -eq 0 ]; then run="$run >& train.log"; else run="$run |& tee train.log"; fi
eval $run
