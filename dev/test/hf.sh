#!/usr/bin/env bash
# Hugging Face directories from end to end: import on any layout and export from it are a conversion without a trainer, byte for byte; training from
# them; what an export holds; memory of a conversion; disks that fail; what is refused, and how. Logits: test_hf.c; transformers itself:
# dev/reference/export_hf.py --verify.
#
# usage: hf.sh [--one-rank]   without MPI
set -uo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=dev/test/common.sh
. dev/test/common.sh
make -s build/make_tokens build/peak_memory build/shim_io.so "${train#./}" || exit 1
export ASAN_OPTIONS=${ASAN_OPTIONS:+$ASAN_OPTIONS:}verify_asan_link_order=0 # the library that makes calls fail is loaded first
fixtures=dev/fixtures/hf
build/make_tokens "$dir/61.bin" 1000 61 3 || exit 1

# expect CODE PATTERN FLAG...: exit code and the one line on stderr ("-": none)
expect() {
    local code=$1 pattern=$2 status
    shift 2
    timeout 60 "$train" "$@" >"$dir/stdout" 2>"$dir/stderr" </dev/null
    status=$?
    if [ "$pattern" = - ]; then
        [ $status -eq "$code" ] && ! [ -s "$dir/stderr" ]
    else
        [ $status -eq "$code" ] && [ "$(wc -l <"$dir/stderr")" -eq 1 ] && grep -qE -- "$pattern" "$dir/stderr"
    fi
    verdict $? "exit $code /$pattern/: $*"
    # shellcheck disable=SC2181
    [ $status -eq "$code" ] || sed 's/^/  | /' "$dir/stderr" | head -3
}
same() { cmp -s "$1" "$2"; }
convert() { "$train" --steps 0 --export-hf "$@" >"$dir/stdout" 2>"$dir/stderr"; }

echo "conversion without a trainer"
for name in gpt2 gpt2_untied llama llama_bias mistral qwen2 qwen3; do
    for precision in fp32 bf16; do convert "$dir/$name.$precision" --init-from $fixtures/$name --precision $precision || bad "$name $precision: $(cat "$dir/stderr")"; done
    # what is written is read again as the same; in files of 5 KB as well
    convert "$dir/$name.parts" --init-from "$dir/$name.fp32" --export-shard-mb 0.005 && convert "$dir/$name.again" --init-from "$dir/$name.parts" &&
        same "$dir/$name.fp32/model.safetensors" "$dir/$name.again/model.safetensors" && same "$dir/$name.fp32/config.json" "$dir/$name.again/config.json"
    verdict $? "$name: through $(find "$dir/$name.parts" -name 'model-*' | wc -l) files and back, every byte"
    ids='"(bos|eos|pad)_token_id"'
    [ "$(grep -E "$ids" "$dir/$name.fp32/config.json" | tr -d ' ,\n' | sed 's/.*bos/bos/')" = "$(grep -E "$ids" $fixtures/$name/config.json | tr -d ' ,\n' | sed 's/.*bos/bos/')" ]
    verdict $? "$name: special tokens stay"
done
convert "$dir/own" --init-from $fixtures/qwen2 && same "$dir/own/model.safetensors" "$dir/qwen2.bf16/model.safetensors"
verdict $? "without --precision the stored type stays"
sizes=$(find "$dir/llama.parts" -name 'model-*' -size +6k | wc -l)
[ "$sizes" -eq 0 ] && [ "$(find "$dir/llama.parts" -name 'model-*' | wc -l)" -gt 4 ] && grep -q '"total_size": 29632' "$dir/llama.parts/model.safetensors.index.json"
verdict $? "files of at most 5 KB and an index"
[ -z "$(find "$dir" -name '*.tmp')" ]
verdict $? "nothing is left under temporary names"

