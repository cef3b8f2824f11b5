#!/usr/bin/env bash
# Traces of several ranks: test_trace on 1 to 4 of them, on pretended hosts, with late completion, under AddressSanitizer; and the drawing of
# one (dev/plot_schedule.c): its rows, its boxes, and what it refuses.
set -uo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=dev/test/common.sh
. dev/test/common.sh
make -s build/test_trace build/plot_schedule || exit 1
# the log of what failed
bad() {
    failed=$((failed + 1))
    echo "FAILED: $1"
    head -5 "$dir/log" | cut -c1-300
}
ranks=1
launch=()
if command -v mpirun >/dev/null && make -s -n banner | grep -q 'MPI yes'; then
    ranks=4
    launch=(mpirun --bind-to none -np)
fi

# good NAME RANKS COMMAND...
good() {
    local name=$1 count=$2
    shift 2
    timeout --kill-after=5 150 "${launch[@]}" "$count" "$@" >"$dir/log" 2>&1 </dev/null && grep -q ' passed, 0 failed' "$dir/log"
    verdict $? "$name, $count ranks: $(tail -n 1 "$dir/log")"
}
if [ $ranks -gt 1 ]; then
    for count in 2 4; do good "one host" $count build/test_trace; done
    good "two hosts" 4 env TRAIN_GPT_COMM_HOSTS=2 build/test_trace
    good "late completion" 3 env TRAIN_GPT_COMM_LATE=7 build/test_trace
    make -s build/test_trace_asan || exit 1
    leaks_of_mpi
    good AddressSanitizer 2 build/test_trace_asan
fi

trace=$dir/trace.json
if [ $ranks -gt 1 ]; then
    timeout --kill-after=5 150 "${launch[@]}" $ranks build/test_trace "$trace" >"$dir/log" 2>&1 </dev/null
else
    build/test_trace "$trace" >"$dir/log" 2>&1
fi
verdict $? "a pipeline step of $ranks ranks is traced"
build/plot_schedule --trace "$trace" --step 2 >"$dir/step.svg" 2>"$dir/log" &&
    [ "$(grep -c 'class="n"' "$dir/step.svg")" -eq $ranks ] &&
    [ "$(grep -c '^<rect class="f" .*</text>$' "$dir/step.svg")" -eq $((4 * ranks + 1)) ] &&
    [ "$(grep -c '^<rect class="b" .*</text>$' "$dir/step.svg")" -eq $((4 * ranks + 1)) ] &&
    [ "$(grep -c '^<rect class="o" ' "$dir/step.svg")" -eq $((ranks + 1)) ] &&
    grep -q "rank $((ranks - 1)) (tp 0, pp $((ranks - 1)), dp 0)" "$dir/step.svg" && grep -q "step 2, measured: $ranks ranks" "$dir/step.svg" &&
    python3 -c 'import sys, xml.dom.minidom; xml.dom.minidom.parse(sys.argv[1])' "$dir/step.svg" 2>"$dir/log"
verdict $? "its drawing: rows, forwards, backwards, updates (and a legend), well-formed"
# Boxes of a rank's forwards and backwards lie beside each other, in the picture.
awk -F'"' '/^<rect class="[fb]" .*<text/ && $6 > 50 { if ($4 + 0 < end[$6] - 0.15) bad = 1; end[$6] = $4 + $8; n++ } $4 + $8 > 1150 { bad = 1 }
    END { exit bad || n == 0 }' "$dir/step.svg"
verdict $? "boxes of a rank do not overlap, and stay in the picture"

# refused CODE TEXT ARGUMENT...: exit code, one line, nothing drawn
refused() {
    local code=$1 text=$2 status
    shift 2
    build/plot_schedule "$@" >"$dir/out" 2>"$dir/log"
    status=$?
    [ $status -eq "$code" ] && [ "$(wc -l <"$dir/log")" -eq 1 ] && [ ! -s "$dir/out" ] && grep -qF -- "$text" "$dir/log"
    verdict $? "exit $code: $text"
}
refused 3 'nothing to draw of step 9' --trace "$trace" --step 9
refused 2 '--step: got' --trace "$trace" --step 0
refused 2 '--step: got' --trace "$trace" --step 1:2
refused 2 'wanted --step N' --trace "$trace" --stop 1
refused 3 'cannot open' --trace "$dir/none.json" --step 1
refused 3 'cannot open' --trace "$dir" --step 1
span='"name":"forward","ph":"X","tid":0'
while IFS='|' read -r text json; do
    printf '%s' "$json" >"$dir/bad.json"
    refused 3 "$text" --trace "$dir/bad.json" --step 1
done <<END
line 1|
line 1|{
line 1|{"traceEvents":[]
duplicate|{"traceEvents":[],"traceEvents":[]}
no list|[1]
no list|{"traceEvents":{}}
no list|{"events":[]}
nothing to draw|{"traceEvents":[]}
event 0: no text|{"traceEvents":[1]}
event 0: no text|{"traceEvents":[{"name":"forward"}]}
event 0: no text|{"traceEvents":[{"name":7,"ph":"X"}]}
event 0: "pid"|{"traceEvents":[{$span}]}
event 0: "pid"|{"traceEvents":[{$span,"pid":-1}]}
event 0: "pid"|{"traceEvents":[{$span,"pid":1e99}]}
event 0: "pid"|{"traceEvents":[{"name":"process_name","ph":"M","pid":99999999999999}]}
event 0: "args"|{"traceEvents":[{$span,"pid":0,"ts":1,"dur":1,"args":{"step":1.5}}]}
event 0: "args"|{"traceEvents":[{$span,"pid":0,"ts":1,"dur":1,"args":{"step":0}}]}
event 0: "args"|{"traceEvents":[{$span,"pid":0,"ts":1,"dur":1,"args":{"step":1,"chunk":-1}}]}
event 0: "args"|{"traceEvents":[{$span,"pid":0,"ts":1,"dur":1,"args":{"step":1,"microbatch":3000000000}}]}
event 0: "ts"|{"traceEvents":[{$span,"pid":0,"dur":1,"args":{"step":1}}]}
event 0: "ts"|{"traceEvents":[{$span,"pid":0,"ts":"1","dur":1,"args":{"step":1}}]}
event 0: "ts"|{"traceEvents":[{$span,"pid":0,"ts":1,"dur":-1,"args":{"step":1}}]}
event 0: "ts"|{"traceEvents":[{$span,"pid":0,"ts":1,"dur":1e300,"args":{"step":1}}]}
can draw|{"traceEvents":[{$span,"pid":60000,"ts":1,"dur":1,"args":{"step":1}}]}
END
head -c $(($(wc -c <"$trace") / 2)) "$trace" >"$dir/bad.json"
refused 3 'bad.json: line' --trace "$dir/bad.json" --step 1
cat >"$dir/odd.json" <<END
{"traceEvents":[{"name":"process_name","ph":"M","pid":0,"args":{"name":"rank 0 on x (<b>&\u0001é"}},{"name":"counter","ph":"C","pid":"a"},
{$span,"pid":0,"ts":1,"dur":0,"args":{"step":1}}]}
END
build/plot_schedule --trace "$dir/odd.json" --step 1 >"$dir/step.svg" 2>"$dir/log" &&
    python3 -c 'import sys, xml.dom.minidom; xml.dom.minidom.parse(sys.argv[1])' "$dir/step.svg" 2>"$dir/log"
verdict $? "hostile names, other kinds of events and spans of no time are drawn as well-formed XML"

tally
