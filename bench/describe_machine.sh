#!/usr/bin/env bash
# Prints this machine as one JSON object, to store with figures measured on it; what cannot be found is left out. With
# --slug: processor and number of cores as a short name for files, such as `xeon-2c`.
set -euo pipefail

field() { lscpu 2>/dev/null | sed -n "s/^$1: *//p" | head -n 1; }

if [ "${1:-}" = --slug ]; then
    words=$(field 'Model name' | tr '[:upper:]' '[:lower:]' |
        sed -E 's/\((r|tm)\)//g; s/@.*//; s/[0-9]+(th|nd|rd|st) gen|[0-9]+-core|\b(intel|amd|processor|cpu)\b//g')
    slug=$(printf '%s' "$words" | sed -E 's/[^a-z0-9]+/-/g; s/^-+|-+$//g')
    printf '%s-%sc\n' "${slug:-machine}" "$(nproc)"
    exit
fi

# The flags that choose kernels or bound their speed.
flags=$({ grep -m 1 -E '^(flags|Features)' /proc/cpuinfo || true; } |
    { grep -woE 'avx2|fma|f16c|avx512(f|bw|dq|vl|_bf16|_fp16|_vnni)|avx_vnni|amx_(tile|bf16|int8)|asimd|sve2?|bf16|i8mm' ||
        true; } | sort -u | tr '\n' ' ')
python3 - "$(field 'Model name')" "$(nproc)" "$(field 'L1d cache')" "$(field 'L2 cache')" "$(field 'L3 cache')" \
    "$(awk '/MemTotal/ {printf "%.0f", $2 / 1048576}' /proc/meminfo)" "$(uname -r)" \
    "$(rustc --version 2>/dev/null || true)" "${flags% }" <<'PY'
import json
import sys

keys = ["processor", "cores", "l1d", "l2", "l3", "memory_gib", "kernel", "rustc", "instructions"]
print(json.dumps({key: value for key, value in zip(keys, sys.argv[1:]) if value}))
PY
