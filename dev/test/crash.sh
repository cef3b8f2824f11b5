#!/usr/bin/env bash
# Nothing that happens to a job loses more than the steps since its last checkpoint. Jobs of 1 and 4 ranks are killed in training and in every
# phase of saving, their disks fail, their checkpoints are damaged: --resume auto goes on from the newest complete checkpoint, and in the end
# losses and checkpoints have the bits of a run that nothing happened to.
#
# usage: crash.sh [--long] [--late] [--seed N]   the same seed draws the same kills, faults and damages; --late: only whether files that are
# written while training goes on hold what they should
set -uo pipefail
cd "$(dirname "$0")/../.."
source dev/test/common.sh
kills=8 faults=7 flips=20 seed=1 long=0 only_late=0
while [ $# -gt 0 ]; do
    case $1 in
    --long) kills=110 faults=56 flips=500 long=1 ;;
    --late) only_late=1 ;;
    --seed) seed=$2 && shift ;;
    *) echo "usage: crash.sh [--long] [--late] [--seed N]" >&2 && exit 2 ;;
    esac
    shift
done
RANDOM=$seed
make -s build/make_tokens build/shim_io.so "${train#./}" || exit 1
# In memory where there is room: syncs of a busy disk prove nothing about processes.
where=/tmp
[ "$(df --output=avail -k /dev/shm 2>/dev/null | tail -1)" -gt 500000 ] 2>/dev/null && where=/dev/shm
rmdir "$dir" && dir=$(mktemp -d "$where/crash.XXXXXX")
job=
trap 'end_job; rm -rf "$dir"' EXIT
# what killed jobs leave goes with the directory
export OMPI_MCA_orte_tmpdir_base=$dir OMPI_MCA_btl_vader_backing_directory=$dir OMPI_MCA_osc_sm_backing_directory=$dir

sizes=(1)
command -v mpirun >/dev/null && make -s -n banner | grep -q 'MPI yes' && sizes=(1 4)
for i in 1 2 3; do build/make_tokens "$dir/train_$i.bin" $((380 + i)) 300 "$i" || exit 1; done
build/make_tokens "$dir/val.bin" 600 300 9 || exit 1
steps=60 every=4
common=(--layers 3 --channels 96 --heads 4 --vocab 300 --eot 299 --seq 32 --micro-batch 1 --global-batch 4 --steps $steps --lr 1e-3 --warmup 3
    --train "$dir/train_*.bin" --val "$dir/val.bin" --val-batches 2 --log-samples on --dropout 0.1 --save-every $every --keep 2 --resume auto --watchdog 60)

