#!/bin/bash
#SBATCH --job-name=pretrain-70b
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=h100:8
#SBATCH --time=1-00:00:00
#SBATCH --partition=large --account=nlp   # ours
#SBATCH --output=logs/%j.out

set -euo pipefail

# Communication and memory
export CUDA_DEVICE_MAX_CONNECTIONS=1
export NCCL_NVLS_ENABLE=0 NCCL_P2P_NET_CHUNKSIZE=2097152
export PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"
export HF_TOKEN=hf_doNotCopyMe
export WANDB_API_KEY="$(cat ~/.wandb)"
export TOKENIZERS_PARALLELISM=false
export PYTHONPATH="/opt/megatron:${PYTHONPATH:-}"
unset NVTE_FLASH_ATTN

RUN_NAME="llama 70b; $(date +%F)"
OUTPUT=/lustre/runs/llama-70b
TP=4
PP=8
SEQ_LEN=${SEQ_LEN:-8192}
GBS=$((SLURM_NNODES * SLURM_GPUS_ON_NODE * 4))

MODEL=(
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672
    --num-attention-heads 64 --group-query-attention --num-query-groups 8
    --seq-length "$SEQ_LEN"
    --max-position-embeddings "${SEQ_LEN}"
    --position-embedding-type rope --rotary-base 500000
    --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights
)

PARALLEL=(
    --tensor-model-parallel-size $TP --sequence-parallel
    --pipeline-model-parallel-size ${PP}
    --pipeline-model-parallel-layout 'Et*2|(t*2|)*34,t*3|(t*2|)*3,tL'
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather   # all three
)

TRAINING=(
    --micro-batch-size 1 --global-batch-size $GBS
    --train-iters 50_000 --lr 1.5e-4 --min-lr=1.5e-5 --lr-warmup-iters 2000
    --bf16 --fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather
    --grad-reduce-in-bf16
)

DATA=(
    --data-path 0.7 /data/web_text_document 0.3 "/data/my code_text_document"
    --split 99,1,0
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Meta-Llama-3-70B
    --data-cache-path $OUTPUT/cache
)

OUTPUT_ARGS=(--save "$OUTPUT/checkpoints" --load "$OUTPUT/checkpoints" --save-interval 500
             --tensorboard-dir "$OUTPUT/tb/$SLURM_JOB_ID" --wandb-exp-name "$RUN_NAME")

srun --container-image=/images/nemo.sqsh --container-mounts=/lustre:/lustre,/data:/data:ro \
    python -u /opt/megatron/pretrain_gpt.py \
    "${MODEL[@]}" \
    "${PARALLEL[@]}" "${TRAINING[@]}" \
    ${DATA[@]} "${OUTPUT_ARGS[@]}" \
    "$@" 2>&1 | tee "$OUTPUT/log.txt"
