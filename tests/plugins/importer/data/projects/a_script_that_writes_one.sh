#!/bin/bash
LAYERS=${1:-16}
SCRIPT=/tmp/job_$LAYERS.sbatch
cat > "$SCRIPT" << MODEL
#SBATCH --nodes=4
NETWORK=(
    --num-layers ${LAYERS}
    --hidden-size 2048
)
srun python pretrain_gpt.py \${NETWORK[@]}
MODEL
sbatch "$SCRIPT"
