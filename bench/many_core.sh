#!/bin/sh
# What VELTAIR measured on 64 cores, on the cores of this machine, in one command: Figures 6 and 7 (kernels under
# pressure), kernels and whole models beside onnxruntime, the policies on real models (Figure 12), and their simulation.
# Installs nothing: run `make setup-dev` first. Takes about an hour; results go to bench/results/. `--quick`: minutes.
set -eu
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
for name in veltair-pressure veltair-kernels veltair-models veltair-real veltair-overhead veltair-granularity veltair-qps; do
    echo "== $name"
    python -m bench "$name" --json "$@"
done
