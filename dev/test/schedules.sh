#!/usr/bin/env bash
# The drawings in docs/ are those of the code.
set -euo pipefail
cd "$(dirname "$0")/../.."
make -s build/plot_schedule
for schedule in "gpipe 1" "1f1b 1" "interleaved 2" "zb 1"; do
    read -r kind chunks <<<"$schedule"
    build/plot_schedule "$kind" 4 8 "$chunks" | cmp - "docs/schedule_$kind.svg" || { echo "run make schedules"; exit 1; }
done
if build/plot_schedule zb 4 8 2 >/dev/null 2>&1; then echo "zb with virtual stages is not refused"; exit 1; fi
echo "4 drawings as committed"
