#!/usr/bin/env bash
# Runs small scripts of PyTorch's and JAX's users under mgpurun, with torchrun's command lines, on 2 and 4 ranks of the
# CPU: DDP, FSDP2, distributed checkpoints, accelerate, transformers' Trainer, Lightning, DeepSpeed, JAX with gloo. Each
# script compares its result with that of one process. No timings: this shows what works, and with which versions.
#
#     bench/clients.sh [NAME…]      with names, only these scripts (ddp, jax_gloo, …), and no result file
#
# Needs a build of mgpurun (target/release, or target/debug, or the variable MGPURUN), and installs the rest from PyPI into
# target/clients/v, unless it is there. The result is bench/results/clients-<date>-<machine>.json.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=target/clients/v
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
for package in torch accelerate transformers lightning "jax[cpu]"; do
    "$venv/bin/python" -c "import importlib.metadata as m; m.version('${package%%[*}')" 2>/dev/null ||
        "$venv/bin/pip" install --quiet "$package"
done
# Its build needs PyTorch. It is left out if it cannot be installed.
"$venv/bin/python" -c "import importlib.metadata as m; m.version('deepspeed')" 2>/dev/null ||
    { "$venv/bin/pip" install --quiet wheel ninja && "$venv/bin/pip" install --quiet --no-build-isolation deepspeed; } ||
    echo "no deepspeed here" >&2
exec "$venv/bin/python" bench/clients/run.py "$@"
