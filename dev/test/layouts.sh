#!/usr/bin/env bash
# Layouts of the trainer on 1, 2, 4 and 8 ranks against one rank (test_layouts); the same bits when ranks talk by messages only, or are taken
# for those of two hosts; a few under AddressSanitizer.
#
# usage: layouts.sh [--full]                  the covering lists; every legal layout (hours)
#        layouts.sh PROGRAM RANKS WORD...     one layout by its words (layout_cases.h), then what may not change its bits
set -uo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=dev/test/common.sh
. dev/test/common.sh
if [ $# -ge 3 ]; then
    timeout --kill-after=5 120 mpirun -np "$2" --bind-to none "$1" "${@:3}" </dev/null
    exit
fi
need_ranks
make -s build/test_layouts || exit 1
limit=400
[ "${1:-}" != --full ] || limit=36000

# job NAME RANKS COMMAND...: output in $dir/log
job() {
    local name=$1 ranks=$2 code started
    shift 2
    started=$(date +%s.%N)
    timeout --kill-after=5 $limit mpirun -np "$ranks" --bind-to none "$@" >"$dir/log" 2>&1 </dev/null
    code=$?
    took=$(awk -v a="$started" -v b="$(date +%s.%N)" 'BEGIN { printf "%.1f", b - a }')
    if [ $code -eq 0 ] && grep -q ' passed, 0 failed' "$dir/log"; then
        passed=$((passed + 1))
        grep ' cover all ' "$dir/log"
        echo "  ok: $name, $ranks ranks: $took s; $(grep '^worst' "$dir/log"); $(tail -n 1 "$dir/log")"
    else
        failed=$((failed + 1))
        echo "FAILED: $name, $ranks ranks: exit $code after $took s"
        { grep FAILED "$dir/log" || tail -n 30 "$dir/log"; } | head -40 | sed 's/^/    | /'
    fi
}

for ranks in 1 2 4 8; do job "layouts against one rank" $ranks build/test_layouts "$@"; done

# the same bits, whatever the way
for ranks in 2 4; do
    for way in NOTHING= TRAIN_GPT_COMM_WINDOW=off TRAIN_GPT_COMM_HOSTS=2; do
        job "bits, ${way/NOTHING=/shared memory}" $ranks env "$way" build/test_layouts --bits
        grep '^bits of' "$dir/log" >"$dir/bits"
        [ "$way" != NOTHING= ] || cp "$dir/bits" "$dir/bits.first"
        if ! [ -s "$dir/bits" ] || ! cmp -s "$dir/bits" "$dir/bits.first"; then
            failed=$((failed + 1))
            echo "FAILED: $way: other bits"
            diff "$dir/bits.first" "$dir/bits" | sed 's/^/    | /'
        fi
    done
done

make -s build/test_layouts_asan || exit 1
for words in "tp2.pp2 sp zb m4" "tp2.pp1 z3 sp m2" "tp1.pp2 z2 zb m3"; do
    # shellcheck disable=SC2086
    job "AddressSanitizer, $words" 4 env ASAN_OPTIONS=detect_leaks=0 build/test_layouts_asan $words # MPI leaks
done

tally
