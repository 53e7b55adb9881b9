#!/bin/bash
common="--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 --bf16"
run() {
    local iters=$1; shift
    torchrun --nproc_per_node 4 /opt/megatron/pretrain_gpt.py $common --train-iters $iters "$@"
}
run 100 --save /ckpt --save-interval 100
run 200 --load /ckpt
