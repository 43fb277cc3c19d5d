#!/usr/bin/env bash
# 500 jobs with random faults: bench/chaos.sh [--runs N] [--seed N] [--out FILE.json]. Prints the misses and their
# number.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo build --release --quiet -p mgpurun
cargo build --release --quiet -p mgpu-tests --bin t-job
exec python3 bench/chaos.py --launcher target/release/mgpurun --job target/release/t-job "$@"
