#!/usr/bin/env bash
# The recipes of many ranks: each plans its whole run, and trains its miniature on 8 ranks of this machine. The launchers: what they start, what
# they refuse, that a wish to stop reaches every rank in time, what becomes of a job that does not stop; Slurm's with stand-ins for its commands.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit
command -v mpirun >/dev/null || { echo "no mpirun: one rank only"; exit 77; }
make -s train_gpt tokenize build/make_tokens || exit 1
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_btl=self,vader OMPI_MCA_btl_vader_single_copy_mechanism=none OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1
unset TRAIN VAL OUT RANKS MINIATURE LAUNCH_PRINT
passed=0 failed=0
ok() { passed=$((passed + 1)); echo "  ok: $1"; }
bad() { failed=$((failed + 1)); echo "FAILED: $1"; }
verdict() { if [ "$1" -eq 0 ]; then ok "$2"; else bad "$2"; fi; }
# refused PATTERN COMMAND...: exit 2 and one line that matches
refused() {
    local pattern=$1 status
    shift
    timeout 20 "$@" >"$dir/stdout" 2>"$dir/stderr" </dev/null
    status=$?
    [ $status -eq 2 ] && [ "$(wc -l <"$dir/stderr")" -eq 1 ] && grep -qE -- "$pattern" "$dir/stderr"
    verdict $? "refused: ${*##*/} (exit $status: $(head -n 1 "$dir/stderr"))"
}

echo "recipes"
while read -r recipe ranks layout; do
    begin=$(date +%s%N)
    timeout 20 scripts/recipes/train_"$recipe".sh --dry-run >"$dir/plan" 2>&1 </dev/null &&
        grep -q "^layout  *$ranks ranks = $layout" "$dir/plan" && grep -q '^  total  *[0-9.]* GiB' "$dir/plan" &&
        [ "$(grep -c 'warning: memory\|warning: --pp' "$dir/plan")" -eq 0 ]
    verdict $? "$recipe: planned for $ranks ranks in $((($(date +%s%N) - begin) / 1000000)) ms: $(grep '^  total' "$dir/plan" | tr -s ' ')"
    OUT=$dir/$recipe timeout --kill-after=5 120 scripts/recipes/train_"$recipe".sh --miniature >"$dir/log" 2>&1 </dev/null
    status=$?
    losses=$(sed -nE 's/.*"loss":([0-9.e+-]+).*/\1/p' "$dir/$recipe/log.jsonl" 2>/dev/null)
    [ $status -eq 0 ] && [ "$(wc -l <<<"$losses")" -eq 20 ] && awk 'NR == 1 { first = $1 } END { exit !($1 < first - 0.3) }' <<<"$losses" &&
        [ "$(grep -o '"param_bytes"' "$dir/$recipe/log.jsonl" | wc -l)" -eq 8 ]
    verdict $? "$recipe: 20 steps of the miniature, exit $status, loss $(head -n 1 <<<"$losses") to $(tail -n 1 <<<"$losses") $(tail -n 1 "$dir/log")"
    refused "wants $ranks ranks" scripts/recipes/train_"$recipe".sh
done <<'END'
7b 8 tp 1 x pp 1 x dp 8; zero 3 over 8 ranks
70b 64 tp 8 .and sequence. x pp 4 x dp 2; zero 1 over 2 ranks
405b 4096 tp 8 .and sequence. x pp 16 x dp 32; zero 1 over 32 ranks
END
timeout 20 env RANKS=16384 scripts/recipes/train_405b.sh --dry-run --global-batch 4096 2>&1 | grep -q '16384 ranks = tp 8 .and sequence. x pp 16 x dp 128'
verdict $? "405b: planned for RANKS=16384"
refused 'not under a launcher' env PMIX_RANK=0 scripts/recipes/train_7b.sh --miniature

