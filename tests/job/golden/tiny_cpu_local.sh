#!/bin/bash
# tiny_cpu: 2 processes. Written by fp8launch 0.1.0.

set -euo pipefail
run_folder=/shared/runs/tiny_cpu-20260101-120000-ab12
code=$run_folder/code/fp8launch/injob
python=/opt/venv/bin/python
# A requeued job keeps its id, so each attempt has its own log.
job=${SLURM_ARRAY_JOB_ID:-${SLURM_JOB_ID:-local}}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
attempt=$run_folder/logs/$job-${FP8LAUNCH_START:-0}
mkdir -p "$run_folder/logs"
cd "$run_folder"

# Environment of the recipe and the cluster profile. Only the training processes get it, through `env`.
environment=(
    PYTHONUNBUFFERED=1
    FP8LAUNCH_DEVICE=cpu
    OMP_NUM_THREADS=1
    CUDA_DEVICE_MAX_CONNECTIONS=1
)

megatron_args=(
    --num-layers 2
    --hidden-size 64
    --ffn-hidden-size 128
    --num-attention-heads 4
    --group-query-attention
    --num-query-groups 2
    --max-position-embeddings 64
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --vocab-size 255
    --micro-batch-size 2
    --global-batch-size 8
    --seq-length 64
    --train-iters 20
    --lr 0.01
    --min-lr 0.001
    --lr-warmup-iters 2
    --bf16
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --mock-data
    --tokenizer-type NullTokenizer
    --split '99,1,0'
    --transformer-impl local
    --lr-decay-style cosine
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --log-interval 1
    --log-throughput
    --eval-iters 0
    --eval-interval 1000
    --no-create-attention-mask-in-dataloader
    --num-workers 0
    --manual-gc
    --manual-gc-interval 100
    --no-check-for-nan-in-loss-and-grad
    --rerun-mode disabled
    --distributed-backend gloo
    --use-cpu-initialization
    --no-rope-fusion
    --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion
    --no-persist-layer-norm
)

status=0
env "${environment[@]}" \
    "$python" "$code/rank/node.py" --nproc-per-node=2 -- "${megatron_args[@]}" >> "$attempt.log" 2>&1 || status=$?
# A killed launcher leaves no line in the log, and its ranks end within a second (rank/rank_watch.py).
if [ "$status" = 137 ]; then
    sleep 2
    echo "fp8launch: killed: exit status 137 (SIGKILL)" >> "$attempt.log" || true
fi
# A process may still abort while it exits, after everything is written.
[ "$status" = 0 ] || ! grep -qsF 'fp8launch: the training is over, and everything is written' "$attempt.log" || status=0
echo "$status" > "$attempt.exit" || true
exit "$status"
