#!/bin/bash
set -ex
DATA=${HL_DATA_ROOT:-/data/oscar}
NODES=${HL_NODES:-1}
DP=${HL_DP:-2}
TP=${HL_TP:-4}
DEVICES=$((NODES * 8))
if [ $((DP * TP)) -ne $DEVICES ]; then
    echo "wrong number of devices"
    exit 1
fi
CMD="python3 -u ./pretrain_gpt.py \
    --tensor-model-parallel-size ${TP} \
    --num-layers 40 --hidden-size 5120 --num-attention-heads 40 --seq-length 2048 --max-position-embeddings 2048 \
    --micro-batch-size 1 --global-batch-size 256 --use_hpu --bf16"
if [ ! -z "$HL_TENSORBOARD" ]; then
    CMD="${CMD} --tensorboard-dir $HL_TENSORBOARD"
fi
MULTINODE="bash -c \"cd /opt && ${CMD}\""
deepspeed --num_nodes ${NODES} --num_gpus 8 --no_local_rank --no_python /usr/bin/bash -c "cd /opt && ${CMD}"
