#!/usr/bin/env bash
# Bad input from end to end: every command line of the table must end with its exit code and exactly one line on stderr that
# matches its pattern. TRAIN=./train_gpt_asan runs the same table under AddressSanitizer.
set -uo pipefail
cd "$(dirname "$0")/../.."
train=${TRAIN:-./train_gpt}
make -s build/make_tokens "${train#./}" || exit 1
dir=$(mktemp -d)
trap 'umount "$dir/small" 2>/dev/null; rm -rf "$dir"' EXIT
passed=0 failed=0

# expect CODE PATTERN FLAG...   with pattern "-": stderr must be empty
expect() {
    local code=$1 pattern=$2 status lines told=no
    shift 2
    timeout 120 "$train" "$@" >"$dir/stdout" 2>"$dir/stderr" </dev/null
    status=$?
    lines=$(wc -l <"$dir/stderr")
    if [ "$pattern" = - ]; then
        [ -s "$dir/stderr" ] || told=yes
    elif [ "$lines" -eq 1 ] && grep -qE -- "$pattern" "$dir/stderr"; then
        told=yes
    fi
    if [ $status -eq "$code" ] && [ $told = yes ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        printf 'FAILED: %s\n  wanted exit %s and /%s/, got exit %s and %s line(s):\n' "$*" "$code" "$pattern" $status "$lines"
        head -5 "$dir/stderr" | cut -c1-300 | sed 's/^/  | /'
    fi
}
# The same with flags that make a sound tiny run, which the others may override.
tiny() {
    local code=$1 pattern=$2
    shift 2
    expect "$code" "$pattern" --layers 1 --channels 32 --heads 2 --vocab 300 --seq 16 --micro-batch 2 --steps 2 --train "$dir/good.bin" "$@"
}

build/make_tokens "$dir/good.bin" 5000 300 || exit 1
build/make_tokens "$dir/wide.bin" 5000 1000 || exit 1
build/make_tokens "$dir/short.bin" 16 300 || exit 1
: >"$dir/empty.bin"
head -c 1000 "$dir/good.bin" >"$dir/stub.bin"
head -c 9000 "$dir/good.bin" >"$dir/truncated.bin"
cp "$dir/good.bin" "$dir/good_too.bin"
{ cat "$dir/good.bin"; printf 'xx'; } >"$dir/longer.bin"
head -c 8192 "$train" >"$dir/foreign.bin"
{ head -c 4 "$dir/good.bin"; printf '\x09\0\0\0'; tail -c +9 "$dir/good.bin"; } >"$dir/version.bin"
cp "$dir/good.bin" "$dir/sidecar.bin"
echo '{"vocab_size": ' >"$dir/sidecar.json"
mkdir "$dir/directory.bin"
ln -s "$dir/nowhere" "$dir/dangling.bin"
printf 'lr 1e-3\nseq = 12x\n' >"$dir/bad.cfg"
printf 'train = %s\nlayers 1\nchannels 32\nheads 2\nvocab 300\nseq 16\nsteps 1\n' "$dir/good.bin" >"$dir/good.cfg"

echo "command line"
expect 0 - --help
expect 0 - --version
expect 2 'gpt2-124m or another' --model gpt2 --dry-run
expect 0 - --model list
expect 2 '--bogus' --bogus 3
expect 2 '--bogus' --bogus=3
expect 2 "'word'" word
expect 2 "'-h'" -h
expect 2 '--lr' --lr
expect 2 '--help' --help=yes
tiny 2 '--steps.*3x' --steps 3x
tiny 2 '--steps.*abc' --steps abc
tiny 2 '--steps' --steps ''
tiny 2 '--steps.*-1' --steps -1
tiny 2 '--steps' --steps=99999999999999999999
tiny 2 '--lr.*3x' --lr 3x
tiny 2 '--lr.*nan' --lr nan
tiny 2 '--lr.*inf' --lr inf
tiny 2 '--lr' --lr ''
tiny 2 '--lr.*-1' --lr -1
tiny 2 '--lr.*0x1' --lr 0x1
tiny 2 '--beta1' --beta1 1
tiny 2 '--dropout' --dropout 1
tiny 2 '--precision.*fp99.*fp32' --precision fp99
tiny 2 '--device' --device abacus
tiny 2 '--graph on: --device cpu' --graph on
tiny 2 '--graph on: --device cpu' --graph on --dry-run
tiny 2 '--seq' --seq 0
tiny 2 '--micro-batch' --micro-batch 0
tiny 3 '--config.*none.cfg' --config "$dir/none.cfg"
tiny 3 '--config' --config "$dir"
tiny 2 'bad.cfg:2: seq' --config "$dir/bad.cfg"
expect 0 - --config "$dir/good.cfg"

echo "model"
tiny 2 '--model.*gpt9.*list' --model gpt9
tiny 2 '--heads.*3' --heads 3
tiny 2 '--kv-heads' --kv-heads 3
tiny 2 '--head-size' --channels 512 --heads 2
tiny 2 '--head-size' --position rope --head-size 15
tiny 2 '--seq.*2048' --model gpt2-124m --seq 2048
tiny 2 '--global-batch' --global-batch 3
tiny 2 '--eot' --pack varlen
tiny 2 '--eot' --pack fit
tiny 2 '--eot' --pack fit --eot 300
tiny 3 'init-from|nowhere' --init-from "$dir/nowhere"
tiny 2 '--(micro-batch|seq)' --micro-batch 1048576 --seq 1073741824
expect 2 'memory.*GiB' --model llama3-405b --vocab 300 --seq 16 --steps 1 --train "$dir/good.bin"

tiny 2 '--master none: fp32' --master none
tiny 2 '--master.*fp32.none' --precision bf16 --master bf16
tiny 2 '--save-every.*often.*auto' --save-every often
tiny 2 '--save-every auto.*--mtbf' --save-every auto --out "$dir/out"
tiny 2 '--mtbf' --save-every auto --mtbf 0 --out "$dir/out"
tiny 2 '--async-save.*off|on' --async-save maybe

echo "layouts"
tiny 2 '--tp.*4.*ranks' --tp 4
tiny 2 '--tp.*wanted 1 to' --tp 0
tiny 2 '--pp.*ranks, 1' --pp 2
tiny 2 '--zero' --zero 4
tiny 2 '--virtual-stages.*1f1b' --layers 2 --virtual-stages 2
tiny 2 '--shard-group.*--zero 0' --shard-group 1
tiny 2 '--bucket-mb.*--zero 2' --zero 2 --bucket-mb 1
tiny 2 '--pp-schedule.*gpipe.1f1b' --pp-schedule pipedream
tiny 2 '--world.*--dry-run' --world 8
tiny 2 '--world' --dry-run --world 0
tiny 2 '--tp 8.*--heads 2' --dry-run --world 8 --tp 8
tiny 2 '--pp 4.*1 layers' --dry-run --world 4 --pp 4
tiny 2 "--trace: got '2', wanted A:B" --trace 2 --out "$dir/trace"
tiny 2 "--trace: got 'x:3'" --trace x:3 --out "$dir/trace"
tiny 2 '--trace: got .3:4., wanted steps of this run' --trace 3:4 --out "$dir/trace"
tiny 2 '--trace: wanted --out' --trace 1:2
tiny 2 '--save-every auto: wanted --mtbf' --save-every auto --out "$dir/auto"
# plans of absurd sizes are quick, too
expect 0 - --dry-run --model llama3-405b --world 1048576 --tp 8 --pp 16 --global-batch 65536 --micro-batch 1
expect 0 - --dry-run --layers 65536 --channels 128 --heads 1 --world 1048576 --pp 65536 --global-batch 1048576
expect 0 - --dry-run --world 4096 --pp 256 --pp-schedule interleaved --virtual-stages 16 --layers 4096 --global-batch 65536

echo "token files"
expect 2 '--train' --layers 1 --channels 32 --heads 2 --steps 1
tiny 3 '--train.*none' --train "$dir/none.bin"
tiny 3 '--train.*none' --train "$dir/none*.bin"
tiny 3 'empty.bin' --train "$dir/empty.bin"
tiny 3 'stub.bin' --train "$dir/stub.bin"
tiny 3 'truncated.bin' --train "$dir/truncated.bin"
tiny 3 'longer.bin' --train "$dir/longer.bin"
tiny 3 'foreign.bin' --train "$dir/foreign.bin"
tiny 3 'version.bin' --train "$dir/version.bin"
tiny 3 'sidecar.json' --train "$dir/sidecar.bin"
tiny 3 'directory.bin' --train "$dir/directory.bin"
tiny 3 'dangling.bin' --train "$dir/dangling.bin"
tiny 3 'foreign.bin' --train "$dir/[gf]o*n.bin"
tiny 3 'wide.bin.*(3[0-9][0-9]|[4-9][0-9][0-9]).*300' --train "$dir/wide.bin"
tiny 3 'short.bin' --train "$dir/short.bin"
tiny 3 '--val.*none' --val "$dir/none.bin"
tiny 3 'foreign.bin' --val "$dir/foreign.bin"
tiny 3 'wide.bin' --val "$dir/wide.bin"
tiny 3 'short.bin' --val "$dir/short.bin"
tiny 3 'wide.bin' --train "$dir/wide.bin" --dry-run

mkfifo "$dir/fifo.bin" "$dir/fifo.cfg"
cp "$dir/good.bin" "$dir/piped.bin"
mkfifo "$dir/piped.json"
tiny 3 'fifo.bin' --train "$dir/fifo.bin"
tiny 3 'fifo.bin' --val "$dir/fifo.bin"
tiny 3 'piped.json' --train "$dir/piped.bin"
tiny 3 '--config.*fifo.cfg' --config "$dir/fifo.cfg"

echo "writing"
mkdir "$dir/pipes" && mkfifo "$dir/pipes/log.jsonl"
tiny 5 'log.jsonl' --out "$dir/pipes"
tiny 5 'nowhere' --out /proc/nowhere/out
tiny 5 'good.bin' --out "$dir/good.bin"
mkdir "$dir/full"
ln -s /dev/full "$dir/full/log.jsonl"
tiny 5 'log.jsonl.*No space' --out "$dir/full"
tiny 5 'nowhere' --dump-grads /proc/nowhere/grads
mkdir "$dir/small"
if [ "$(id -u)" -eq 0 ] && mount -t tmpfs -o size=128k tmpfs "$dir/small" 2>/dev/null; then
    tiny 5 'small' --out "$dir/small/run" --channels 128
    if ls -d "$dir"/small/run/step_*[0-9] >/dev/null 2>&1; then
        failed=$((failed + 1))
        echo "FAILED: a checkpoint that did not fit was committed"
    else
        passed=$((passed + 1))
    fi
else
    echo "SKIP: checkpoint on a full file system: needs root and mount(2)"
fi

echo "resuming"
tiny 0 - --out "$dir/run"
tiny 2 '--resume|checkpoint' --out "$dir/run"
tiny 0 - --out "$dir/run" --resume auto
tiny 2 'channels' --out "$dir/run" --resume auto --channels 64 --steps 4
tiny 2 'norm' --out "$dir/run" --resume auto --norm rmsnorm --steps 4
tiny 2 '--seq' --out "$dir/run" --resume auto --seq 8 --steps 4
tiny 2 '--train|token' --out "$dir/run" --resume auto --train "$dir/good*.bin" --steps 4
tiny 3 'nowhere' --out "$dir/other" --resume "$dir/nowhere"
tiny 2 '--resume|--out' --resume auto
exec 9>"$dir/run/.lock"
if flock -n 9; then
    tiny 5 '--out' --out "$dir/run" --resume auto --steps 4
fi
exec 9>&-
checkpoint=$(ls -d "$dir"/run/step_*[0-9] | tail -1)
cp -r "$checkpoint" "$dir/copy"
for file in "$dir"/copy/*.safetensors; do truncate -s -8 "$file"; done
tiny 3 'truncated|bytes' --out "$dir/other" --resume "$dir/copy"
tiny 3 'truncated|bytes' --out "$dir/other2" --init-from "$dir/copy"

echo "numbers"
tiny 4 'non-finite|not finite' --lr 1000 --weight-decay 1000 --clip 0 --schedule constant --steps 200 --bad-steps 2
# a run that goes to its end, and ends in no number: the log is whole all the same
exploding=(--lr 1000 --weight-decay 1000 --clip 0 --schedule constant --save-every 0 --val "$dir/good.bin" --val-batches 1)
tiny 0 - "${exploding[@]}" --steps 2 --out "$dir/large"
tiny 4 'last validation, after step 3: the loss is not finite' "${exploding[@]}" --steps 3 --out "$dir/validated"
tiny 4 'step 4, the last: loss .*nan, .*not finite' "${exploding[@]}" --steps 4 --out "$dir/last"
for out in large validated last; do
    if tail -n 1 "$dir/$out/log.jsonl" | grep -q '^{"event":"end",'; then passed=$((passed + 1)); else failed=$((failed + 1)) && echo "FAILED: the log of $out has no end"; fi
done
tiny 2 'steps 0: trains nothing: wanted .*--val' --steps 0
tiny 0 - --steps 0 --dry-run
tiny 2 'dump-grads: .*--steps 0' --steps 0 --val "$dir/good.bin" --dump-grads "$dir/grads"
# weights that are infinite, or nearly
tiny 4 'last validation, after step 3: ' "${exploding[@]}" --save-every 3 --steps 3 --out "$dir/huge"
tiny 4 'sampling, after step 0: the logits are not finite' --steps 0 --init-from "$dir/huge/step_00000003" --sample-every 1 --sample-tokens 3

echo "traces"
# that cannot be written: the training is saved, and the exit code tells
mkdir -p "$dir/untraced/trace.json"
tiny 5 'trace.json.*directory' --steps 4 --trace 1:2 --out "$dir/untraced"
if [ -d "$dir/untraced/step_00000004" ]; then passed=$((passed + 1)); else failed=$((failed + 1)) && echo "FAILED: a trace that cannot be written: no checkpoint"; fi
# a run that goes on behind the steps of the trace leaves it
tiny 0 - --steps 4 --trace 1:2 --schedule constant --out "$dir/traced"
cp "$dir/traced/trace.json" "$dir/trace.json"
tiny 0 - --steps 6 --trace 1:2 --schedule constant --out "$dir/traced" --resume auto
if cmp -s "$dir/traced/trace.json" "$dir/trace.json"; then passed=$((passed + 1)); else failed=$((failed + 1)) && echo "FAILED: the trace was overwritten"; fi

echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
