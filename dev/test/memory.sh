#!/usr/bin/env bash
# Memory of --zero 0 to 3 as it is: on 4 ranks every rank's bytes of parameters, gradients and optimizer state, from the log's last record,
# against the bytes per parameter of ZeRO's paper (fp32 gradients), and the most that each process held at once.
set -uo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=dev/test/common.sh
. dev/test/common.sh
need_ranks
make -s build/make_tokens build/peak_memory "${train#./}" || exit 1
build/make_tokens "$dir/train.bin" 20000 2000 1 || exit 1
layers=8 channels=384 vocab=2000 seq=16
parameters=$(((vocab + seq) * channels + layers * (12 * channels * channels + 13 * channels) + 2 * channels))

# check PRECISION STAGE PER_PARAMETER SHARE FLAG...: bytes per parameter of the SHARE of the model that a rank has
check() {
    local precision=$1 stage=$2 wanted=$3 share=$4 out=$dir/out bytes held baseline
    shift 4
    rm -rf "$out" "$dir/peak"
    # by messages, not through shared memory: a process holds what it has allocated, and nothing of others
    TRAIN_GPT_COMM_WINDOW=off ranks 4 build/peak_memory "$dir/peak" "$train" --layers $layers --channels $channels --heads 6 --vocab $vocab --seq $seq \
        --micro-batch 1 --global-batch 8 --steps 2 --save-every 0 --zero "$stage" --precision "$precision" --train "$dir/train.bin" --out "$out" "$@" || {
        bad "$precision, zero $stage $*: exit $?: $(tail -n 1 "$dir/stderr")"
        return
    }
    # a line per rank
    bytes=$(grep '"event":"end"' "$out/log.jsonl" | grep -o '"param_bytes":[0-9]*,"grad_bytes":[0-9]*,"optim_bytes":[0-9]*' | tr -cs '0-9\n' ' ' | awk '{ print $1 + $2 + $3 }')
    worst=$(awk -v n=$parameters -v wanted="$wanted" -v share="$share" '
        { e = $1 / (n * share) / wanted - 1; if (e < 0) e = -e; if (e > worst) worst = e }
        END { printf "%.4f", worst; exit !(NR == 4 && worst <= 0.05) }' <<<"$bytes")
    verdict $? "$precision, zero $stage $*: $wanted bytes per parameter, off by $worst on the worst of 4 ranks (bound 0.05)"
    # resident: all that was allocated, and at most 200 MB for the program, its libraries, slots and messages
    held=$(sort -n "$dir/peak")
    allocated=$(sort -n <<<"$bytes" | tail -n 1)
    [ "$(wc -l <<<"$held")" -eq 4 ] && [ "$(head -n 1 <<<"$held")" -ge "$(head -n 1 <<<"$bytes")" ] && [ "$(tail -n 1 <<<"$held")" -le $((allocated + 200000000)) ]
    verdict $? "$precision, zero $stage $*: $allocated bytes of state, at most $(tail -n 1 <<<"$held") resident"
    # and what sharding takes away is gone
    if [ "$stage" = 0 ]; then
        whole=$allocated whole_held=$(head -n 1 <<<"$held")
    else
        saved=$((whole - allocated)) gone=$((whole_held - $(tail -n 1 <<<"$held")))
        [ $gone -ge $((saved * 6 / 10)) ]
        verdict $? "$precision, zero $stage $*: $saved bytes less than zero 0, $gone less resident"
    fi
}
while read -r precision stage wanted share flags; do
    # shellcheck disable=SC2086
    check "$precision" "$stage" "$wanted" "$share" $flags
done <<'END'
fp32 0 16 1
fp32 1 10 1
fp32 2 7 1
fp32 3 4 1
fp32 3 8 1 --shard-group 2
fp32 1 12 0.5 --tp 2
bf16 0 18 1
bf16 1 9 1
bf16 2 6 1
bf16 3 4.5 1
END
tally
