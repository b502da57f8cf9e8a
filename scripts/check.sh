#!/usr/bin/env bash
# Run before a push: lint, format, types, structure tests, shell scripts. Under a minute once the environment exists.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
. scripts/environment.sh

make_environment check ruff mypy types-PyYAML hypothesis
"$PYTHON_BIN" -m ruff check .
"$PYTHON_BIN" -m ruff format --check .
"$PYTHON_BIN" -m mypy
"$PYTHON_BIN" -m pytest -q tests/structure tests/model_zoo
if command -v shellcheck >/dev/null; then
    shellcheck scripts/*.sh scripts/examples/*.sh moe_trainer/launch/*.sh .ci/run
else
    echo "shellcheck is not installed; the shell scripts were not checked"
fi
