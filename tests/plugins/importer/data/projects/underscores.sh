#! /bin/bash
CKPT=<Specify path>
python pretrain_gpt.py \
       --num_layers 24 \
       --hidden_size=1024 \
       --num_attention_heads 16 \
       --seq_length 1024 \
       --max_position_embeddings 1024 \
       --save $CKPT \
       --fp16