echo "imports and exports of any layout"
if [ "${1:-}" != --one-rank ] && command -v mpirun >/dev/null && make -s -n banner | grep -q 'MPI yes'; then
    while IFS='|' read -r name count precision flags; do
        read -ra words <<<"$flags"
        rm -rf "$dir/out" "$dir/whole"
        ranks "$count" "$train" --steps 0 --init-from "$fixtures/$name" --precision "$precision" --seq 8 --micro-batch 1 --val "$dir/61.bin" --val-batches 4 \
            "${words[@]}" --export-shard-mb 0.01 --export-hf "$dir/out" || bad "$name $flags: $(tail -n 1 "$dir/stderr")"
        convert "$dir/whole" --init-from "$dir/out" && same "$dir/whole/model.safetensors" "$dir/$name.$precision/model.safetensors" && same "$dir/whole/config.json" "$dir/$name.$precision/config.json"
        verdict $? "$name, $precision, $count ranks $flags: every byte"
    done <<'END'
gpt2|2|fp32|--tp 2
gpt2|4|bf16|--tp 2 --sp on --pp 2
gpt2|4|fp32|--pp 2 --zero 2
llama|4|fp32|--tp 4
llama|4|bf16|--zero 3
llama|4|fp32|--tp 2 --pp 2
llama_bias|2|fp32|--tp 2 --sp on
mistral|4|fp32|--tp 2 --zero 3
qwen2|4|bf16|--tp 2 --zero 1
qwen3|4|fp32|--tp 4
qwen3|4|fp32|--zero 3 --shard-group 2
END
    echo "trained on several ranks"
    train_flags=(--init-from $fixtures/llama --train "$dir/61.bin" --seq 12 --micro-batch 1 --global-batch 4 --lr 1e-2 --steps 3 --save-every 3)
    expect 0 - "${train_flags[@]}" --out "$dir/one" --export-hf "$dir/one.hf"
    ranks 4 "$train" "${train_flags[@]}" --tp 2 --pp 2 --out "$dir/four" --export-hf "$dir/four.hf"
    verdict $? "four ranks: exit 0"
    worst=$(close "$(field "$dir/four" loss)" "$(field "$dir/one" loss)" 1e-5)
    verdict $? "losses of 4 ranks are those of one, within $worst"
    convert "$dir/four.again" --resume "$dir/four/step_00000003" && same "$dir/four.hf/model.safetensors" "$dir/four.again/model.safetensors" &&
        same "$dir/four.hf/config.json" "$dir/four.again/config.json"
    verdict $? "their checkpoint, converted on one rank, is what they exported, every byte"
    ranks 2 "$train" --steps 0 --init-from $fixtures/llama --export-hf "$dir/never"
    [ $? -eq 2 ] && [ "$(grep -c '^train_gpt: ' "$dir/stderr")" -eq 1 ] && grep -q 'converts, on one rank: got 2' "$dir/stderr"
    verdict $? "two ranks do not convert"
    ranks 2 env LD_PRELOAD=build/shim_io.so SHIM_PATH=fail.tmp SHIM_CALL=write SHIM_AT=1 SHIM_ERROR=28 "$train" --steps 0 --init-from $fixtures/llama --val "$dir/61.bin" \
        --seq 8 --tp 2 --export-hf "$dir/fail"
    [ $? -eq 5 ] && grep -q 'fail.tmp/model.safetensors: cannot write' "$dir/stderr" && [ ! -e "$dir/fail" ] && [ ! -e "$dir/fail.tmp" ]
    verdict $? "a full disk ends all ranks with exit 5, nothing is left"
else
    echo "  skipped: no MPI"
fi

