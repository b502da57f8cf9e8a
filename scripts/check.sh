#!/usr/bin/env bash
# The one command before a push: lint, import order, structure tests, shell scripts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
. scripts/environment.sh

make_environment check ruff hypothesis
"$PYTHON_BIN" -m ruff check .
"$PYTHON_BIN" -m pytest -q tests/structure tests/model_zoo tests/shape
if command -v shellcheck >/dev/null; then
    shellcheck scripts/*.sh .ci/run
else
    echo "shellcheck is not installed; the shell scripts were not checked"
fi
