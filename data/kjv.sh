#!/bin/sh
# kjv.sh: data/out/kjv_train.bin and kjv_val.bin from the King James Bible of Debian's package bible-kjv (apt-get install
# bible-kjv): 4.2 MB of English text that needs no network. A chapter is a document: its heading, then a verse per line.
# Every 15th chapter of the 1189, spread over all books, is held out whole for validation.
# Usage: data/kjv.sh [OUTPUT DIRECTORY]      (from anywhere; needs ./tokenize: make tokenize)
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$root/data/out}

command -v bible >/dev/null 2>&1 || [ -x /usr/games/bible ] || {
    echo "kjv.sh: the program 'bible' is missing: apt-get install bible-kjv (or use any text with ./tokenize)" >&2
    exit 3
}
[ -x "$root/tokenize" ] || {
    echo "kjv.sh: $root/tokenize is missing: make tokenize" >&2
    exit 3
}
PATH=$PATH:/usr/games
mkdir -p "$out"
text=$out/kjv.txt
trap 'rm -f "$text.raw" "$text.tmp"' EXIT

# The printed form is: blank, "1 Samuel 1", blank, "  1 Now there was ...". Wide lines keep a verse on one line; the number
# in front of a verse and the blank after a heading go, so that only the blank between chapters is left.
bible -l100000 gen1:1-rev22:21 </dev/null >"$text.raw"
awk '!NF { heading = !heading; next } # a blank stands on both sides of a heading
     heading { if (chapters++) print ""; print; next }
     { sub(/^ *[0-9]+ /, ""); print }' "$text.raw" >"$text.tmp"
chapters=$(grep -c '^$' "$text.tmp" || true)
[ "$chapters" -eq 1188 ] || {
    echo "kjv.sh: got $((chapters + 1)) chapters from 'bible', wanted 1189: another version of the package?" >&2
    exit 3
}
mv "$text.tmp" "$text"
"$root/tokenize" --split-on-blank --val-fraction 0.0667 --out "$out/kjv" "$text"
