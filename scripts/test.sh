#!/usr/bin/env bash
# Make the environment and run the CPU suite. Extra arguments go to pytest:
#   bash scripts/test.sh                 everything but the slow tier
#   bash scripts/test.sh -m slow         the slow tier: every factorisation of 2, 4 and 8 ranks, and other long proofs
#   bash scripts/test.sh tests/moe -x    one room, stop at the first failure
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
. scripts/environment.sh

make_environment test transformers tiktoken zstandard hypothesis
# One thread per process: tests start ranks by fork, which more threads would hang.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
exec "$PYTHON_BIN" -m pytest -q "$@"
