#!/usr/bin/env bash
# Jobs that lose a rank while they train: one that is stopped (SIGSTOP) or killed ends the job within 30 s, with a line that names the rank, its
# host, step and phase, and no process stays behind; so does a launcher that is killed. What only looks like it goes on: a job that was
# suspended as a whole, a rank that computes for long. All with the default limits; the jobs run side by side.
set -uo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=dev/test/common.sh
. dev/test/common.sh
need_ranks
make -s build/make_tokens build/test_comm "${train#./}" || exit 1
build/make_tokens "$dir/train.bin" 6000 300 3 || exit 1
trap 'jobs=$(find_ranks ""); [ -z "$jobs" ] || kill -9 $jobs; rm -rf "$dir"' EXIT

# find_ranks JOB [RANK]: processes of a job of this script, or of all ("")
find_ranks() {
    local file
    for file in $(grep -lsz "^FAILURE_JOB=$dir/$1${1:+\$}" /proc/[0-9]*/environ); do
        ! grep -qsz "^OMPI_COMM_WORLD_RANK=${2:-[0-9]*}\$" "$file" || basename "${file%/environ}"
    done
}
# start JOB RANKS COMMAND...: in the background; what it leaves is $dir/JOB/{output,code}
start() {
    local job=$1 count=$2
    shift 2
    mkdir -p "$dir/$job"
    (
        FAILURE_JOB=$dir/$job timeout --kill-after=5 90 mpirun -np "$count" --oversubscribe --bind-to none "$@" >"$dir/$job/output" 2>&1 </dev/null &
        echo $! >"$dir/$job/launcher"
        wait $!
        echo $? >"$dir/$job/code"
    ) 2>/dev/null &
}
# train JOB RANKS FLAG...: a training that would not end by itself
train() {
    local job=$1 count=$2
    shift 2
    start "$job" "$count" "$train" --layers 2 --channels 64 --heads 4 --vocab 300 --eot 299 --seq 32 --micro-batch 1 --global-batch 12 \
        --steps 10000000 --save-every 0 --train "$dir/train.bin" --out "$dir/$job/out" "$@"
}
lines() { wc -l 2>/dev/null <"$dir/$1/out/log.jsonl" || echo 0; }
# trains JOB [LINES]: waits until it has logged so many steps
trains() {
    local i
    for ((i = 0; i < 1500; i++)); do
        [ "$(lines "$1")" -ge "${2:-3}" ] && return
        [ ! -e "$dir/$1/code" ] || break
        sleep 0.02
    done
    bad "$1: does not train: $(tail -n 1 "$dir/$1/output")"
    return 1
}
# wait_end JOB SECONDS: waits for its end and that of its ranks; sets code and took
wait_end() {
    local job=$1 began=$SECONDS
    while [ $((SECONDS - began)) -lt "$2" ]; do
        [ -e "$dir/$job/code" ] && [ -z "$(find_ranks "$job")" ] && break
        sleep 0.2
    done
    code=$(cat "$dir/$job/code" 2>/dev/null || echo none)
    left=$(find_ranks "$job" | wc -l)
}
# ends JOB CODES TEXT WHAT: it has one of the exit codes, says so, left nothing
ends() {
    wait_end "$1" $((30 - (SECONDS - ${hit[$1]})))
    [[ " $2 " == *" $code "* ]] && [ "$left" -eq 0 ] && grep -qE "$3" "$dir/$1/output"
    verdict $? "$4: exit $code, $left processes left, within $((SECONDS - ${hit[$1]})) s: $(grep -m 1 '^train_gpt' "$dir/$1/output" | cut -c1-200)"
}
declare -A hit

place='step [1-9][0-9]*, phase [a-z]+'
start busy 2 build/test_comm busy
train suspended 2
train stopped 4 --tp 2 --pp 2
train killed 3
train orphaned 2

if trains killed; then
    hit[killed]=$SECONDS
    kill -9 "$(find_ranks killed 1)"
    ends killed "137 6" "rank [02] on [^ ]+: $place: rank 1 on [^ ]+ has died: .*, since $place" "a rank that is killed"
fi
if trains orphaned; then
    launcher=$(cat "$dir/orphaned/launcher") # timeout; its child is the launcher
    hit[orphaned]=$SECONDS
    kill -9 $(pgrep -P "$launcher") "$launcher"
    wait_end orphaned 30
    [ "$left" -eq 0 ]
    verdict $? "a launcher that is killed: $left ranks left after $((SECONDS - ${hit[orphaned]})) s"
fi
if trains stopped; then
    hit[stopped]=$SECONDS
    kill -STOP "$(find_ranks stopped 2)"
fi
if trains suspended; then
    hit[suspended]=$SECONDS
    kill -STOP $(find_ranks suspended)
fi
if [ -n "${hit[stopped]:-}" ]; then
    ends stopped 6 "rank [013] on [^ ]+: $place: rank 2 on [^ ]+ is stopped, frozen or dead: no sign of its process for 2[0-9.]+ s, since $place" \
        "a rank that is stopped"
fi
if [ -n "${hit[suspended]:-}" ]; then
    while [ $((SECONDS - ${hit[suspended]})) -lt 24 ]; do sleep 0.2; done # longer than any limit
    for process in $(find_ranks suspended); do # one after the other, as it happens
        kill -CONT "$process"
        sleep 0.3
    done
    trains suspended $(($(lines suspended) + 3)) && touch "$dir/suspended/out/stop" && wait_end suspended 20
    [ "$code" = 7 ] && [ "$left" -eq 0 ]
    verdict $? "a job that was suspended for 24 s goes on, and stops when asked: exit $code"
fi
wait_end busy 60
[ "$code" = 0 ] && [ "$left" -eq 0 ]
verdict $? "a rank that computes for 23 s is left alone, and so is the one that waits for it: exit $code $(grep -m 1 '^train_gpt' "$dir/busy/output")"

tally
