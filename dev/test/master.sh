#!/usr/bin/env bash
# bf16 weights without an fp32 copy (--master none): near the losses of a run with one; the same bits with every ZeRO stage, which divides the weights
# differently; checkpoints without a copy, which go on in another layout, and not in a run that has one.
set -uo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=dev/test/common.sh
. dev/test/common.sh
need_ranks
make -s train_gpt build/make_tokens build/compare_checkpoints || exit 1
build/make_tokens "$dir/train.bin" 20000 101 3 || exit 1
common=(--layers 3 --channels 64 --heads 4 --vocab 101 --seq 32 --micro-batch 4 --global-batch 8 --lr 3e-3 --warmup 5 --steps 30 --precision bf16 --train "$dir/train.bin"
    --save-every 15 --keep 9)
# run NAME RANKS FLAG...
run() {
    local name=$1 count=$2
    shift 2
    ranks "$count" ./train_gpt "${common[@]}" --out "$dir/$name" "$@" && return 0
    bad "$count ranks $*: exit $?: $(grep -h 'train_gpt:' "$dir/stderr" | head -2)"
    return 1
}

run exact 1 && run one 1 --master none && apart=$(close "$(field "$dir/one" loss)" "$(field "$dir/exact" loss)" 2e-2)
verdict $? "1 rank, losses with and without a copy: $apart"
[ "$(facts "$dir/one")" != "$(facts "$dir/exact")" ]
verdict $? "and they are two things"
! grep -q 'master/' "$dir/one/step_00000030/manifest.json" && grep -q 'master/' "$dir/exact/step_00000030/manifest.json"
verdict $? "its checkpoint holds no copy"

run zero0 2 --master none && apart=$(close "$(field "$dir/zero0" loss)" "$(field "$dir/one" loss)" 2e-2)
verdict $? "2 ranks: losses $apart"
for zero in 1 2 3; do
    run zero$zero 2 --master none --zero $zero && [ "$(facts "$dir/zero$zero")" = "$(facts "$dir/zero0")" ] && build/compare_checkpoints "$dir/zero$zero/step_00000030" "$dir/zero0/step_00000030" >/dev/null
    verdict $? "zero $zero: the same bits as without"
done
run tp 2 --master none --tp 2 --sp on && apart=$(close "$(field "$dir/tp" loss)" "$(field "$dir/one" loss)" 2e-2)
verdict $? "tp 2: losses $apart"

# half a run with one layout, the other half with another
run moved 2 --master none --zero 3
rm -rf "$dir/moved/step_00000030"
run moved 2 --master none --zero 1 --resume auto && [ "$(facts "$dir/moved")" = "$(facts "$dir/zero0")" ]
verdict $? "zero 3, resumed with zero 1: the same bits"
rm -rf "$dir/moved/step_00000030"
ranks 1 ./train_gpt "${common[@]}" --out "$dir/moved" --resume auto
[ $? -eq 2 ] && grep -q "master: got 'fp32', the checkpoint .* was made with 'none'" "$dir/stderr"
verdict $? "with a copy it does not go on: $(head -c 150 "$dir/stderr")"
ranks 1 ./train_gpt "${common[@]}" --out "$dir/begun" --init-from "$dir/zero0/step_00000030" --steps 5 --master none && apart=$(field "$dir/begun" loss | head -n 1)
awk -v a="$apart" -v b="$(field "$dir/zero0" loss | tail -n 1)" 'BEGIN { exit !(a > 0 && a < b + 0.3) }'
verdict $? "a new run from its weights begins at loss $apart"
tally
