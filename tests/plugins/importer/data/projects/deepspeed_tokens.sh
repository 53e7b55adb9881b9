#!/bin/bash
DIR=`pwd`
NUM_GPUS=64
EP=64
EXPERTS="64"
TOKENS=$((300 * 1000 * 1000 * 1000))
if [[ $EP -gt $NUM_GPUS ]]; then EP_PARALLEL=$NUM_GPUS; else EP_PARALLEL=$EP; fi
NAME="moe-${EXPERTS}"
megatron_options=" \
        --tensor-model-parallel-size 1 \
        --num-experts ${EXPERTS} \
        --moe-expert-parallel-size ${EP_PARALLEL} \
        --train-tokens ${TOKENS} \
        --num-layers 24 --hidden-size 2048 --num-attention-heads 16 \
        --seq-length 2048 --max-position-embeddings 2048 \
        --fp16"
if [[ $EP -gt 1 ]]; then
megatron_options="${megatron_options} \
        --create-moe-param-group"
fi
template="ds_template.json"
sed "s/NAME/${NAME}/" ${template} > ds_${NAME}.json
deepspeed_options=" --deepspeed --deepspeed_config ds_${NAME}.json"
run_cmd="deepspeed --num_nodes 8 --num_gpus 8 ${DIR}/../pretrain_gpt.py ${megatron_options} ${deepspeed_options} &> out/${NAME}.log"
echo ${run_cmd}
eval ${run_cmd}
