#!/usr/bin/env bash
# Measures the release build on this machine: start-up time, all-reduce by size, training throughput of every network
# on one rank with two threads and on two ranks with one. Writes bench/results/cpu-<date>.json. Run it on a quiet
# machine, from the repository's root, after `cargo build --release`.
set -euo pipefail
cd "$(dirname "$0")/.."

bin=target/release
out=bench/results/cpu-$(date --utc +%F).json
mkdir -p bench/results
provenance=$(python3 bench/provenance.py bench/first_figures.sh)
lines=$(mktemp)
trap 'rm -f "$lines"' EXIT

note() { printf '%s\n' "$*" >&2; }

# Start-up: the median time of 21 launches of 8 processes that do nothing, in milliseconds.
note "start-up"
python3 - "$bin/mgpurun" >> "$lines" <<'PY'
import json, statistics, subprocess, sys, time
times = []
for _ in range(21):
    start = time.perf_counter()
    subprocess.run([sys.argv[1], "-n", "8", "true"], check=True)
    times.append((time.perf_counter() - start) * 1e3)
print(json.dumps({"impl": "mgpu", "what": "mgpurun -n 8 true", "ms_p50": round(statistics.median(times), 2)}))
PY

for ranks in 2 4; do
    note "all-reduce on $ranks ranks"
    "$bin/mgpurun" -n "$ranks" --no-prefix allreduce_perf --check --max $((64 << 20)) >> "$lines"
done

for net in lenet5 deep keras ensemble2400 layers conv6; do
    steps=20
    [ "$net" = lenet5 ] && steps=400
    note "$net"
    "$bin/train_mnist" --synthetic --skip-test --json --net "$net" --batch 128 --steps "$steps" --threads 2 |
        tail -n 1 >> "$lines"
    "$bin/mgpurun" -n 2 --no-prefix train_mnist --synthetic --skip-test --json --net "$net" --batch 64 \
        --steps "$steps" --threads 1 | tail -n 1 >> "$lines"
done

python3 - "$lines" "$provenance" > "$out" <<'PY'
import json, sys
figures = [json.loads(line) for line in open(sys.argv[1])]
print(json.dumps({**json.loads(sys.argv[2]), "figures": figures}, indent=1, ensure_ascii=False))
PY
note "wrote $out"
