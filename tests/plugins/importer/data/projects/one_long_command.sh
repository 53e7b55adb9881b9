LOAD=/ckpts/in

CUDA_VISIBLE_DEVICES=0,1,2,3 CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc_per_node=4 /opt/3rdparty/Megatron-LM/pretrain_gpt.py \
    --init-method-std 0.014 \
    --num-layers 36 --hidden-size 2560 --num-attention-heads 32 --group-query-attention --num-query-groups 8 \
    --tensor-model-parallel-size 2 --seq-length 4096 --max-position-embeddings 4096 \
    --micro-batch-size 1 --global-batch-size 4 --train-iters 10 --mock-data \
    --tokenizer-type NullTokenizer --vocab-size 151936 \
    --load ${LOAD} --bf16 --lr 4.5e-4 --no-load-optim

rm -rf ${LOAD}