echo "launch_mpirun.sh"
printf '# racks\n node1\nnode2 slots=3 # spare\n\nnode3' >"$dir/hosts"
plan=$(TRAIN=t.bin scripts/launch_mpirun.sh --hosts "$dir/hosts" --per-host 8 --print -- ./train_gpt --out 'a b')
[[ "$plan" == *" -np 24 --map-by ppr:8:node --hostfile HOSTS "*" -x TRAIN ./train_gpt --out a\\ b "* ]] && [[ "$plan" == *$'\nnode1 slots=8\nnode2 slots=8\nnode3 slots=8' ]]
verdict $? "a host file: 3 hosts x 8 ranks, with the environment"
[[ "$(scripts/launch_mpirun.sh --ranks 2 --print true)" == "mpirun --bind-to none --oversubscribe -np 2 "* ]]
verdict $? "one host"
refused '--per-host: wanted' scripts/launch_mpirun.sh --hosts "$dir/hosts" true
refused '--ranks: got 25, wanted at most 24' scripts/launch_mpirun.sh --hosts "$dir/hosts" --per-host 8 --ranks 25 true
refused "--ranks: got '0x8'" scripts/launch_mpirun.sh --ranks 0x8 true
refused '--ranks: got nothing, wanted how many' scripts/launch_mpirun.sh true
refused '--ranks: got nothing, wanted a value' scripts/launch_mpirun.sh --ranks
refused 'no command' scripts/launch_mpirun.sh --ranks 2
refused "cannot read '$dir/none'" scripts/launch_mpirun.sh --hosts "$dir/none" --per-host 2 true
refused 'node1 twice' scripts/launch_mpirun.sh --hosts <(:) --per-host 2 --hosts "$(printf 'node1\nnode1\n' >"$dir/twice" && echo "$dir/twice")" true
refused 'unknown flag' scripts/launch_mpirun.sh --bogus true
# A rank that tells what it gets; "deaf" ranks do not stop.
cat >"$dir/rank" <<'END'
#!/usr/bin/env bash
trap 'echo "got USR1"' USR1 # and goes on
echo "rank $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE, $OUT"
for ((i = 0; i < 600; i++)); do sleep 0.1; done
END
chmod +x "$dir/rank"
localhost=$dir/localhost
hostname >"$localhost"
# shellcheck disable=SC2016 # a rank expands it
OUT=there timeout 60 scripts/launch_mpirun.sh --hosts "$localhost" --per-host 3 -- bash -c 'echo "$OMPI_COMM_WORLD_SIZE $OUT"; exit 5' >"$dir/stdout" 2>/dev/null
status=$?
[ $status -eq 5 ] && [ "$(grep -c '^3 there$' "$dir/stdout")" -ge 1 ]
verdict $? "the exit code of a rank is the launcher's: $status"
# stopped SIGNALS RANK_ARGUMENT EXIT SAID: starts 2 ranks, sends the signals
stopped() {
    local signal status began=$SECONDS
    OUT=there scripts/launch_mpirun.sh --ranks 2 --grace 2 -- "$dir/rank" "$2" >"$dir/stdout" 2>"$dir/stderr" </dev/null &
    local launcher=$!
    for ((i = 0; i < 200; i++)); do
        [ "$(grep -c '^rank . of 2, there' "$dir/stdout")" -eq 2 ] && break
        sleep 0.05
    done
    for signal in $1; do
        kill -"$signal" $launcher
        sleep 0.3
    done
    wait $launcher
    status=$?
    { [ "$3" = any ] && [ $status -ne 0 ] || [ $status -eq "$3" ] 2>/dev/null; } && [ "$(grep -c 'got USR1' "$dir/stdout")" -ge 2 ] &&
        [ "$(grep -c 'not stopped yet' "$dir/stderr")" -eq "$4" ] && ! pgrep -f "$dir/rank" >/dev/null
    verdict $? "$1: ${2:-ranks that stop} end with $status after $((SECONDS - began)) s, none is left"
}
# the trainer: mpirun 4.1 may crash at the end of ranks that fail without having started MPI, so no stand-in tells what comes of exit code 7
build/make_tokens "$dir/tokens.bin" 6000 300 3 || exit 1
for signal in TERM USR1; do
    out=$dir/out.$signal
    scripts/launch_mpirun.sh --ranks 2 --grace 30 -- ./train_gpt --layers 2 --channels 64 --heads 4 --vocab 300 --seq 32 --micro-batch 1 \
        --steps 1000000 --train "$dir/tokens.bin" --out "$out" --save-every 0 >"$dir/stdout" 2>"$dir/stderr" </dev/null &
    launcher=$!
    for ((i = 0; i < 400; i++)); do
        [ "$(wc -l 2>/dev/null <"$out/log.jsonl" || echo 0)" -ge 2 ] && break
        sleep 0.05
    done
    kill -"$signal" $launcher
    wait $launcher
    status=$?
    [ $status -eq 7 ] && [ "$(ls -d "$out"/step_* | wc -l)" -eq 1 ] && grep -q 'stopped by SIGUSR1' "$dir/stderr" && ! pgrep -f "out $out" >/dev/null
    verdict $? "$signal: the trainer's ranks save and end with $status, none is left"