echo "training"
tune=(--train "$dir/61.bin" --seq 12 --micro-batch 4 --lr 1e-2)
expect 0 - --init-from $fixtures/qwen3 "${tune[@]}" --steps 4 --save-every 2 --precision bf16 --out "$dir/run" --export-hf "$dir/run.hf"
head -n 1 "$dir/run/log.jsonl" | grep -q '"step":1,"loss":4.[5-9]' # of the fixture's weights: a new model's is 4.11
verdict $? "the first loss is that of the imported weights"
for from in --resume --init-from; do
    rm -rf "$dir/again"
    convert "$dir/again" $from "$dir/run/step_00000004" && same "$dir/run.hf/model.safetensors" "$dir/again/model.safetensors" && same "$dir/run.hf/config.json" "$dir/again/config.json"
    verdict $? "$from a bf16 checkpoint, as bf16: what the run exported"
done
convert "$dir/master" --resume auto --out "$dir/run" --precision fp32 && convert "$dir/rounded" --init-from "$dir/master" --precision bf16 &&
    same "$dir/rounded/model.safetensors" "$dir/run.hf/model.safetensors" && [ "$(stat -c %s "$dir/master/model.safetensors")" -gt "$(stat -c %s "$dir/run.hf/model.safetensors")" ] &&
    convert "$dir/widened" --init-from "$dir/run.hf" --precision fp32 && ! same "$dir/widened/model.safetensors" "$dir/master/model.safetensors"
verdict $? "as fp32: the master weights"
expect 0 - --resume auto --out "$dir/run" "${tune[@]}" --steps 4 --precision bf16 --export-hf "$dir/run.hf"
grep -q 'nothing to do' "$dir/stdout"
verdict $? "a finished run whose export is there has nothing to do"
expect 0 - --resume auto --out "$dir/run" "${tune[@]}" --steps 4 --precision bf16 --export-hf "$dir/late.hf" --save-every 0
same "$dir/late.hf/model.safetensors" "$dir/run.hf/model.safetensors"
verdict $? "one whose export is not there writes it"
expect 0 - --resume auto --out "$dir/run" "${tune[@]}" --steps 6 --precision bf16 # the shape comes from the checkpoint
expect 0 - --model $fixtures/llama/config.json "${tune[@]}" --steps 1 --out "$dir/scratch" --export-hf "$dir/scratch.hf" --save-every 0
diff <(grep -v _token_id "$dir/scratch.hf/config.json") <(grep -v _token_id "$dir/llama.fp32/config.json") >/dev/null && ! same "$dir/scratch.hf/model.safetensors" "$dir/llama.fp32/model.safetensors"
verdict $? "--model config.json: its shape, other weights"
expect 0 - --model $fixtures/llama/config.json --layers 3 --vocab 80 "${tune[@]}" --steps 1 --export-hf "$dir/wide.hf"
grep -q '"num_hidden_layers": 3' "$dir/wide.hf/config.json" && grep -q '"vocab_size": 80' "$dir/wide.hf/config.json"
verdict $? "flags override --model config.json"
tokenizer=dev/fixtures/tokenizer/gpt2.json
eot=$(tr -d ' \n' <$tokenizer | grep -oE '"id":[0-9]+,"content":"<.endoftext.>"' | grep -oE '[0-9]+' | head -n 1)
small=(--layers 1 --channels 16 --heads 2 --seq 8 --vocab 2000)
expect 0 - "${small[@]}" --steps 0 --tokenizer $tokenizer --export-hf "$dir/text.hf"
same "$dir/text.hf/tokenizer.json" $tokenizer && grep -q "\"eos_token_id\": ${eot:-none}," "$dir/text.hf/config.json"
verdict $? "tokenizer.json is copied, its end of document is told (${eot:-none})"
mkdir "$dir/folder" && cp $tokenizer "$dir/folder/tokenizer.json"
convert "$dir/text2.hf" --init-from "$dir/text.hf" --tokenizer "$dir/folder" && same "$dir/text2.hf/tokenizer.json" $tokenizer
verdict $? "also from a directory, in a conversion"

