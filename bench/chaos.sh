#!/usr/bin/env bash
# 500 jobs with random faults: bench/chaos.sh [--runs N] [--seed N] [--out FILE.json]. Prints the misses and their
# number. With --hosts N: 300 jobs on up to N hosts, which are namespaces of this machine.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo build --release --quiet -p mgpurun
cargo build --release --quiet -p mgpu-tests --bin t-job
case " $* " in
    *" --hosts"*) script=bench/chaos_hosts.py ;;
    *) script=bench/chaos.py ;;
esac
exec python3 "$script" --launcher target/release/mgpurun --job target/release/t-job "$@"
