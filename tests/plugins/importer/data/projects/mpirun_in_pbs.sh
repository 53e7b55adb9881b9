#!/bin/bash
#PBS -l select=4
#PBS -v RTYPE
cd $PBS_O_WORKDIR
source envs.sh
NUM_NODES=4
PER_NODE=8
NUM_GPUS=$((NUM_NODES * PER_NODE))
export NCCL_DEBUG=WARN
ALL=()
ALL+=(--num-layers 32 --hidden-size 4096 --num-attention-heads 32)
ALL+=(
    --micro-batch-size 2   # per GPU
    --global-batch-size 1024
    --seq-length 8192 --max-position-embeddings 8192
)
ALL+=(--bf16 --use-mpi --lr 3e-4)
mpirun \
    --display-allocation \
    --report-bindings \
    -np ${NUM_GPUS} \
    --npernode ${PER_NODE} \
    -bind-to none \
    -x MASTER_ADDR=$HOST \
    python src/pretrain_gpt.py ${ALL[@]}
