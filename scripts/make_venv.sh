#!/usr/bin/env bash
# Makes the virtual environment FOLDER and installs jaxgraph into it from this source tree:
#
#     scripts/make_venv.sh FOLDER EXTRA[,EXTRA...]
#
# With an NVIDIA GPU in the machine, JAX comes with CUDA. PYTHON names the interpreter to use.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1
extras=$2
python=${PYTHON:-python3}

need() {
  echo "error: $1" >&2
  echo "On Debian or Ubuntu: apt-get install $2" >&2
  exit 2
}

command -v "$python" >/dev/null || need "there is no $python" "python3 python3-venv python3-dev"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  need "Python 3.11 or later is needed, but $python is $("$python" -V); PYTHON=... chooses another" \
    "python3"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
  need "$python cannot make virtual environments" "python3-venv"
"$python" -c 'import os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' 2>/dev/null ||
  need "the headers of $python are missing" "python3-dev"
command -v "${CXX:-c++}" >/dev/null || need "there is no C++ compiler" "g++"

if nvidia-smi -L >/dev/null 2>&1; then
  extras+=,cuda
  command -v nvcc >/dev/null ||
    echo "note: there is a GPU, but no nvcc: jaxgraph's CUDA kernels will not be built" >&2
fi

[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
"$folder/bin/python" -m pip install --disable-pip-version-check ".[$extras]"
