#!/usr/bin/env bash
# A SLURM job of several nodes, one process for each GPU; JAX finds the others by what SLURM says.
#
#   sbatch examples/slurm.sh --config configs/shakespeare_gpu.py --out /shared/runs/big
#
# --out must lie on a disk that all nodes share. Not run by its authors: adapt the lines below to your cluster.
#SBATCH --job-name=transformer
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120
set -u
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"
out=$(printf '%s\n' "$@" | sed -n '/^--out$/{n;p;q}')
: "${out:?give --out FOLDER}"

# All processes get SIGTERM two minutes before the end, save at the same step and leave with 143. One that is lost ends
# the others with 75 in any case; --kill-on-bad-exit is for those that cannot even do that.
for try in 1 2 3 4 5; do
  again=()
  # Also where the job was requeued, and where it was lost before its first checkpoint: what is there is gone on with.
  if [ -f "$out/config.json" ]; then again=(--resume); fi
  srun --kill-on-bad-exit=1 python train.py "$@" ${again[@]+"${again[@]}"} --join-timeout 300
  status=$?
  case $status in
    0 | 2) exit $status ;;  # done, or an error that another try would repeat
    143) scontrol requeue "$SLURM_JOB_ID"; exit 0 ;;
  esac
  echo "a process was lost ($status), try $try of 5" >&2
done
exit "$status"
