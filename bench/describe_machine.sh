#!/usr/bin/env bash
# Prints this machine as one JSON object, to store with figures measured on it. With --slug: processor and number of
# cores as a short name for files, such as `xeon-2c`.
set -euo pipefail

field() { lscpu | sed -n "s/^$1: *//p" | head -n 1; }

if [ "${1:-}" = --slug ]; then
    words=$(field 'Model name' | tr '[:upper:]' '[:lower:]' |
        sed -E 's/\((r|tm)\)//g; s/@.*//; s/[0-9]+(th|nd|rd|st) gen|[0-9]+-core|\b(intel|amd|processor|cpu)\b//g')
    slug=$(printf '%s' "$words" | sed -E 's/[^a-z0-9]+/-/g; s/^-+|-+$//g')
    printf '%s-%sc\n' "${slug:-machine}" "$(nproc)"
    exit
fi

python3 - "$(field 'Model name')" "$(nproc)" "$(field 'L2 cache')" "$(field 'L3 cache')" \
    "$(awk '/MemTotal/ {printf "%.0f", $2 / 1048576}' /proc/meminfo)" "$(uname -r)" "$(rustc --version)" \
    "$(lscpu | grep -o 'avx512_bf16\|avx512f\|avx2' | sort -u | tr '\n' ' ')" <<'PY'
import json
import sys

keys = ["processor", "cores", "l2", "l3", "memory_gib", "kernel", "rustc", "instructions"]
print(json.dumps(dict(zip(keys, sys.argv[1:]))))
PY