echo "memory"
# 15M parameters in 8 layers: 60 MB, of which the largest tensor has 3
expect 0 - --layers 8 --channels 384 --heads 6 --vocab 2000 --seq 16 --micro-batch 1 --steps 0 --export-hf "$dir/large" --export-shard-mb 20
build/peak_memory "$dir/peak" "$train" --version >/dev/null && build/peak_memory "$dir/peak" "$train" --steps 0 --init-from "$dir/large" --export-hf "$dir/large2" >/dev/null
{ read -r base && read -r peak; } <"$dir/peak"
case $train in *asan*) bound=150000000 ;; *) bound=35000000 ;; esac # freed memory stays for a while
[ -n "$peak" ] && [ $((peak - base)) -lt $bound ] && [ "$(du -sb "$dir/large2" | cut -f1)" -gt 57000000 ]
verdict $? "a model of $(du -sb "$dir/large2" | cut -f1) bytes is converted in $((peak - base)) bytes (bound $bound)"
rm -rf "$dir/large" "$dir/large2"

echo "interrupted and failing"
mkdir "$dir/crash.tmp" && echo old >"$dir/crash.tmp/model-00001-of-00007.safetensors"
convert "$dir/crash" --init-from $fixtures/llama && [ ! -e "$dir/crash.tmp" ] && [ ! -e "$dir/crash/model-00001-of-00007.safetensors" ]
verdict $? "what an interrupted export has left is cleared"
mkdir "$dir/mine.tmp" && echo mine >"$dir/mine.tmp/notes"
expect 5 "holds 'notes', which is not of an export" --steps 0 --init-from $fixtures/llama --export-hf "$dir/mine"
[ -s "$dir/mine.tmp/notes" ] && [ ! -e "$dir/mine" ]
verdict $? "and nothing else"
while read -r call at error part; do
    LD_PRELOAD=build/shim_io.so SHIM_PATH=${part:-fail} SHIM_CALL=$call SHIM_AT=$at SHIM_ERROR=$error "$train" --steps 0 --init-from $fixtures/llama --export-hf "$dir/fail" >"$dir/stdout" 2>"$dir/stderr"
    [ $? -eq 5 ] && [ "$(wc -l <"$dir/stderr")" -eq 1 ] && [ ! -e "$dir/fail" ] && [ ! -e "$dir/fail.tmp" ]
    verdict $? "$call $at fails with $error: exit 5, nothing is left ($(cut -c1-100 "$dir/stderr"))"
    rm -rf "$dir/fail" "$dir/fail.tmp"
done <<END
write 1 28
write 2 28
fsync 1 5
fsync 2 5
close 1 5
rename 1 30
mkdir 1 13
statvfs 2 short $dir
END

echo "refused"
mkdir "$dir/full" "$dir/void" && echo x >"$dir/full/x"
expect 2 "export-hf: '.*full' is there already" --steps 0 --init-from $fixtures/llama --export-hf "$dir/full"
expect 2 "export-hf: '.*full' is there already" --init-from $fixtures/llama "${tune[@]}" --steps 2 --export-hf "$dir/full"
expect 2 "export-hf: '.*x' is there already" --steps 0 --init-from $fixtures/llama --export-hf "$dir/full/x"
expect 0 - --steps 0 --init-from $fixtures/llama --export-hf "$dir/void/"
expect 2 'export-hf: norm rmsnorm, position learned' "${small[@]}" --norm rmsnorm --train "$dir/61.bin" --steps 2 --export-hf "$dir/none"
expect 2 'only converts, on one rank: wanted no --tp' --steps 0 --init-from $fixtures/llama --export-hf "$dir/never" --tp 3
cp -r $fixtures/llama "$dir/nan" && chmod -R u+w "$dir/nan"
printf '\377\377\377\377' | dd of="$dir/nan/model.safetensors" bs=1 seek=$(($(stat -c %s "$dir/nan/model.safetensors") - 4)) conv=notrunc status=none
expect 3 'init-from: tensor .* holds -?nan' --init-from "$dir/nan" "${tune[@]}" --steps 1
expect 3 'none.*holds no checkpoint to export' --steps 0 --resume auto --out "$dir/none" --export-hf "$dir/never"
expect 2 'resume auto: wanted --out' --steps 0 --resume auto --export-hf "$dir/never"
expect 3 'llama: no manifest.json in it' --steps 0 --resume $fixtures/llama --export-hf "$dir/never"
expect 3 'neither manifest.json nor config.json' --init-from "$dir/void/.." "${tune[@]}"
expect 2 'model.channels: got 16 in the checkpoint, wanted 32' --init-from $fixtures/llama --channels 32 "${tune[@]}" --steps 1
expect 2 'model.kv_heads: got 2 in the checkpoint, wanted 4' --init-from $fixtures/llama --kv-heads 4 "${tune[@]}" --steps 1
expect 2 'model.tied: got false in the checkpoint, wanted true' --init-from $fixtures/llama --tied on "${tune[@]}" --steps 1
expect 2 'model.rope_factor: got 8.0 in the checkpoint, wanted 0.0' --init-from $fixtures/llama --model llama-nano --vocab 61 --layers 2 --channels 16 --heads 4 --kv-heads 2 \
    --head-size 8 --ffn 24 --tied off --norm-eps 1e-3 --rope-theta 100 "${tune[@]}" --steps 1
