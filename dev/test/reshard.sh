#!/usr/bin/env bash
# Checkpoints across layouts: saved at step 3 in each layout, resumed in the same one (every bit: losses and the next checkpoint) and in
# another (losses of steps 4 to 6 are those of one rank that never stopped); loaded and saved again without a step (every bit);
# --init-from across layouts.
#
# usage: reshard.sh [--quick]   one layout only
set -uo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=dev/test/common.sh
. dev/test/common.sh
need_ranks
make -s build/make_tokens build/compare_checkpoints build/resave "${train#./}" || exit 1
for vocab in 127 301; do build/make_tokens "$dir/$vocab.bin" 4000 $vocab 3 || exit 1; done

# Vocabularies and widths that no number of ranks divides evenly; 5 layers: stages of different depth.
common=(--layers 5 --channels 24 --heads 4 --ffn 88 --seq 16 --micro-batch 1 --global-batch 8 --steps 6 --lr 1e-2 --save-every 3 --val-every 0
    --keep 10 --log-samples on --watchdog 60)
gpt=(--train "$dir/127.bin" --vocab 127 --dropout 0.1)
llama=(--train "$dir/301.bin" --vocab 301 --norm rmsnorm --position rope --activation swiglu --bias qkv --tied off --qk-norm on --kv-heads 2)
bf16=(--train "$dir/127.bin" --vocab 127 --precision bf16)

# trained OUT RANKS FLAG...
trained() {
    local out=$1 count=$2
    shift 2
    ranks "$count" "$train" "${common[@]}" "${model[@]}" --out "$out" "$@" && return
    bad "$out, $count ranks, $*: exit $?: $(tail -n 1 "$dir/stderr")"
    return 1
}
# resumed FROM OUT RANKS FLAG...: from step 3 of FROM
resumed() {
    local from=$1 out=$2
    shift 2
    mkdir -p "$out" && cp -r "$from/step_00000003" "$from/log.jsonl" "$out/" && trained "$out" "$@" --resume auto && grep -q '"step":4,' "$out/log.jsonl" &&
        grep -q '^resumed at step 3' "$dir/stdout"
}
samples() { sed -nE 's/.*"step":([0-9]+),.*"samples":\[([^]]*)\].*/\1 \2/p' "$1/log.jsonl"; }
# The first rank logs its own samples: are they its share of each step's?
share() {
    paste -d' ' <(samples "$1") <(samples "$one") | awk '
        { own = split($2, a, ","); all = split($4, b, ","); split("", seen); for (i = 1; i <= all; i++) seen[b[i]] = 1 }
        NF != 4 || $1 != $3 || own == 0 || all % own != 0 { bad = 1 }
        { for (i = 1; i <= own; i++) if (!(a[i] in seen)) bad = 1 }
        END { exit bad || NR != 6 }'
}
# as_one OUT NAME: the losses of steps 4 to 6 are those of one rank
as_one() {
    local worst
    worst=$(close "$(field "$1" loss 4)" "$(field "$one" loss 4)" $bound) && share "$1"
    verdict $? "$2: losses of steps 4 to 6 within $worst, the same samples"
}

# layouts NAME: lines of "name|ranks|flags"; each also resumes the one before it
check() {
    local name=$1 label count flags before=one
    one=$dir/$name.one
    model=("${@:2}")
    echo "$name"
    trained "$one" 1 || return
    while IFS='|' read -r label count flags; do
        local out=$dir/$name.$label words
        read -ra words <<<"$flags"
        trained "$out" "$count" "${words[@]}" || continue
        as_one "$out" "$label, whole"
        # the same layout: every bit
        resumed "$out" "$out.same" "$count" "${words[@]}" && [ "$(facts "$out.same")" = "$(facts "$out")" ] &&
            build/compare_checkpoints "$out/step_00000006" "$out.same/step_00000006" >"$dir/compare"
        verdict $? "$label, resumed by itself: every bit ($(cat "$dir/compare"))"
        # what the layout before it saved
        resumed "$dir/$name.$before" "$out.before" "$count" "${words[@]}" && as_one "$out.before" "$label resumes $before"
        # what it saved, on one rank
        [ "$before" = one ] || { resumed "$out" "$out.one" 1 && as_one "$out.one" "one rank resumes $label"; }
        # without a step: one rank's checkpoint through this layout, and this one's through one rank
        rm -rf "$dir/again" "$dir/back"
        ranks "$count" build/resave "${common[@]}" "${model[@]}" "${words[@]}" --resume "$one/step_00000003" --out "$dir/again" &&
            build/compare_checkpoints "$one/step_00000003" "$dir/again/step_00000003" >"$dir/compare" &&
            ranks 1 build/resave "${common[@]}" "${model[@]}" --resume "$out/step_00000006" --out "$dir/back" &&
            build/compare_checkpoints "$out/step_00000006" "$dir/back/step_00000006" >>"$dir/compare"
        verdict $? "$label: loaded and saved, every bit ($(tail -n 1 "$dir/compare"))"
        # weights only
        rm -rf "$dir/init"
        [ -d "$dir/$name.init" ] || trained "$dir/$name.init" 1 --steps 2 --init-from "$one/step_00000006"
        ranks "$count" "$train" "${common[@]}" "${model[@]}" "${words[@]}" --steps 2 --init-from "$one/step_00000006" --out "$dir/init" &&
            worst=$(close "$(field "$dir/init" loss)" "$(field "$dir/$name.init" loss)" $bound)
        verdict $? "$label: --init-from one rank's weights: losses within $worst"
        before=$label
    done
}

bound=1e-5
if [ "${1:-}" = --quick ]; then
    check gpt "${gpt[@]}" <<<'tp2-pp2-sp-zero1|8|--tp 2 --pp 2 --sp on --zero 1'
    tally
    exit
fi
check gpt "${gpt[@]}" <<'END'
tp2|2|--tp 2
pp2|2|--pp 2
tp2-pp2-sp-zero1|8|--tp 2 --pp 2 --sp on --zero 1
dp4-zero3|4|--zero 3
interleaved|2|--pp 2 --pp-schedule interleaved --virtual-stages 2
hybrid|4|--zero 2 --shard-group 2
END
check llama "${llama[@]}" <<'END'
tp4-sp|4|--tp 4 --sp on
pp4-zb|4|--pp 4 --pp-schedule zb
tp2-zero3|4|--tp 2 --zero 3
END
bound=2e-3
check bf16 "${bf16[@]}" <<'END'
dp2-zero3|2|--zero 3
tp2-pp2-zero1|4|--tp 2 --pp 2 --zero 1
END
tally
