#!/usr/bin/env bash
# Format, lint, types and the quick tests; with --all, the slow tests too; with --coverage, which lines they run.
# Other arguments go to pytest. Files that git does not track are not linted: they may be a reader's own.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${VIRTUAL_ENV:-}" ] && [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi
chosen=(-m "not slow")
what="the quick tests, about 15 minutes on 2 cores; --all runs all, in about 50"
arguments=()
pytest=(pytest)
for argument; do
    case $argument in
        --all) chosen=() what="all tests, about 50 minutes on 2 cores" ;;
        --coverage) pytest=(coverage run -m pytest) ;;
        *) arguments+=("$argument") ;;
    esac
done
if [ ${#arguments[@]} -gt 0 ]; then what="tests of: ${arguments[*]}"; fi

linted=()
while IFS= read -r -d "" file; do
    if [ -f "$file" ]; then linted+=("$file"); fi
done < <(git ls-files -z "*.py" "*.ipynb" 2> /dev/null)
lint="${#linted[@]} files that git tracks"
if [ ${#linted[@]} -eq 0 ]; then linted=(.) lint="all files"; fi # not a checkout, such as an unpacked sdist
echo "format and lint of $lint, then types beside $what"
ruff format --check "${linted[@]}"
ruff check "${linted[@]}"
types=$(mktemp)
trap 'rm -f "$types"' EXIT
mypy > "$types" 2>&1 & # beside the tests
mypy=$!
failed=0
"${pytest[@]}" -n 2 --dist loadfile --no-loadscope-reorder --durations=10 "${chosen[@]}" "${arguments[@]}" || failed=$?
if [ "${pytest[0]}" = coverage ]; then
    coverage combine --quiet
    coverage report
fi
wait "$mypy" || failed=$?
cat "$types"
echo "took $((SECONDS / 60)) min $((SECONDS % 60)) s"
exit "$failed"
