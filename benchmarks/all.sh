#!/usr/bin/env bash
# Runs every benchmark in turn, and writes the table of docs/performance.md.
#
#     bash benchmarks/all.sh                      # hours; OUT=DIR keeps the files elsewhere than in runs/benchmarks
#     bash benchmarks/all.sh kd_speed gpt_speed   # these
#
# On a machine whose load is above 0.5, or MOST_LOAD, it refuses to start. A benchmark that fails, or misses a target,
# costs only its own rows; the last line names it.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ $# = 0 ]; then
    set -- $(cd benchmarks && ls ./*_speed.py | sed 's|^./||; s|\.py$||')
fi
for name; do
    [ -f "benchmarks/$name.py" ] || { echo "error: $name: expected a benchmark's name, as in benchmarks/$name.py" >&2; exit 2; }
done
load=$(cut -d' ' -f1 /proc/loadavg)
most=${MOST_LOAD:-0.5}
if awk "BEGIN { exit !($load > $most) }"; then
    echo "error: load $load: expected a quiet machine, at most $most" >&2
    exit 2
fi
out=${OUT:-runs/benchmarks}
mkdir -p "$out"
failed=()
for name; do
    echo "== $name, $(date +%H:%M)"
    rm -f "$out/$name.json"
    fine=true
    python "benchmarks/$name.py" --out "$out/$name.json" || fine=false
    if [ -f "$out/$name.json" ]; then
        python benchmarks/page.py "$out/$name.json"
        ! grep -q MISSED "$out/$name.json" || fine=false
    fi
    $fine || failed+=("$name")
done
[ ${#failed[@]} = 0 ] || { echo "failed, or missed a target: ${failed[*]}" >&2; exit 1; }
