#!/usr/bin/env bash
# Every check: format, lint, types, tests. Stops at the first that fails; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${VIRTUAL_ENV:-}" ] && [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi
ruff format --check .
ruff check .
mypy
pytest --durations=10 "$@"
