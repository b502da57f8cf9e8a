#!/usr/bin/env bash
# Make the environment and run the CPU suite. Extra arguments go to pytest:
#   bash scripts/test.sh                 the default tier: what notices the mutants, the README's commands, cheap tests that reach the rest
#   bash scripts/test.sh --all           everything but the slow tier
#   bash scripts/test.sh --changed       what the changes since main can affect
#   bash scripts/test.sh -m slow         the slow tier: every factorisation of 2, 4 and 8 ranks, and other long proofs
#   bash scripts/test.sh tests/moe -x    one folder, stop at the first failure
#   MOE_TRAINER_TEST_PROCESSES=1 bash scripts/test.sh    one pytest process; else one more than cores, at most 5
#   MOE_TRAINER_TEST_WITH=triton bash scripts/test.sh    the Triton kernels too: interpreted, and compiled for sm_90, sm_100 and sm_103. Triton is
#                                        as large as all of torch (a 198 MB wheel, 0.7 GB on disk), so it is not installed unasked
#   MOE_TRAINER_TEST_WITH="triton transformer_engine"    and TransformerEngine's own Python on the emulated device: a wheel of 1 MB, which
#                                        is downloaded and not installed, since it requires CUDA's libraries
#   MOE_TRAINER_TEST_WITH="moto[server] s3fs pyarrow"    the tests of data in object storage, against a real S3 server, and in Parquet files
#   MOE_TRAINER_TEST_WITH="gcsfs gcp-storage-emulator multi-storage-client"    those of gs:// and msc://
#   MOE_TRAINER_TEST_WITH=lm-eval      those of benchmark tasks, with EleutherAI's harness
#   MOE_TRAINER_TEST_WITH=peft         those of low-rank adapters that PEFT loads
#   MOE_TRAINER_TEST_WITH=xllamacpp    those of llama.cpp, with MOE_TRAINER_LLAMA_CPP=FOLDER for its converter (docs/consumers.md)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
. scripts/environment.sh

read -ra more <<<"${MOE_TRAINER_TEST_WITH:-}"
packages=() wheels=()
for package in ${more[@]+"${more[@]}"}; do
    if [ "$package" = transformer_engine ]; then
        packages+=(pydantic einops) # which it imports
        wheels+=("$package")
    else
        packages+=("$package")
    fi
done
make_environment test transformers tiktoken zstandard hypothesis ${packages[@]+"${packages[@]}"}
for package in ${wheels[@]+"${wheels[@]}"}; do
    download_wheel "$package"
done
# One thread per process: tests start ranks by fork, which more threads would hang.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
exec "$PYTHON_BIN" -m pytest -q "$@"
