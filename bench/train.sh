#!/usr/bin/env bash
# Measures training on this machine's processor, ours and PyTorch's: images per second, memory, and the share of peak
# FLOP/s.
#
#   bench/train.sh [NET…] [--rounds 3] [--modes 1x2,2x1] [--dtypes f32,bf16] [--steps N] [--no-profile] [--out FILE.json]
#
# The two sides take turns: in every round each network, mode and kind of number runs once with ours and once with PyTorch,
# so that a noisy minute hits nobody alone; what counts is the median of the rounds. MGPU_PEERS (target/peers) names the
# folder with an environment v that has torch; without it ours runs alone. MGPU_DATA names the folder with the four MNIST
# files. bench/README.md tells how to install what is needed, and what is measured how.
# Writes bench/results/train-cpu-<date>-<machine>.json after every run, prints the README's table and what misses its target.
# Run it on a quiet machine, after `cargo build --release`.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

case ${1-} in
    --help | -h) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" && exec python3 "$here/train.py" --help ;;
esac

exec python3 "$here/train.py" "$@"
