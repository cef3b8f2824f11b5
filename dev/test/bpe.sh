#!/usr/bin/env bash
# Byte-level BPE end to end: text to token files and back, a tiny run that samples text with the data's tokenizer and with --tokenizer, what
# is refused with which line.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit
# shellcheck source=dev/test/common.sh
. dev/test/common.sh
make -s train_gpt tokenize || exit 1
fixtures=dev/fixtures/tokenizer
# refused CODE PATTERN COMMAND...: this exit code and one line that matches
refused() {
    local code=$1 pattern=$2 status
    shift 2
    timeout 60 "$@" >"$dir/stdout" 2>"$dir/stderr" </dev/null
    status=$?
    [ $status -eq "$code" ] && [ "$(wc -l <"$dir/stderr")" -eq 1 ] && grep -qE -- "$pattern" "$dir/stderr"
    verdict $? "refused (exit $status): $(head -n 1 "$dir/stderr" | cut -c1-130)"
}
train() { timeout 120 ./train_gpt --layers 1 --channels 32 --heads 2 --seq 32 --micro-batch 2 --steps 3 --sample-tokens 20 "$@" >"$dir/stdout" 2>"$dir/stderr" </dev/null; }

echo "token files"
cat README.md train_gpt.c >"$dir/text.txt"
printf 'it\xe2\x80\x99s \xff\xfe \xe2\x82 \r\n  <|endoftext|> \xf0\x9f\x98\x80\n' >>"$dir/text.txt"
for name in gpt2 llama3 pair; do
    file=$fixtures/$name
    [ -d "$file" ] || file=$file.json
    ./tokenize --tokenizer $file --out "$dir/$name" "$dir/text.txt" >/dev/null && ./tokenize --show "$dir/$name.bin" >"$dir/back.txt"
    verdict $? "$name: written and shown"
    cmp -s <(head -c "$(stat -c %s "$dir/text.txt")" "$dir/back.txt") "$dir/text.txt"
    verdict $? "$name: the same bytes come back"
done
grep -q '"vocab_size": 600, "eot_id": 0, "documents": 1' "$dir/gpt2.json" && grep -q "\"tokenizer\": \"$PWD/$fixtures/gpt2.json\"" "$dir/gpt2.json"
verdict $? "gpt2: $(cat "$dir/gpt2.json")"
grep -q '"vocab_size": 602, "eot_id": 601' "$dir/llama3.json"
verdict $? "llama3: eot by its usual name"
cmp -s "$dir/gpt2.bin" "$dir/pair.bin"
verdict $? "vocab.json and merges.txt give the ids of tokenizer.json"
# documents of 9 MB, cut and shared by threads, or not
for _ in $(seq 70); do cat "$dir/text.txt"; done >"$dir/long.txt"
OMP_NUM_THREADS=1 ./tokenize --tokenizer $fixtures/llama3.json --out "$dir/one" "$dir/long.txt" >/dev/null && OMP_NUM_THREADS=4 ./tokenize --tokenizer $fixtures/llama3.json \
    --out "$dir/four" - <"$dir/long.txt" >/dev/null && cmp -s "$dir/one.bin" "$dir/four.bin"
verdict $? "one thread or four: the same $(stat -c %s "$dir/one.bin") bytes"
./tokenize --show "$dir/one.bin" >"$dir/back.txt" && cmp -s <(head -c "$(stat -c %s "$dir/long.txt")" "$dir/back.txt") "$dir/long.txt"
verdict $? "and all of the text comes back"
./tokenize --tokenizer $fixtures/llama3.json --eot '<|begin_of_text|>' --lines --out "$dir/lines" README.md >/dev/null && grep -q '"eot_id": 600' "$dir/lines.json"
verdict $? "--eot names another end of document"
cp $fixtures/llama3.json "$dir/moved.json" && ./tokenize --tokenizer "$dir/moved.json" --out "$dir/beside" README.md >/dev/null && grep -q '"tokenizer": "moved.json"' "$dir/beside.json"
verdict $? "a tokenizer beside the data is named by its file"

echo "runs"
train --train "$dir/gpt2.bin" --prompt 'Token files are' && grep -q 'Token files are' "$dir/stdout"
verdict $? "the data's tokenizer: $(grep -a 'Token files are' "$dir/stdout" | head -n 1 | cut -c1-80)"
mv "$dir/beside.json" "$dir/none.json"
refused 2 '^train_gpt: --prompt: the tokenizer of the data \(unknown\) is not there, wanted --tokenizer' \
    ./train_gpt --layers 1 --channels 32 --heads 2 --vocab 700 --train "$dir/beside.bin" --prompt x
train --train "$dir/beside.bin" --tokenizer $fixtures/llama3.json --prompt $'caf\xc3\xa9 \xe6\x97\xa5\xe6\x9c\xac' --dry-run && grep -q 'vocabulary 602' "$dir/stdout"
verdict $? "--tokenizer sets the vocabulary"
train --train "$dir/beside.bin" --tokenizer $fixtures/llama3.json --prompt $'caf\xc3\xa9 \xe6\x97\xa5\xe6\x9c\xac' --out "$dir/run" && grep -q $'caf\xc3\xa9 \xe6\x97\xa5\xe6\x9c\xac' "$dir/stdout"
verdict $? "--tokenizer: $(grep -a caf "$dir/stdout" | head -n 1 | cut -c1-80)"

echo "refusals"
flags=(--layers 1 --channels 32 --heads 2 --steps 1)
refused 3 "^train_gpt: --tokenizer: has 602 tokens, the token files say 600" ./train_gpt "${flags[@]}" --train "$dir/gpt2.bin" --tokenizer $fixtures/llama3.json
refused 2 "^train_gpt: --vocab: got 300, the tokenizer has 602" ./train_gpt "${flags[@]}" --train "$dir/beside.bin" --vocab 300 --tokenizer $fixtures/llama3.json
refused 3 "^train_gpt: .*/none: cannot open: No such file" ./train_gpt "${flags[@]}" --train "$dir/gpt2.bin" --tokenizer "$dir/none"
refused 3 "^train_gpt: README.md: line 1: not JSON" ./train_gpt "${flags[@]}" --train "$dir/gpt2.bin" --tokenizer README.md
refused 3 "^tokenize: $dir: holds no tokenizer.json" ./tokenize --tokenizer "$dir" --out "$dir/x" README.md
refused 2 "^tokenize: --eot: got '<none>', wanted a special token" ./tokenize --tokenizer $fixtures/gpt2.json --eot '<none>' --out "$dir/x" README.md
sed 's/"type":"NFC"/"type":"NFKC"/' $fixtures/qwen.json >"$dir/nfkc.json"
refused 3 "^tokenize: .*nfkc.json: normalizer: got 'NFKC', wanted none or NFC" ./tokenize --tokenizer "$dir/nfkc.json" --out "$dir/x" README.md
[ ! -e "$dir/x.bin" ] && [ ! -e "$dir/x.bin.tmp" ]
verdict $? "what is refused leaves no file"

tally
