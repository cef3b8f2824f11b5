# shellcheck shell=bash
# What comm.sh and comm_cuda.sh share: jobs of a test program that must pass, or must end soon with a message and an exit code. To be sourced after
# common.sh; $part is the script's first argument, $limit the seconds that a job which must pass may take (60); not a test itself.
# run SECONDS RANKS COMMAND...: output in $dir/log; sets code and took
run() {
    local limit=$1 ranks=$2 started
    shift 2
    started=$(date +%s.%N)
    timeout --kill-after=5 "$limit" mpirun -np "$ranks" --oversubscribe --bind-to none "$@" >"$dir/log" 2>&1 </dev/null
    code=$?
    took=$(awk -v a="$started" -v b="$(date +%s.%N)" 'BEGIN { printf "%.1f", b - a }')
}
# also the log of what failed
bad() {
    failed=$((failed + 1))
    echo "FAILED: $1"
    sed 's/^/    | /' "$dir/log" | head -20
    [ "$part" != --quick ] || exit 1
}
# good NAME RANKS COMMAND...
good() {
    local name=$1 ranks=$2
    shift 2
    run "${limit:-60}" "$ranks" "$@"
    if [ $code -eq 0 ] && grep -q ' passed, 0 failed' "$dir/log"; then
        ok "$name, $ranks ranks: $(tail -n 1 "$dir/log"), $took s"
    else
        bad "$name, $ranks ranks: exit $code"
    fi
}
# Is a process of this script's jobs left? Zombies have no environment.
export COMM_TEST_MARK=$dir
alive() {
    local process
    for process in $(grep -lsz "^COMM_TEST_MARK=$dir\$" /proc/[0-9]*/environ); do
        [[ $(cat "${process%environ}comm" 2>/dev/null) != test_comm* ]] || return 0
    done
    return 1
}
# ends NAME CODES TEXT: what run left: one of the exit codes, text, soon, nothing left over
ends() {
    local left=0
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        alive || break
        sleep 0.2
    done
    alive && left=1
    if [[ " $2 " == *" $code "* ]] && grep -q "$3" "$dir/log" && [ $left -eq 0 ] && awk -v t="$took" 'BEGIN { exit !(t < 30) }'; then
        ok "$1: exit $code after $took s: $(grep -m 1 "$3" "$dir/log" | cut -c1-130)"
    else
        bad "$1: exit $code (wanted $2) after $took s, left over: $left, wanted text: $3"
    fi
}