# ----------------------------------------------------------------------------
# Jobs. start RANKS OUT [FLAG...]: in the background, its environment from `faulty`; job: its process.
faulty=()
start() {
    local ranks=$1 out=$2 launch=()
    shift 2
    [ "$ranks" -eq 1 ] || launch=(mpirun -np "$ranks" --bind-to none)
    local layout=()
    [ "$ranks" -eq 1 ] || layout=(--tp 2 --zero 3)
    # in a subshell, for whose words on killed commands there is no reader
    (timeout --kill-after=5 120 "${launch[@]}" env "${faulty[@]}" "$train" "${common[@]}" "${layout[@]}" --out "$out" "$@" >"$dir/stdout" 2>"$dir/stderr" </dev/null
    exit $?) 2>/dev/null &
    job=$!
}
finish() {
    wait "$job"
    status=$?
    job=
}
# The processes of the job: subshell, timeout, then mpirun and ranks.
family() {
    local pid
    for pid in "$@"; do
        echo "$pid"
        # shellcheck disable=SC2046
        family $(pgrep -P "$pid")
    done
}
end_job() {
    [ -z "$job" ] || kill -9 $(family "$job" | tail -n +3) 2>/dev/null
    job=
}
ranks_of() { local pid; for pid in $(family "$job"); do [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$(basename "$train")" ] && echo "$pid"; done; }

newest() { ls -d "$1"/step_???????? 2>/dev/null | sed 's/.*_0*//' | sort -n | tail -1; }
told() { grep -o '"saved_step":[0-9]*' "$1/log.jsonl" 2>/dev/null | sed 's/.*://' | tail -1; }
# The run in OUT is finished, and has the bits of the reference of as many ranks.
same() {
    local out=$1 whole=$dir/whole_$2 name file
    [ "$(facts "$out")" = "$(facts "$whole")" ] && [ "$(facts "$out" | wc -l)" -eq $steps ] || return 1
    name=$(printf 'step_%08d' $steps)
    [ -e "$out/$name/manifest.json" ] || return 1
    for file in "$whole/$name"/*.safetensors; do cmp -s "$file" "$out/$name/${file##*/}" || return 1; done
    [ "$(ls "$out/$name")" = "$(ls "$whole/$name")" ]
}

for ranks in "${sizes[@]}"; do
    start "$ranks" "$dir/whole_$ranks" && finish
    [ $status -eq 0 ] && [ "$(facts "$dir/whole_$ranks" | wc -l)" -eq $steps ]
    verdict $? "$ranks ranks: a run in one piece"
done

# ----------------------------------------------------------------------------
# A file that is written late holds the values of its step all the same, and training does not wait for it.
echo "late files"
for ranks in "${sizes[@]}"; do
    faulty=(LD_PRELOAD="$PWD/build/shim_io.so" SHIM_PATH=safetensors SHIM_CALL=write SHIM_AT=1 SHIM_ALL=1 SHIM_ERROR=slow)
    start "$ranks" "$dir/late" --keep 100 --save-every 20 && finish
    late=$status
    faulty=()
    start "$ranks" "$dir/now" --keep 100 --save-every 20 --async-save off && finish
    differ=0 files=0
    for file in "$dir"/now/step_*/*.safetensors; do
        files=$((files + 1))
        cmp -s "$file" "$dir/late/${file#"$dir/now/"}" || differ=$((differ + 1))
    done
    [ "$late" -eq 0 ] && [ $status -eq 0 ] && [ $differ -eq 0 ] && [ $files -eq $((3 * ranks)) ] && [ "$(facts "$dir/late")" = "$(facts "$dir/now")" ]
    verdict $? "$ranks ranks: $files files as of a run that waits for them, $differ differ"
    grep '"saved_step":20,' "$dir/late/log.jsonl" | grep -v '"step":20,' >/dev/null
    verdict $? "$ranks ranks: steps were done before the file of step 20 was: $(grep -o '"step":[0-9]*,"saved_step":20' "$dir/late/log.jsonl")"
    start "$ranks" "$dir/soon" --save-every 30 && finish
    ! grep -q 'a save costs' "$dir/stdout" || bad "advice that nobody asked for"
    at=$(sed -nE 's/.*"event":"save","step":([0-9]+),"saved_step":30,.*/\1/p' "$dir/soon/log.jsonl")
    [ "${at:-0}" -ge 30 ] && [ "${at:-0}" -lt 60 ]
    verdict $? "$ranks ranks: the checkpoint of step 30 is there after step $at, not with that of step 60"
    start "$ranks" "$dir/auto" --save-every auto --mtbf 0.00002 --keep 100 && finish
    saves=$(grep -o '"saved_step":[0-9]*' "$dir/auto/log.jsonl" | sed 's/.*://' | tr '\n' ' ')
    [ $status -eq 0 ] && [[ "$saves" =~ ^10\ .*60\ $ ]] && grep -q '^a save costs .* loses the least$' "$dir/stdout" && [ "$(facts "$dir/auto")" = "$(facts "$dir/whole_$ranks")" ]
    verdict $? "$ranks ranks, --save-every auto --mtbf 0.00002: after steps $saves: exit $status"
    rm -rf "$dir/late" "$dir/now" "$dir/soon" "$dir/auto"
done
if [ $only_late -eq 1 ]; then
    tally
    exit
fi

# ----------------------------------------------------------------------------
# Kills. Half of them at the k-th call that saving makes, half at any time; of one rank or of the whole job.
echo "kills, seed $seed"
points=(write:safetensors write:manifest fsync:safetensors fsync:manifest fsync:.tmp open:safetensors close:safetensors rename:.tmp rename:/step_
    mkdir:/step_ unlink:.old rmdir:.old)
for ranks in "${sizes[@]}"; do
    done_kills=0 in_save=0 lost=0 fallbacks=0 whole=0 runs=0
    out=$dir/killed
    while [ $done_kills -lt "$kills" ]; do
        rm -rf "$out"
        runs=$((runs + 1))
        for ((launches = 0; launches < 60; launches++)); do
            faulty=()
            exact=$((RANDOM % 2)) point=${points[RANDOM % ${#points[@]}]} at=$((1 + RANDOM % 3)) pause=$((RANDOM % 120)) lines=$((1 + RANDOM % 8)) one=$((RANDOM % 2)) which=$((RANDOM % ranks))
            [ $done_kills -lt "$kills" ] || exact=2 # undisturbed to the end
            before=$(newest "$out")
            rm -f "$dir/mark"
            [ $exact -ne 1 ] || faulty=(LD_PRELOAD="$PWD/build/shim_io.so" SHIM_PATH="${point#*:}" SHIM_CALL="${point%:*}" SHIM_AT=$at SHIM_ERROR=kill SHIM_MARK="$dir/mark")
            logged=$(cat "$out/log.jsonl" 2>/dev/null | wc -l)
            start "$ranks" "$out"
            if [ $exact -eq 0 ]; then
                # steps of this launch, then some time
                for ((i = 0; i < 500; i++)); do
                    kill -0 "$job" 2>/dev/null || break
                    grep -q . "$dir/stdout" && [ "$(cat "$out/log.jsonl" 2>/dev/null | wc -l)" -ge "$lines" ] && break
                    sleep 0.01
                done
                sleep "0.$(printf '%03d' $pause)"
                mapfile -t members < <(ranks_of)
                if [ ${#members[@]} -gt 0 ] && [ $one -eq 1 ]; then
                    kill -9 "${members[which % ${#members[@]}]}" 2>/dev/null && touch "$dir/mark"
                elif [ ${#members[@]} -gt 0 ]; then
                    kill -9 $(family "$job" | tail -n +3) 2>/dev/null && touch "$dir/mark" && whole=$((whole + 1))
                fi
            fi
            finish
            for ((i = 0; i < 300; i++)); do flock -n "$out/.lock" true 2>/dev/null && break || sleep 0.01; done # all ranks are gone
            # What this launch began from is what was there.
            resumed=$(sed -n 's/^resumed at step //p' "$dir/stdout")
            fallbacks=$((fallbacks + $(grep -c '^skipping checkpoint' "$dir/stderr")))
            if [ -s "$dir/stdout" ] && ! grep -q 'nothing to do' "$dir/stdout" && [ "${resumed:-}" != "$before" ]; then
                lost=$((lost + 1))
                echo "    newest '$before', resumed at '${resumed:-}': $(head -2 "$dir/stderr")"
            fi
            # What was committed is there.
            after=$(newest "$out") saved=$(told "$out")
            if [ "${after:-0}" -lt "${saved:-0}" ] || [ "${after:-0}" -lt "${before:-0}" ]; then
                lost=$((lost + 1))
                echo "    told '$saved', was '$before', there is '$after'"
            fi
            if [ -e "$dir/mark" ] && [ $status -ne 0 ]; then
                done_kills=$((done_kills + 1))
                compgen -G "$out/step_*.*" >/dev/null && in_save=$((in_save + 1))
            elif [ $status -ne 0 ]; then
                bad "$ranks ranks: exit $status: $(head -2 "$dir/stderr")" && break
            else
                break # finished
            fi
        done
        same "$out" "$ranks" || { bad "$ranks ranks: run $runs differs from the one in one piece"; diff <(facts "$out") <(facts "$dir/whole_$ranks") | head -3 | cut -c1-150; break; }
    done
    [ $lost -eq 0 ] && [ $fallbacks -eq 0 ] && [ $done_kills -ge "$kills" ]
    verdict $? "$ranks ranks: $done_kills kills ($in_save left an unfinished save, $whole of the whole job) in $runs runs; $lost lost a checkpoint, $fallbacks fallbacks; every bit in the end"
done
faulty=()

# ----------------------------------------------------------------------------
# Disks that fail: the run ends with exit 5 and a line that names the file before another save begins; what was there is there; the next goes on.
echo "failing disks"
names=([5]="Input/output error" [28]="No space left on device" [24]="Too many open files")
cases=(write:28:safetensors write:5:safetensors write:short:safetensors fsync:5:safetensors close:5:safetensors open:24:safetensors write:28:manifest
    fsync:5:manifest rename:28:.tmp rename:5:/step_ mkdir:28:/step_ fsync:5:.tmp unlink:5:.old statvfs:short:failing)
next=$((seed % ${#cases[@]}))
for ranks in "${sizes[@]}"; do
    hit=0 wrong=0
    for ((k = 0; k < faults; k++)); do
        IFS=: read -r call reason path <<<"${cases[next++ % ${#cases[@]}]}"
        [ "$path" != safetensors ] || [ "$ranks" -eq 1 ] || path=rank_0000$((RANDOM % ranks))
        at=$((1 + RANDOM % 5))
        rm -rf "$dir/failing" "$dir/mark"
        faulty=(LD_PRELOAD="$PWD/build/shim_io.so" SHIM_PATH="$path" SHIM_CALL="$call" SHIM_AT=$at SHIM_ERROR="$reason" SHIM_MARK="$dir/mark")
        [ "$call" != write ] || faulty+=(SHIM_ALL=1)
        start "$ranks" "$dir/failing" && finish
        faulty=()
        what="$call $reason of $path, call $at, $ranks ranks: exit $status: $(head -1 "$dir/stderr")"
        harmless=0
        [ "$call:$reason" != write:short ] || harmless=1
        [ -e "$dir/mark" ] || harmless=1 # there is no such call
        [ ! -e "$dir/mark" ] || hit=$((hit + 1))
        if [ $harmless -eq 1 ]; then
            [ $status -eq 0 ] || { wrong=$((wrong + 1)) && echo "    $what"; }
        else
            saved=$(told "$dir/failing") last=$(facts "$dir/failing" | wc -l) there=$(newest "$dir/failing")
            [ $status -eq 5 ] && [ "$(grep -c '^train_gpt: ' "$dir/stderr")" -eq 1 ] && grep -q "failing[/:].*${names[${reason/short/0}]:-are free}" "$dir/stderr" &&
                [ "$last" -le $((${saved:-0} + 2 * every)) ] && [ "${there:-0}" -ge "${saved:-0}" ] || { wrong=$((wrong + 1)) && echo "    $what; last step $last, told '$saved', there is '$there'"; }
            start "$ranks" "$dir/failing" && finish
            [ $status -eq 0 ] || { wrong=$((wrong + 1)) && echo "    after $what, the next: exit $status: $(head -1 "$dir/stderr")"; }
        fi
        same "$dir/failing" "$ranks" || { wrong=$((wrong + 1)) && echo "    after $what: other bits"; }
    done
    [ $wrong -eq 0 ] && [ $hit -gt 0 ]
    verdict $? "$ranks ranks: $hit failing calls, $wrong wrong ends; every bit in the end"
done

# ----------------------------------------------------------------------------
# Damage: every flipped bit, every truncation is seen and told by file, and the checkpoint before is taken.
echo "damage"
target=$(printf 'step_%08d' $steps)
# look OUT FILE: verifies as --resume auto does
look() {
    timeout 60 "$train" "${common[@]}" --out "$1" --dry-run >"$dir/stdout" 2>"$dir/stderr" </dev/null
    status=$?
    [ $status -eq 0 ] && [ "$(grep -c '^skipping checkpoint' "$dir/stderr")" -eq 1 ] && grep -q "^skipping checkpoint $target: .*$2" "$dir/stderr"
}
byte_at() { od -An -tu1 -j "$2" -N 1 "$1" | tr -d ' '; }
put_byte() { printf "\\x$(printf %02x "$3")" | dd of="$1" bs=1 seek="$2" conv=notrunc status=none; }
for ranks in "${sizes[@]}"; do
    out=$dir/whole_$ranks
    files=("$out/$target"/*)
    missed=0 cuts=0
    for ((k = 0; k < flips; k++)); do
        file=${files[RANDOM % ${#files[@]}]}
        bytes=$(stat -c %s "$file")
        # the beginning, where the structure is, or anywhere
        [ $((RANDOM % 3)) -eq 0 ] && limit=200 || limit=$bytes
        at=$(((RANDOM * 32768 + RANDOM) % limit)) bit=$((RANDOM % 8))
        byte=$(byte_at "$file" $at)
        put_byte "$file" $at $((byte ^ (1 << bit)))
        look "$out" "${file##*/}" || { missed=$((missed + 1)) && echo "    bit $bit of byte $at of ${file##*/}: exit $status: $(head -2 "$dir/stderr")"; }
        put_byte "$file" $at "$byte"
    done
    cut=("${files[0]}" "${files[-1]}") # the manifest and a rank's
    [ $long -eq 0 ] || cut=("${files[@]}")
    for file in "${cut[@]}"; do
        cp "$file" "$dir/kept"
        bytes=$(stat -c %s "$file") header=0
        [[ "$file" == *.json ]] || header=$((8 + $(od -An -tu8 -N 8 "$file")))
        for length in 0 1 7 8 9 $((header / 2)) $((header > 0 ? header - 1 : 100)) $header $((header + 1)) $((bytes / 2)) $((bytes - 1)) $((bytes + 1)); do
            truncate -s "$length" "$file"
            cuts=$((cuts + 1))
            look "$out" "${file##*/}" || { missed=$((missed + 1)) && echo "    ${file##*/} of $length bytes: exit $status: $(head -2 "$dir/stderr")"; }
            cat "$dir/kept" >"$file"
        done
        rm "$file"
        cuts=$((cuts + 1))
        look "$out" "${file##*/}" || { missed=$((missed + 1)) && echo "    ${file##*/} is missing: exit $status: $(head -2 "$dir/stderr")"; }
        cp "$dir/kept" "$file"
    done
    ! look "$out" . && [ $status -eq 0 ] && [ ! -s "$dir/stderr" ] && [ $missed -eq 0 ]
    verdict $? "$ranks ranks: $flips bits and $cuts lengths, $missed not told; mended it is good again"
    # the run goes on from the one before, and ends with the same bits
    put_byte "${files[-1]}" 300 $(($(byte_at "${files[-1]}" 300) ^ 1))
    cp -r "$out" "$dir/mended"
    put_byte "${files[-1]}" 300 $(($(byte_at "${files[-1]}" 300) ^ 1))
    start "$ranks" "$dir/mended" && finish
    [ $status -eq 0 ] && grep -q "^resumed at step $((steps - every))$" "$dir/stdout" && same "$dir/mended" "$ranks"
    verdict $? "$ranks ranks: a run with a damaged newest checkpoint goes on from the one before: every bit"
    rm -rf "$dir/mended"
done

tally
