"""Shell constructs of public launch scripts, in inputs of our own, and the flags that come out.

| construct | seen in Megatron-LM |
|---|---|
| a size picked by `case`, options in one string with continued lines | examples/mamba |
| only variables, chosen by `if [ -z ${X} ]`, for another script to read | examples/post_training/modelopt/conf |
| defaults `${X:-1}` over the whole file, a sourced file, several option strings | examples/rl/model_configs |
| sizes by arithmetic, a job name of all of them, `. file` | examples/academic_paper_scripts/sc21 |
| arrays for each kind of argument, `${1:-default}` | examples/gpt3, llama |
"""

from __future__ import annotations

import pytest

from fp8launch.megatron.schema import load_schema
from fp8launch.plugins.importer.launch_script import read_launch

CASES = {
    "case-and-options-string": (
        """
SCALE="big"  # or "small"
case "${SCALE}" in
    "small") LAYERS=8; WIDTH=512 ;;
    "big")
        LAYERS=24
        WIDTH=2048
        ;;
    *) echo "unknown"; exit 1 ;;
esac
DATA=$1
export NCCL_IB_SL=1
LENGTH=4096
opts=" \\
   --num-layers ${LAYERS} \\
   --hidden-size ${WIDTH} \\
   --seq-length ${LENGTH} --max-position-embeddings ${LENGTH} \\
   --data-path ${DATA} --bf16"
torchrun --nproc_per_node 8 ../../pretrain_gpt.py ${opts}
""",
        "--num-layers 24 --hidden-size 2048 --seq-length 4096 --max-position-embeddings 4096 --bf16",
        ["import-unresolved"],
    ),
    "variables-for-another-script": (
        """
if [ -z ${CKPT} ]; then
    CKPT=org/model
    TOK=org/model
else
    TOK=${CKPT}
fi
MODEL_ARGS=" \\
    --swiglu \\
    --num-layers 36 \\
    --rotary-base 1000000 \\
"
""",
        "--swiglu --num-layers 36 --rotary-base 1000000",
        ["import-no-command"],
    ),
    "defaults-and-a-sourced-file": (
        """
TP=${TP:-1}
BATCH=${BATCH:-256}
BETA=${BETA:-"0.0"}
SCRIPT_PATH="${BASH_SOURCE[0]}"
source $(dirname $SCRIPT_PATH)/common.sh
ENV_DEPENDENT="\\
  --global-batch-size $BATCH \\
  --grpo-kl-beta $BETA "
MODEL_OPTIONS="\\
  --num-layers 36 \\
  --pretrained-checkpoint $CHECKPOINT \\
  --tensor-model-parallel-size $TP"
""",
        "--global-batch-size 256 --grpo-kl-beta 0.0 --num-layers 36 --tensor-model-parallel-size 1",
        ["import-no-command", "import-unresolved"],
    ),
    "arithmetic": (
        """
PP=4
TP=$((64/PP))
NAME=figure_pp_${PP}_tp_${TP}
. `pwd`/CONFIG.sh
python -m torch.distributed.run pretrain_gpt.py --tensor-model-parallel-size $TP \\
    --pipeline-model-parallel-size ${PP} --wandb-exp-name "${NAME}"
""",
        "--tensor-model-parallel-size 16 --pipeline-model-parallel-size 4 --wandb-exp-name figure_pp_4_tp_16",
        ["import-setup"],
    ),
    "an-array-for-each-kind": (
        """
SAVE=${1:-/tmp/ckpt}
GPUS=8
NODES=2
DISTRIBUTED_ARGS=(--nproc_per_node $GPUS --nnodes $NODES)
MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288   # wide
)
TRAINING_ARGS=(--micro-batch-size 1 --lr 6.0e-5 --bf16)
LOGGING=(--save "$SAVE")
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${MODEL_ARGS[@]} \\
    ${TRAINING_ARGS[@]} \\
    "${LOGGING[@]}"
""",
        "--num-layers 96 --hidden-size 12288 --micro-batch-size 1 --lr 6.0e-5 --bf16 --save /tmp/ckpt",
        [],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_flags_that_come_out(name: str) -> None:
    script, argv, codes = CASES[name]
    found = read_launch(script, f"{name}.sh", load_schema("0.19"))
    assert " ".join(found.argv) == argv
    assert list(dict.fromkeys(problem.code for problem in found.problems)) == codes
