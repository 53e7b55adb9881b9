#!/usr/bin/env bash
#SBATCH --nodes=2
# The arguments are in YAML files that another program reads.
export CUDA_DEVICE_MAX_CONNECTIONS=1
python ./deepy.py train.py -d configs 1-3B.yml local_setup.yml
