#!/bin/bash
for para in $*; do
    if [[ $para == --data_path* ]]; then
        data_path=${para#*=}
    elif [[ $para == --profiling* ]]; then
        profiling=${para#*=}
    fi
done
MODEL=(--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096)
TRAIN=(--micro-batch-size 1 --global-batch-size 256 --bf16)
DATA=(--data-path ${data_path} --split 949,50,1)
RANKS=(--rank $OMPI_COMM_WORLD_RANK --world-size $OMPI_COMM_WORLD_SIZE --dist-url tcp://$1:6000)
APP="python -u $ROOT/pretrain_gpt.py ${MODEL[@]} ${TRAIN[@]} ${DATA[@]} ${RANKS[@]}"
if [[ $profiling == torch ]]; then
    APP+=" --profile --profile-ranks 0"
fi
./bind.sh $OMPI_COMM_WORLD_LOCAL_RANK ${APP}
