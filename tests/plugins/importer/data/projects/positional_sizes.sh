#!/bin/bash
# Sizes by the position of an argument, options in several strings, the command shown and then evaluated.
set -e
SIZE=$1
MBS=$2
SEQ=4096
AC=$3
PATCH=/opt/patch
export PYTHONPATH=$PATCH:$PYTHONPATH
if [ $SIZE = 8B ]; then
    LAYERS=36
elif [ $SIZE = A3B ]; then
    LAYERS=48
    expert_opts=" --num-experts 128 --moe-router-topk 8"
fi
if [ $AC = full ]; then
    ac_opts=" --recompute-method uniform --recompute-granularity full"
fi
base_opts=" \
    --micro-batch-size ${MBS} --seq-length ${SEQ} --max-position-embeddings ${SEQ} \
    --num-layers ${LAYERS} --hidden-size 2048 --num-attention-heads 32 \
    --moe-layer-freq '([0]*1+[1]*47)' --bf16 --swiglu \
    --max-padding-length ${SEQ} --patch-tokenizer-type Patch --packing-length ${PACK}"
cmd="torchrun --nproc_per_node 8 pretrain_patched.py $base_opts $expert_opts $ac_opts"
echo ${cmd}
eval ${cmd}