expect 2 'model.norm_eps: got .* in the checkpoint, wanted' --steps 0 --init-from "$dir/run/step_00000004" --norm-eps 1e-4 --export-hf "$dir/never"
expect 2 'model.heads: got 4 in the checkpoint, wanted 2' --resume "$dir/run/step_00000004" --heads 2 "${tune[@]}" --precision bf16 --steps 9
expect 2 'seq: got 33, .*mistral has a sliding_window of 32' --init-from $fixtures/mistral "${tune[@]}" --seq 33 --steps 1
expect 2 'seq: got 33, .*config.json has a sliding_window of 32' --model $fixtures/mistral/config.json "${tune[@]}" --seq 33 --steps 1
expect 0 - --init-from $fixtures/mistral "${tune[@]}" --seq 32 --steps 1
expect 2 'seq: got 17, wanted at most the 16 learned positions of .*gpt2' --init-from $fixtures/gpt2 "${tune[@]}" --seq 17 --steps 1
expect 0 - --steps 0 --init-from $fixtures/gpt2 --val "$dir/61.bin" # as long as its positions
expect 2 'vocab: got 61, the tokenizer has' --init-from $fixtures/gpt2 --tokenizer $tokenizer --steps 0 --val "$dir/61.bin"
expect 2 'tokenizer: has .* tokens, the model 61' --init-from $fixtures/gpt2 --tokenizer $tokenizer --steps 0 --export-hf "$dir/never"
expect 2 'eot: got 61, wanted an id below' --init-from $fixtures/gpt2 --eot 61 --steps 0 --export-hf "$dir/never"
expect 2 "unknown preset '.*nothing.json'" --model "$dir/nothing.json" "${tune[@]}"
echo '{"model_type": "bert"}' >"$dir/bert.json"
expect 3 "bert.json: model_type: got 'bert'" --model "$dir/bert.json" "${tune[@]}"
head -c 3000 $fixtures/llama/model.safetensors >"$dir/void/model.safetensors"
mkdir "$dir/cut" && cp $fixtures/llama/config.json "$dir/cut/" && head -c 20000 $fixtures/llama/model.safetensors >"$dir/cut/model.safetensors"
expect 3 'cut/model.safetensors.*truncated' --init-from "$dir/cut" "${tune[@]}" --steps 1
expect 3 'cut/model.safetensors.*truncated' --steps 0 --init-from "$dir/cut" --export-hf "$dir/never"
[ ! -e "$dir/never" ] && [ ! -e "$dir/never.tmp" ] && [ ! -e "$dir/none" ]
verdict $? "nothing was written"
tally
