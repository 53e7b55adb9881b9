#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
NPUS_PER_NODE=8
NNODES=2
WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))
CKPT_SAVE_DIR="your model save ckpt path"
DISTRIBUTED_ARGS="
    --nproc_per_node $NPUS_PER_NODE \
    --nnodes $NNODES \
    --node_rank 0 \
    --master_port 6011
"
GPT_ARGS="
    --use-fused-rotary-pos-emb \
    --num-layers 28 \
    --hidden-size 3584 \
    --num-attention-heads 28 \
    --seq-length 4096 \
    --max-position-embeddings 32768 \
    --bf16
"
CKPT_ARGS="
    --save ${CKPT_SAVE_DIR} \
    --save-interval 100
"
torchrun $DISTRIBUTED_ARGS pretrain_gpt.py \
    $GPT_ARGS \
    $CKPT_ARGS \
    --distributed-backend nccl \
    | tee logs/pretrain_mcore_7b.log
