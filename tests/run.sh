#!/usr/bin/env bash
# Format, lint, types and the quick tests; with --all, the slow tests too; with --coverage, which lines they run.
# Other arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${VIRTUAL_ENV:-}" ] && [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi
chosen=(-m "not slow")
arguments=()
pytest=(pytest)
for argument; do
    case $argument in
        --all) chosen=() ;;
        --coverage) pytest=(coverage run -m pytest) ;;
        *) arguments+=("$argument") ;;
    esac
done

ruff format --check .
ruff check .
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
exit "$failed"
