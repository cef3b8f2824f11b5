#!/usr/bin/env bash
# The stream of sample ids depends on data, seed and order only: it is the same for any number of data-parallel ranks, any micro-batch and
# layout, and goes on where it was after a resume in another layout, across files and epochs.
set -uo pipefail
cd "$(dirname "$0")/../.."
source dev/test/common.sh
need_ranks
make -s build/make_tokens "${train#./}" || exit 1

# 33 windows of 32 tokens in three files; 14 steps of 8 are more than three epochs, the ends of which lie within steps
for i in 1 2 3; do build/make_tokens "$dir/train_$i.bin" $((380 + i)) 300 "$i" || exit 1; done
common=(--layers 2 --channels 32 --heads 4 --vocab 300 --eot 299 --seq 32 --global-batch 8 --lr 1e-3 --schedule constant
    --train "$dir/train_*.bin" --log-samples on --keep 100)
steps=14

# run RANKS OUT FLAG...
run() {
    local count=$1 out=$2
    shift 2
    ranks "$count" "$train" "${common[@]}" --steps $steps --out "$out" "$@" && return 0
    bad "$count ranks $*: exit $?: $(tail -1 "$dir/stderr")"
    return 1
}
stream() { sed -nE 's/^\{"step":([0-9]+),.*"samples":\[([^]]*)\].*/\1: \2/p' "$1/log.jsonl"; }
# compare OUT WHOLE NAME
compare() {
    if [ "$(stream "$1" | wc -l)" -eq $steps ] && [ "$(stream "$1")" = "$(stream "$2")" ]; then
        ok "$3"
    else
        bad "$3; the first difference:"
        diff <(stream "$1") <(stream "$2") | head -4
    fi
}

while IFS='|' read -r name flags; do
    read -ra words <<<"$flags"
    whole=$dir/$name
    run 1 "$whole" --micro-batch 8 "${words[@]}" || continue
    ids=$(stream "$whole" | sed 's/.*: //' | tr ',\n' '  ' | wc -w)
    [ "$ids" -eq $((8 * steps)) ] && ok "$name: $ids ids of $steps steps" || bad "$name: $ids ids of $steps steps"
    for layout in "1|--micro-batch 1" "2|--micro-batch 2" "4|--micro-batch 1 --zero 2" "4|--micro-batch 2 --tp 2 --sp on" "4|--micro-batch 2 --pp 2 --pp-schedule 1f1b"; do
        read -ra more <<<"${layout#*|}"
        out=$dir/${name}_other
        rm -rf "$out"
        run "${layout%%|*}" "$out" "${words[@]}" "${more[@]}" && compare "$out" "$whole" "$name: ${layout%%|*} ranks ${more[*]}"
    done
    # 4 ranks, then 2 of another layout, then 1
    out=$dir/${name}_moved
    steps=5 run 4 "$out" --micro-batch 2 "${words[@]}" && steps=9 run 2 "$out" --tp 2 --micro-batch 4 --resume auto "${words[@]}" &&
        run 1 "$out" --micro-batch 2 --resume auto "${words[@]}" && compare "$out" "$whole" "$name: 4 ranks, after step 5 2 ranks --tp 2, after step 9 one"
done <<'END'
shuffled|--shuffle on
in-order|--shuffle off
varlen|--shuffle on --pack varlen
fit|--shuffle on --pack fit
END

# In the order of the files the ids count, epoch after epoch.
ids=$(stream "$dir/in-order" | sed 's/.*: //' | tr ',' '\n')
[ "$ids" = "$(for ((i = 0; i < 8 * steps; i++)); do echo $((i % 33)); done)" ] && ok "in order: 0 to 32, again and again" || bad "in order: $(echo "$ids" | head -40 | tr '\n' ' ')"
# Shuffled, every epoch holds each window once, in another order.
ids=$(stream "$dir/shuffled" | sed 's/.*: //' | tr ',' '\n')
first=$(echo "$ids" | head -33) second=$(echo "$ids" | head -66 | tail -33)
[ "$(echo "$first" | sort -n)" = "$(seq 0 32)" ] && [ "$(echo "$second" | sort -n)" = "$(seq 0 32)" ] && [ "$first" != "$second" ] &&
    ok "shuffled: each epoch has every window once, in an order of its own" || bad "shuffled: $(echo "$ids" | head -40 | tr '\n' ' ')"

tally
