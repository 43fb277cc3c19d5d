#!/usr/bin/env bash
# Measures training on this machine's processor, ours and PyTorch's: images per second, memory, and the share of peak
# FLOP/s.
#
#   bench/train.sh [NET…] [--rounds 3] [--modes 1x2,2x1] [--dtypes f32,bf16] [--steps N] [--no-profile] [--out FILE.json]
#
# The two sides alternate: in every round each network, mode and dtype runs once with each side, so that background
# load does not hit one alone; figures are medians of the rounds. MGPU_PEERS (target/peers) is the folder with an
# environment v that has torch; without it only our side runs. MGPU_DATA is the folder with the four MNIST files.
# bench/README.md says how to install the requirements, and what is measured how. Writes
# bench/results/train-cpu-<date>-<machine>.json after every run, and prints the table of figures and the missed targets.
# Run it on a quiet machine, after `cargo build --release`.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
date=$(date +%F)

case ${1-} in
    --help | -h) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" && exec python3 "$here/train.py" --help ;;
esac

root=$here/..
for program in mgpurun train_mnist; do
    [ -x "$root/target/release/$program" ] ||
        { echo "there is no target/release/$program: run cargo build --release" >&2 && exit 1; }
done
commit=$(git -C "$root" rev-parse --short HEAD)
git -C "$root" diff --quiet HEAD -- examples runtime kernels launcher Cargo.lock Cargo.toml || commit=$commit-dirty
exec python3 "$here/train.py" --bin "$root/target/release" --machine "$("$here/describe_machine.sh")" --commit "$commit" \
    --date "$date" --out "$here/results/train-cpu-$date-$("$here/describe_machine.sh" --slug).json" "$@"
