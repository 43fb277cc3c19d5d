#!/usr/bin/env bash
# All checks and benchmarks on a machine with a GPU. Needs neither Rust nor the sources there:
#
#   bench/gpu_check.sh pack FOLDER        on a machine with a release build: makes FOLDER and FOLDER.tgz (under 50 MB)
#   FOLDER/gpu_check.sh [A|B|C…]          on the machine with the GPU
#   bench/gpu_check.sh [A|B|C…]           the same, from a checkout with a release build
#
# Requirements: see --help and bench/README.md.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
programs="mgpurun train_mnist golden_check gpu_check allreduce_perf"
# Programs of the tests: they travel if `cargo test` has built them.
optional="t-device-step t-groups t-collectives"

if [ "${1-}" != pack ]; then
    # The virtual environment's own interpreter: NVIDIA's libraries are searched beside it.
    python=python3
    if [ -n "${VIRTUAL_ENV-}" ] && [ -x "$VIRTUAL_ENV/bin/python" ]; then
        python=$VIRTUAL_ENV/bin/python
    fi
    exec "$python" "$here/gpu_check.py" "$@"
fi

folder=${2:?usage: $0 pack FOLDER}
mkdir -p "$folder"
built=${BIN:-$here/../target/release}
for program in $programs; do
    strip -o "$folder/$program" "$built/$program"
done
for program in $optional; do
    for build in "$built" "$here/../target/debug"; do
        if [ -e "$build/$program" ]; then
            strip -o "$folder/$program" "$build/$program"
            break
        fi
    done
    [ -e "$folder/$program" ] || echo "without $program: \`cargo test\` builds it" >&2
done
cp -f "$here"/gpu_{check,commands,fast,host,rest,right,session,speed}.py "$here"/{gpu_check.sh,torch_throughput.py,provenance.py} \
    "$here/describe_machine.sh" "$folder"
# There is no checkout on the other machine.
PYTHONPATH=$here python3 -c 'import provenance; print(provenance.commit() or "")' > "$folder/commit"
mkdir -p "$folder/peers" && cp -f "$here"/peers/*_torch.py "$folder/peers"
# Golden runs and MNIST, if they are at hand.
if [ -d "${MGPU_GOLDEN-}" ]; then
    mkdir -p "$folder/golden" && cp -f "$MGPU_GOLDEN"/*.json "$folder/golden"
else
    echo "without golden runs: set MGPU_GOLDEN to their folder" >&2
fi
if [ -d "${MGPU_DATA-}" ]; then
    mkdir -p "$folder/data/mnist" && cp -f "$MGPU_DATA"/*ubyte* "$folder/data/mnist"
else
    echo "without MNIST, and so without accuracies, golden runs and PyTorch: set MGPU_DATA to its folder" >&2
fi
archive=${folder%/}.tgz
tar czf "$archive" -C "$(dirname "$folder")" "$(basename "$folder")"
megabytes=$(du -m "$archive" | cut -f 1)
echo "$folder, and as an archive $archive: $megabytes MB"
if [ "$megabytes" -ge 50 ]; then
    echo "too large: the limit of an archive is 50 MB" >&2
    exit 1
fi
