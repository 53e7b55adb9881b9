#!/usr/bin/env bash
# One node, FP8 or BF16 by the first lines.
DTYPE=${DTYPE:-fp8}
MASTER_ADDR=localhost
GPUS=8
NUM_NODES=1
CHECKPOINTS=${1:-/checkpoints/llama}
DATA_ARG="MOCK"

export NVTE_FWD_LAYERNORM_SM_MARGIN=16
export CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7

mkdir -p "$(dirname "$CHECKPOINTS")" || exit 1
[ -z "$LAYERS" ] && LAYERS=32

DISTRIBUTED_ARGS=(
  --nproc_per_node $GPUS
  --nnodes $NUM_NODES
  --master_addr $MASTER_ADDR --master_port 6000
)
DTYPE_ARGS=(--bf16)
if [[ "$DTYPE" == "fp8" ]]; then
  DTYPE_ARGS+=(
    "--fp8-format hybrid"
    --fp8-amax-history-len 1024 --fp8-amax-compute-algo max   # the recipe is left to Megatron
  )
elif [[ $DTYPE == fp4 ]]; then
  DTYPE_ARGS+=(--fp4-format e2m1)
else
  DTYPE_ARGS+=(--grad-reduce-in-bf16)
fi

case "$DATA_ARG" in
  MOCK|mock) DATA="--mock-data --tokenizer-type NullTokenizer --vocab-size 128256" ;;
  *) DATA="--data-path $DATA_ARG" ;;
esac

if [ -f /etc/fast_network ]; then
  OVERLAP=(--overlap-grad-reduce --overlap-param-gather)
else
  OVERLAP=()
fi

torchrun "${DISTRIBUTED_ARGS[@]}" tools/warm_up.py --steps 3

torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
  --num-layers $LAYERS --hidden-size 4096 --num-attention-heads 32 \
  --seq-length 8192 --max-position-embeddings 131072 \
  --micro-batch-size 1 --global-batch-size $((8 * GPUS * NUM_NODES)) --lr 3e-4 --train-samples 1000000 \
  "${EXTRA_ARGS[@]//,/ }" ${DTYPE_ARGS[@]} $DATA "${OVERLAP[@]}" \
  --save $CHECKPOINTS --save-interval 100 --log-intervall 1
