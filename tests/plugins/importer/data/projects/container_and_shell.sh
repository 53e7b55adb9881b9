#!/bin/bash
#SBATCH -A project -p batch -t 4:00:00 --nodes=4 --exclusive --mem=0 --ntasks-per-node=8 --dependency=singleton
export NCCL_IB_SL=1
DIR=`pwd`
DATETIME=`date +'date_%y-%m-%d'`
LENGTH=4096
options=" \
    --hybrid-layer-pattern M-M-M*- \
    --num-layers 52 --hidden-size 4096 --num-attention-heads 32 \
    --seq-length ${LENGTH} --max-position-embeddings ${LENGTH} \
    --micro-batch-size 4 --global-batch-size 1024 --bf16"
run_cmd="python -u ${DIR}/pretrain_mamba.py ${options}"
srun -l \
     --container-image "nvcr.io#nvidia/pytorch:25.09-py3" \
     --container-mounts "/data:/data,/home:/home" \
     --output=${DIR}/logs/%x_%j_$DATETIME.log sh -c "${run_cmd}"
set +x
