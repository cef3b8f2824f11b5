#!/usr/bin/env bash
# From a fresh clone to a trained model: installs what is missing, builds, prepares the King James Bible, trains a small GPT
# for some minutes, plots the curve. Flags for the training: scripts/recipes/kjv.cfg.
#
# usage: scripts/quickstart.sh [--smoke] [flags of train_gpt, which override the recipe]
#   --smoke            20 steps instead of the recipe's; QUICKSTART_STEPS=N does the same with N
#   QUICKSTART_OUT=DIR where to write (default: runs/kjv, or the first runs/kjv_N that does not exist)
set -euo pipefail
cd "$(dirname "$0")/.."

steps=${QUICKSTART_STEPS:-}
if [ "${1:-}" = --smoke ]; then
    steps=${steps:-20}
    shift
fi
short=()
[ -z "$steps" ] || short=(--steps "$steps" --warmup 5 --val-every 0 --val-batches 2 --sample-every 0)

out=${QUICKSTART_OUT:-runs/kjv}
if [ -z "${QUICKSTART_OUT:-}" ]; then
    for ((i = 2; ; i++)); do
        [ -e "$out" ] || break
        out=runs/kjv_$i
    done
fi
mkdir -p "$(dirname "$out")"

echo "== 1/5 setup"
scripts/setup.sh
echo "== 2/5 build"
make -j"$(nproc)"
echo "== 3/5 data"
data/kjv.sh
echo "== 4/5 train, into $out (stop with ctrl-C: it saves; continue with --resume auto)"
status=0
./train_gpt --config scripts/recipes/kjv.cfg --out "$out" "${short[@]}" "$@" || status=$?
[ $status -eq 0 ] || [ $status -eq 7 ] || exit $status # 7: stopped on request, after saving
echo "== 5/5 plot"
python=
for candidate in python3 /usr/bin/python3; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import matplotlib, numpy' 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -n "$python" ]; then
    "$python" scripts/plot.py --out "$out/curves.png" "$out/log.jsonl"
else
    echo "no python3 with matplotlib and numpy: no plot"
fi

out=$(realpath "$out")
echo
echo "log         $out/log.jsonl"
[ -z "$python" ] || echo "curves      $out/curves.png"
echo "checkpoint  $(ls -d "$out"/step_[0-9]* | tail -1)"
if [ -n "$python" ]; then
    "$python" - "$out/log.jsonl" <<'END'
import json, sys
samples = [r["text"] for r in map(json.loads, open(sys.argv[1])) if r.get("event") == "sample"]
print("sample:\n" + samples[-1] if samples else "sample      none yet")
END
fi
exit $status
