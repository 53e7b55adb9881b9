#!/bin/bash
#SBATCH -N 2
#SBATCH --gres=gpu:4
#SBATCH -t 30
fail() { echo "$1" >&2; exit 1; }

train_options() {
    options=" \
        --num-layers 16 --hidden-size 1024 \
        --num-attention-heads 16 \
        --seq-length 2048 --max-position-embeddings 2048 \
        --num-experts 8 --moe-router-topk 2 --moe-layer-freq '([0]*1+[1]*15)' \
        --expert-model-parallel-size 4"
}
train_options
if [[ ! -n "$options" ]]; then options="--num-layers 1"; fi

options+=" --micro-batch-size 2 --bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 --main-grads-dtype bf16"
run_cmd="NCCL_DEBUG=INFO python -m torch.distributed.run --nnodes=$SLURM_NNODES --nproc-per-node=4 \
   /opt/train/my_pretrain.py ${options}"
srun -l --container-image nvcr.io/nvidia/nemo:26.04 sh -c "cd /opt/megatron; ${run_cmd}"
