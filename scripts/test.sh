#!/usr/bin/env bash
# Make the environment and run the CPU suite. Extra arguments go to pytest:
#   bash scripts/test.sh                 everything but the slow tier
#   bash scripts/test.sh -m slow         the slow tier: every factorisation of 2, 4 and 8 ranks, and other long proofs
#   bash scripts/test.sh tests/moe -x    one room, stop at the first failure
#   MOE_TRAINER_TEST_PROCESSES=1 bash scripts/test.sh    one pytest process; else one per core up to 4 (tests/side_by_side.py)
#   MOE_TRAINER_TEST_WITH=triton bash scripts/test.sh    the Triton kernels too: interpreted, and compiled for sm_90 and sm_100. Triton is
#                                        as large as all of torch (a 198 MB wheel, 0.7 GB on disk), so it is not installed unasked
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
. scripts/environment.sh

read -ra more <<<"${MOE_TRAINER_TEST_WITH:-}"
make_environment test transformers tiktoken zstandard hypothesis ${more[@]+"${more[@]}"}
# One thread per process: tests start ranks by fork, which more threads would hang.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
exec "$PYTHON_BIN" tests/side_by_side.py -q "$@"
