#!/usr/bin/env bash
# Batch script for Slurm: a rank per accelerator (or as many as --ntasks-per-node says) on whole hosts, saved before the time limit, continued after it.
#
# usage: sbatch --nodes=8 scripts/launch_slurm.sh COMMAND [ARGUMENT...]                  from the root of the repository
#   sbatch --nodes=8 --time=12:00:00 --export=ALL,TRAIN='/data/web_*.bin',OUT=/scratch/70b scripts/launch_slurm.sh scripts/recipes/train_70b.sh
#   sbatch --nodes=1 --ntasks-per-node=4 scripts/launch_slurm.sh ./train_gpt --config scripts/recipes/kjv.cfg --out runs/kjv --resume auto
# Flags of sbatch replace the lines below. LAUNCH_PRINT=1 shows what would be started.
#
# Stopping. 120 seconds before the time limit Slurm sends SIGUSR1 to every rank; train_gpt finishes its step, saves and exits with 7. Make it longer
# than a step and a checkpoint: --signal=USR1@600. A job that ended so, with less than 20 minutes left, is put back into the queue, and goes on
# from its newest checkpoint if the command says --resume auto (the recipes do). With more time left somebody asked it to stop (touch OUT/stop,
# scancel --signal=USR1 JOB), and it stays stopped. Where Slurm does not tell the time limit (before SLURM_JOB_END_TIME), every stop is continued:
# scancel JOB ends it. A preempted job gets SIGTERM, on which train_gpt saves too, and Slurm itself puts it back (--requeue).
#
# srun starts the ranks and needs Slurm's PMIx plugin, which Open MPI is built for: `srun --mpi=list` shows it. When one rank ends, however it
# does, the others have 60 seconds: all exit together after saving, and a dead rank does not hold the hosts.
#SBATCH --job-name=train_gpt
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

if [ $# -eq 0 ]; then
    echo "launch_slurm.sh: got no command to start: sbatch --nodes=N scripts/launch_slurm.sh COMMAND" >&2
    exit 2
fi
if [ -z "${SLURM_JOB_ID:-}" ]; then
    echo "launch_slurm.sh: not in a Slurm job: sbatch --nodes=N scripts/launch_slurm.sh $1 ..." >&2
    exit 2
fi
cd "$SLURM_SUBMIT_DIR" # sbatch runs a copy of this script, from elsewhere

# Not bound to cores: a rank starts as many threads as there are cores for each rank of the host.
command=(srun --mpi=pmix --kill-on-bad-exit=0 --wait=60 --cpu-bind=none --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node="${SLURM_NTASKS_PER_NODE:-8}" "$@")
if [ -n "${LAUNCH_PRINT:-}" ]; then
    printf '%q ' "${command[@]}"
    printf '\n'
    exit 0
fi

trap : USR1 TERM # the ranks are told too; this script waits for them
"${command[@]}" &
child=$! status=0
while :; do
    status=0
    wait "$child" || status=$?
    kill -0 "$child" 2>/dev/null || break # otherwise a signal ended the wait
done
echo "launch_slurm.sh: job $SLURM_JOB_ID ended with $status"

left=$((${SLURM_JOB_END_TIME:-0} - $(date +%s)))
if [ $status -eq 7 ] && [ $left -lt 1200 ]; then
    echo "launch_slurm.sh: saved with $left seconds left: back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
