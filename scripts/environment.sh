# shellcheck shell=bash
# Sourced by quickstart.sh, test.sh and check.sh: makes the Python environment of this checkout and names it.
#
#   make_environment KIND [PACKAGE...]     sets PYTHON_BIN; installs only when something changed since the last time
#   download_wheel PACKAGE                 its wheel, into the environment's folder wheels
#
# The environment is .venv in the checkout, or $MOE_TRAINER_VENV. If the python in use has a CUDA build of torch 2.11 or
# newer, the environment uses that torch; otherwise the versions of constraints.txt are installed.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
    echo "error: $*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python python3.14 python3.13 python3.12 python3.11 python3.10; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.10 or newer found (tried python3, python and python3.10 to python3.14);
       install one or set PYTHON=/path/to/python"
}

# Print the folder of a usable CUDA torch of this python, or nothing.
cuda_torch_folder() {
    "$1" - 2>/dev/null <<'EOF'
import pathlib, torch
version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
if torch.version.cuda and version >= (2, 11):
    print(pathlib.Path(torch.__file__).parents[1])
EOF
}

run_pip() {
    local log=$venv/install.log
    if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint "$venv/constraints.txt" "$@" >"$log" 2>&1; then
        tail -n 5 "$log" >&2
        if grep --quiet "No space left on device" "$log"; then
            fail "no space left on device: free some at $venv ($(df --human-readable --output=avail "$venv" | tail -n 1 | tr -d ' ') free) or in ${TMPDIR:-/tmp}; an environment takes about 3 GB"
        fi
        fail "pip could not install: $*
       Is there a network connection (or a package mirror in pip's own settings)? The full output is in $log"
    fi
}

# Download the wheel of one package into the folder wheels of the environment, without installing it.
download_wheel() {
    local version
    version=$(sed -n "s/^$1==//p" "$venv/constraints.txt")
    compgen -G "$venv/wheels/$1-$version-*.whl" >/dev/null && return
    "$PYTHON_BIN" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$venv/wheels" --constraint "$venv/constraints.txt" "$1" ||
        fail "pip could not download $1"
}

make_environment() {
    local kind=$1 python torch_folder stamp packages torch
    shift
    venv=${MOE_TRAINER_VENV:-$ROOT/.venv}
    PYTHON_BIN=$venv/bin/python
    python=$(find_python) || exit 1
    # The checkout is part of the stamp: it is installed editable, so the code of another checkout would run.
    stamp="$("$python" --version) $ROOT $* $(cd "$ROOT" && cksum setup.py constraints.txt scripts/environment.sh)"
    if [ -x "$PYTHON_BIN" ] && [ "$(cat "$venv/installed-$kind" 2>/dev/null)" = "$stamp" ]; then
        echo "environment: $venv is up to date"
        return
    fi
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "$python has no venv module; install it (Debian, Ubuntu: apt install python3-venv) or
       set PYTHON to another python"

    torch_folder=$(cuda_torch_folder "$python") || torch_folder=
    if [ ! -x "$PYTHON_BIN" ]; then
        "$python" -m venv ${torch_folder:+--system-site-packages} "$venv" || fail "could not create the environment $venv"
    fi
    if [ -n "$torch_folder" ]; then
        echo "environment: keeping the CUDA torch in $torch_folder"
        # --system-site-packages skips the packages of a python that is itself an environment; a path file adds them.
        packages=$("$PYTHON_BIN" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        echo "$torch_folder" >"$packages/kept_torch.pth"
        grep -Ev '^(torch|triton|numpy)[<>=]' "$ROOT/constraints.txt" >"$venv/constraints.txt"
    else
        cp "$ROOT/constraints.txt" "$venv/constraints.txt"
        torch=$(grep '^torch==' "$ROOT/constraints.txt")
        echo "environment: installing $torch into $venv (the largest download, once)"
        run_pip "$torch"
    fi
    echo "environment: installing moe-trainer and what it needs"
    run_pip --editable "$ROOT" "$@"
    echo "$stamp" >"$venv/installed-$kind"
}
