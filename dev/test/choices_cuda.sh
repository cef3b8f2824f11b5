#!/usr/bin/env bash
# Algorithms of matrix products, chosen by timing on the simulated CUDA device (SIMCU_TIMES=n: which are fast is drawn from n): a resumed run gives
# the bits of one that went through, although other algorithms would win now; the file in --out that keeps the choices; one that is of no use;
# the environment's. Skipped without a CUDA toolkit, unless NEED_CUDA=1.
set -uo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=dev/test/common.sh
. dev/test/common.sh
need_ranks
need_cuda
sim=${SIM:-./train_gptcu_sim}
make -s build/make_tokens "${sim#./}" || exit 1
build/make_tokens "$dir/train.bin" 3000 101 3 || exit 1
unset TRAIN_GPT_ALGORITHMS

common=(--layers 2 --channels 64 --heads 4 --vocab 101 --seq 24 --micro-batch 2 --global-batch 4 --lr 3e-3 --schedule constant --steps 4 --save-every 2
    --async-save off --precision bf16 --train "$dir/train.bin")
# run TIMES RANKS OUT FLAG...
run() {
    local times=$1 count=$2 out=$3
    shift 3
    SIMCU_TIMES=$times ranks "$count" "$sim" "${common[@]}" --out "$out" "$@" && return 0
    bad "$count ranks $*: exit $?: $(grep -h 'train_gpt:\|simcu\|ERROR' "$dir/stderr" | head -3)"
    return 1
}
# stop at step 2, keeping the checkpoint and the log of a run of 4 steps
back() { rm -rf "$2" && cp -r "$1" "$2" && rm -rf "$2/step_00000004"; }

run 1 1 "$dir/whole" && [ "$(wc -l <"$dir/whole/algorithms.txt")" -gt 10 ] && head -n 1 "$dir/whole/algorithms.txt" | grep -q '^train_gpt algorithms'
verdict $? "choices are kept: $(wc -l <"$dir/whole/algorithms.txt") lines"
back "$dir/whole" "$dir/again" && run 2 1 "$dir/again" --resume auto && [ "$(facts "$dir/again")" = "$(facts "$dir/whole")" ] &&
    cmp -s "$dir/whole/algorithms.txt" "$dir/again/algorithms.txt"
verdict $? "resumed with other times: the same bits, no choice anew"
back "$dir/whole" "$dir/other" && rm "$dir/other/algorithms.txt" && run 2 1 "$dir/other" --resume auto && [ "$(facts "$dir/other")" != "$(facts "$dir/whole")" ]
verdict $? "without the file other algorithms win, with other bits"
rm -rf "$dir/fresh" && mkdir "$dir/fresh" && cp "$dir/whole/algorithms.txt" "$dir/fresh" && run 3 1 "$dir/fresh" && [ "$(facts "$dir/fresh")" = "$(facts "$dir/whole")" ]
verdict $? "a new run in the same directory: the same bits"

run 1 2 "$dir/two" --zero 1 && [ -s "$dir/two/algorithms.txt" ] && [ -s "$dir/two/algorithms_1.txt" ]
verdict $? "2 ranks: a file each"
back "$dir/two" "$dir/two_again" && run 2 2 "$dir/two_again" --zero 1 --resume auto && [ "$(facts "$dir/two_again")" = "$(facts "$dir/two")" ]
verdict $? "2 ranks resumed with other times: the same bits"

# set aside with one line, then begun anew
for what in "another device" "a line cut short" "not ours"; do
    back "$dir/whole" "$dir/bad"
    case $what in
    "another device") sed -i '1s/$/ of another maker/' "$dir/bad/algorithms.txt" ;;
    "a line cut short") truncate -s -9 "$dir/bad/algorithms.txt" ;;
    "not ours") echo hello >"$dir/bad/algorithms.txt" ;;
    esac
    cp "$dir/bad/algorithms.txt" "$dir/kept"
    run 1 1 "$dir/bad" --resume auto && [ "$(grep -c 'set aside' "$dir/stderr")" -eq 1 ] && cmp -s "$dir/bad/algorithms.txt.old" "$dir/kept" &&
        [ "$(head -n 1 "$dir/bad/algorithms.txt")" = "$(head -n 1 "$dir/whole/algorithms.txt")" ] && [ "$(facts "$dir/bad")" = "$(facts "$dir/whole")" ]
    verdict $? "a file of $what is set aside: $(grep -h 'set aside' "$dir/stderr" | cut -c1-100)"
done

TRAIN_GPT_ALGORITHMS=$dir/mine run 1 1 "$dir/named" --steps 2 && [ ! -e "$dir/named/algorithms.txt" ] && [ "$(wc -l <"$dir/mine")" -gt 10 ]
verdict $? "TRAIN_GPT_ALGORITHMS counts, and nothing is kept in --out"
echo hello >"$dir/mine"
TRAIN_GPT_ALGORITHMS=$dir/mine run 1 1 "$dir/named2" --steps 2 && [ ! -e "$dir/named2/algorithms.txt" ] && [ "$(cat "$dir/mine")" = hello ] &&
    [ "$(grep -c 'goes on without it' "$dir/stderr")" -eq 1 ]
verdict $? "the user's file, of no use: left alone"

tally
