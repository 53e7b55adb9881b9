#!/bin/bash
# Removes the containers of a job that pyxis left on this node: remove_containers.sh JOB
# On all nodes of a Slurm job, from its batch script: remove_containers.sh --all-nodes JOB
#
# pyxis names the container of a step by the numbers of the job and the step (pyxis_JOB.STEP, or pyxis_JOB_JOB.STEP),
# and a job that Slurm starts again keeps its number. Where a node went down, or a step was killed, nobody removed the
# container, and the next start would find the name taken. It ends with 0 also where nothing could be removed: the step
# itself shows whether that matters.
set -uo pipefail
export LC_ALL=C

if [ "${1:-}" = --all-nodes ]; then
    timeout 120 srun --overlap --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 \
        --kill-on-bad-exit=0 bash "$(readlink -f "$0")" "$2" || true
    exit 0
fi

job=$1
command -v enroot > /dev/null || exit 0
enroot list 2> /dev/null | while read -r name; do
    case $name in
    "pyxis_$job."* | "pyxis_${job}_"*)
        if enroot remove --force "$name" > /dev/null 2>&1; then
            echo "fp8launch: removed container $name, which was left on ${SLURMD_NODENAME:-this node}"
        fi
        ;;
    esac
done
exit 0
