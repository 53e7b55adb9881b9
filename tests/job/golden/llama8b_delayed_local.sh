#!/bin/bash
# llama8b_fp8: 8 processes. Written by fp8launch 0.1.0.

set -euo pipefail
run_folder=/shared/runs/llama8b_fp8-20260101-120000-ab12
code=$run_folder/code/fp8launch/injob
python=/opt/venv/bin/python
# A requeued job keeps its id, so each attempt has its own log.
job=${SLURM_ARRAY_JOB_ID:-${SLURM_JOB_ID:-local}}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
attempt=$run_folder/logs/$job-${FP8LAUNCH_START:-0}
mkdir -p "$run_folder/logs"
cd "$run_folder"

# A resume unpickles the state of delayed scaling, but only of checkpoints that nobody else can write to.
umask go-w
# When must the training save and exit? Empty if nothing is left to do.
FP8LAUNCH_STOP_AT=$("$python" "$code/supervisor/supervisor.py" begin "$run_folder" "$attempt") || exit
[ -n "$FP8LAUNCH_STOP_AT" ] || exit 0
export FP8LAUNCH_STOP_AT

# Environment of the recipe and the cluster profile. Only the training processes get it, through `env`.
environment=(
    PYTHONUNBUFFERED=1
    FP8LAUNCH_DEVICE=cuda
    TORCH_NCCL_AVOID_RECORD_STREAMS=1
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
    NCCL_NVLS_ENABLE=0
    TORCH_NCCL_HIGH_PRIORITY=1
    CUDA_DEVICE_MAX_CONNECTIONS=32
    NVTE_FWD_LAYERNORM_SM_MARGIN=16
    NVTE_BWD_LAYERNORM_SM_MARGIN=16
)

megatron_args=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --max-position-embeddings 8192
    --position-embedding-type rope
    --rotary-base 500000
    --rotary-percent 1.0
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --init-method-std 0.01
    --vocab-size 128256
    --make-vocab-size-divisible-by 128
    --micro-batch-size 1
    --global-batch-size 128
    --seq-length 8192
    --train-iters 50
    --lr 0.0003
    --min-lr 3e-5
    --lr-warmup-iters 10
    --bf16
    --fp8-format hybrid
    --fp8-recipe delayed
    --fp8-param-gather
    --fp8-amax-history-len 1024
    --fp8-amax-compute-algo max
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --context-parallel-size 1
    --grad-reduce-in-bf16
    --mock-data
    --tokenizer-type NullTokenizer
    --split '99,1,0'
    --save checkpoints
    --save-interval 100
    --transformer-impl transformer_engine
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
    --num-workers 2
    --manual-gc
    --manual-gc-interval 100
    --no-check-for-nan-in-loss-and-grad
    --rerun-mode disabled
    --cross-entropy-loss-fusion
    --cross-entropy-fusion-impl native
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --ddp-average-in-collective
    --ddp-bucket-size 134217728
    --recompute-granularity full
    --recompute-method block
    --recompute-num-layers 8
    --exit-signal-handler
)

# Load the run's own checkpoint as soon as there is one.
if [ -s /shared/runs/llama8b_fp8-20260101-120000-ab12/checkpoints/latest_checkpointed_iteration.txt ]; then
    megatron_args+=(--load checkpoints)
    # Transformer Engine loads the state of delayed scaling only from a trusted checkpoint. What the
    # recipe sets comes later, and wins.
    trusted=$("$python" "$code/supervisor/supervisor.py" unpickle "$run_folder" "$attempt")
    environment=(${trusted:+"$trusted"} "${environment[@]}")
fi

# End the training if its log stops growing, and remove old checkpoints once newer ones are complete.
"$python" "$code/supervisor/supervisor.py" watch "$run_folder" "$attempt" &
status=0
env "${environment[@]}" \
    "$python" "$code/rank/node.py" --nproc-per-node=8 -- "${megatron_args[@]}" >> "$attempt.log" 2>&1 || status=$?
{ kill $! && wait $!; } 2> /dev/null || true
# A killed launcher leaves no line in the log, and its ranks end within a second (rank/rank_watch.py).
if [ "$status" = 137 ]; then
    sleep 2
    echo "fp8launch: killed: exit status 137 (SIGKILL)" >> "$attempt.log" || true
fi
# A process may still abort while it exits, after everything is written.
[ "$status" = 0 ] || ! grep -qsF 'fp8launch: the training is over, and everything is written' "$attempt.log" || status=0
echo "$status" > "$attempt.exit" || true
# Decide what happens next: nothing, another attempt, or a stop.
again=$("$python" "$code/supervisor/supervisor.py" end "$run_folder" "$attempt" "$status") || exit
[ -n "$again" ] || exit "$status"
export FP8LAUNCH_START=$((${FP8LAUNCH_START:-0} + 1))
exec bash "$0"