done
stopped TERM deaf any 1
# a shell's background jobs ignore SIGINT, and a shell that was started so cannot catch it: a second ctrl-C is tried from a session of its own
OUT=there python3 - "$dir/rank" <<'END' >"$dir/stdout" 2>"$dir/stderr"
import signal, subprocess, sys, time
job = subprocess.Popen(["scripts/launch_mpirun.sh", "--ranks", "2", "--grace", "60", "--", sys.argv[1], "deaf"], stdin=subprocess.DEVNULL,
                       preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
time.sleep(2)
job.send_signal(signal.SIGINT)
time.sleep(1)
job.send_signal(signal.SIGINT)
sys.exit(job.wait(timeout=30) == 0)
END
status=$?
[ $status -eq 0 ] && grep -q 'not stopped yet' "$dir/stderr" && ! pgrep -f "$dir/rank" >/dev/null
verdict $? "a second ctrl-C ends ranks that do not stop"

echo "launch_slurm.sh"
mkdir "$dir/bin"
# shellcheck disable=SC2016
printf '#!/bin/sh\necho "srun $*" >>"$SLURM_LOG"\nexit $SRUN_STATUS\n' >"$dir/bin/srun"
# shellcheck disable=SC2016
printf '#!/bin/sh\necho "scontrol $*" >>"$SLURM_LOG"\n' >"$dir/bin/scontrol"
chmod +x "$dir"/bin/*
# slurm SECONDS_LEFT STATUS LINES: the job's exit code is STATUS, and LINES commands were called
slurm() {
    local status
    rm -f "$dir/slurm"
    (cd / && env PATH="$dir/bin:$PATH" SLURM_LOG="$dir/slurm" SRUN_STATUS="$2" SLURM_JOB_ID=12 SLURM_JOB_NUM_NODES=4 SLURM_NTASKS_PER_NODE=8 \
        SLURM_SUBMIT_DIR="$dir" SLURM_JOB_END_TIME=$(($(date +%s) + $1)) bash "$OLDPWD/scripts/launch_slurm.sh" ./train_gpt --resume auto) >"$dir/stdout" 2>&1
    status=$?
    [ $status -eq "$2" ] && [ "$(wc -l <"$dir/slurm")" -eq "$3" ] &&
        grep -q 'srun --mpi=pmix .*--nodes=4 --ntasks-per-node=8 ./train_gpt --resume auto$' "$dir/slurm" &&
        { [ "$3" -eq 1 ] || grep -q 'scontrol requeue 12' "$dir/slurm"; }
    verdict $? "exit $2 with $1 seconds left: $3 commands"
}
slurm 100 7 2
slurm 9000 7 1
slurm 100 0 1
slurm 100 6 1
refused 'no command' env SLURM_JOB_ID=1 scripts/launch_slurm.sh
refused 'not in a Slurm job' env -u SLURM_JOB_ID scripts/launch_slurm.sh ./train_gpt
grep -q '^#SBATCH --signal=USR1@' scripts/launch_slurm.sh && grep -q '^#SBATCH --requeue' scripts/launch_slurm.sh
verdict $? "sbatch is told to signal and to requeue"

echo "$passed passed, $failed failed"
[ $failed -eq 0 ] && [ $passed -gt 0 ]
