#!/usr/bin/env bash
#SBATCH --job-name=het_tf
#SBATCH --nodes=6
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=12:00:00
# Trains on the nodes of a Slurm job:
#
#   PS=2 sbatch --nodes=6 slurm.sh python train.py --epochs=3
#
# The first PS nodes run a parameter server each, the other nodes a worker each. The training
# program runs on the first node. Failed servers are started again.
set -euo pipefail

export PS=${PS:-2}
if (($# < 1)) || ((PS < 1)) || ((PS >= SLURM_NNODES)); then
  echo "usage: [PS=2] sbatch [--nodes=6] slurm.sh PROGRAM [ARGUMENT...]" \
    "with 0 < PS < nodes, not PS=$PS and $SLURM_NNODES nodes" >&2
  exit 2
fi
port=$((10000 + SLURM_JOB_ID % 10000))
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
list() { local all; all=$(printf '"%s", ' "$@"); echo "[${all%, }]"; }
tasks=()
for i in "${!hosts[@]}"; do tasks+=("${hosts[i]}:$((port + 1 + i))"); done
ps=$(list "${tasks[@]:0:PS}") workers=$(list "${tasks[@]:PS}")
export CLUSTER="{\"ps\": $ps, \"worker\": $workers, \"chief\": [\"${hosts[0]}:$port\"]}"

# shellcheck disable=SC2016 # The tasks expand these variables.
srun bash -c '
  if ((SLURM_PROCID < PS)); then task=ps index=$SLURM_PROCID
  else task=worker index=$((SLURM_PROCID - PS)); fi
  export TF_CONFIG="{\"cluster\": $CLUSTER, \"task\": {\"type\": \"$task\", \"index\": $index}}"
  export PYTHONSAFEPATH=1 # The server imports no module of this folder.
  until python -m het_tf.server; do
    echo "The server of $task $index failed, and is started again." >&2
    sleep 1
  done' &
servers=$!
trap 'kill "$servers" || true' EXIT
TF_CONFIG="{\"cluster\": $CLUSTER, \"task\": {\"type\": \"chief\", \"index\": 0}}" "$@"
