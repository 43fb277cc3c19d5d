#!/usr/bin/env bash
# Builds a Debian package of the launcher, its manual pages and completions, and the programs of `mgpurun doctor --test`.
#
#   launcher/deb.sh [FOLDER]
#
# The package is written to FOLDER (default: target/debian), and its path is printed last. Needs cargo-deb (cargo install
# cargo-deb --locked) and, for the package's dependencies, dpkg-shlibdeps (package dpkg-dev).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
output=${1:-target/debian}

cargo build --release --locked --package mgpurun --package mgpu-examples --bin mgpurun --bin allreduce_perf --bin gpu_check \
    --target-dir target
mgpurun=target/release/mgpurun
mkdir -p target/deb/man "$output"
# Pages of an earlier version.
rm -f target/deb/man/mgpurun*.1
"$mgpurun" man target/deb/man >/dev/null
for shell in bash zsh fish; do
    "$mgpurun" completions "$shell" >"target/deb/mgpurun.$shell"
done
cargo deb --package mgpurun --no-build --locked --output "$output"
