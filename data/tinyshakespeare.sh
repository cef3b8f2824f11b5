#!/bin/sh
# tinyshakespeare.sh: data/out/tinyshakespeare_train.bin and _val.bin: 1.1 MB of plays; the last tenth is held out.
# Usage: data/tinyshakespeare.sh [FILE]   FILE: the text, if it is here already; else it is downloaded with curl.
# Needs ./tokenize: make tokenize.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
out=$root/data/out
url=https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
text=${1:-$out/tinyshakespeare.txt}

[ -x "$root/tokenize" ] || {
    echo "tinyshakespeare.sh: $root/tokenize is missing: make tokenize" >&2
    exit 3
}
mkdir -p "$out"
if [ ! -f "$text" ]; then
    [ $# -eq 0 ] || {
        echo "tinyshakespeare.sh: no file '$text'" >&2
        exit 3
    }
    curl -fsSL --connect-timeout 10 --max-time 120 -o "$text.tmp" "$url" || {
        rm -f "$text.tmp"
        echo "tinyshakespeare.sh: cannot download $url: fetch it elsewhere and give the file, or use data/kjv.sh, which needs no network" >&2
        exit 3
    }
    mv "$text.tmp" "$text"
fi
"$root/tokenize" --val-fraction 0.1 --val-tail --out "$out/tinyshakespeare" "$text"
