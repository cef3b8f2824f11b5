#!/usr/bin/env bash
# What moves between ranks that share or copy parameters: test_zero_ranks on 1 to 8 ranks, by messages only, on pretended hosts, under
# AddressSanitizer.
#
# usage: zero.sh [--quick]   only a few of the runs
set -uo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=dev/test/common.sh
. dev/test/common.sh
need_ranks
make -s build/test_zero_ranks || exit 1

# good NAME RANKS COMMAND...
good() {
    ranks "$2" "${@:3}" && grep -q ' passed, 0 failed' "$dir/stdout"
    verdict $? "$1, $2 ranks: $(tail -n 1 "$dir/stdout")"
    grep -h 'FAILED\|train_gpt:' "$dir/stdout" "$dir/stderr" | head -10 | sed 's/^/    | /'
}
good "shared memory" 4 build/test_zero_ranks
if [ "${1:-}" != --quick ]; then
    for n in 1 2 3 8; do good "shared memory" $n build/test_zero_ranks; done
    good "messages" 4 env TRAIN_GPT_COMM_WINDOW=off build/test_zero_ranks
    good "two hosts" 4 env TRAIN_GPT_COMM_HOSTS=2 build/test_zero_ranks
    make -s build/test_zero_ranks_asan || exit 1
    leaks_of_mpi
    good "AddressSanitizer" 4 build/test_zero_ranks_asan
fi
tally
