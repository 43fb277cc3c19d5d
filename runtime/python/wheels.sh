#!/usr/bin/env bash
# Builds wheels for Linux with glibc 2.28 or newer, for x86-64 and aarch64, and checks them.
#
#   runtime/python/wheels.sh [--out FOLDER] [--target-dir FOLDER] [x86_64] [aarch64]
#
# The default is both, into target/wheels. Needs Rust with the standard library of the architecture (rustup target add
# aarch64-unknown-linux-gnu), and a network for pip: zig is the linker, because it can link for an older glibc and for another
# architecture. The build backend makes the wheels, as in `pip install runtime/python`.
#
# Each wheel must have the tag of glibc 2.28 or older, and auditwheel must find that its programs need no newer one, and no
# library besides those of every Linux. The wheel of this machine's architecture is installed into a fresh environment, and
# two ranks sum with it. Programs of the other one are run under qemu-ARCH-static if there is one (packages qemu-user-static
# and libc6-arm64-cross).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# The newest minor version of glibc 2 that the programs may need.
glibc=28
# zig and auditwheel change what is built and what is accepted: the same versions until somebody tries newer ones.
tools=(cargo-zigbuild==0.24.1 ziglang==0.17.1 auditwheel==6.8.2)

usage() {
    echo "usage: $0 [--out FOLDER] [--target-dir FOLDER] [x86_64] [aarch64]" >&2
    exit 2
}
fail() {
    echo "$0: $*" >&2
    exit 1
}

target=${CARGO_TARGET_DIR:-$here/../../target}
out=
architectures=()
while [ $# -gt 0 ]; do
    case "$1" in
        --out) out=${2:?--out needs a folder} && shift 2 ;;
        --target-dir) target=${2:?--target-dir needs a folder} && shift 2 ;;
        x86_64 | aarch64) architectures+=("$1") && shift ;;
        *) usage ;;
    esac
done
[ ${#architectures[@]} -gt 0 ] || architectures=(x86_64 aarch64)
mkdir -p "$target" && target=$(cd "$target" && pwd)
out=${out:-$target/wheels}
mkdir -p "$out" && out=$(cd "$out" && pwd)

tools_folder=$target/wheel-tools
python3 -m venv "$tools_folder"
python=$tools_folder/bin/python
"$python" -m pip install --quiet --disable-pip-version-check "${tools[@]}"

# Builds a wheel for an architecture and prints its path. The folder is new, so there is one wheel in it.
build() {
    local architecture=$1 folder=$2
    # The backend needs no package. In an environment of its own pip would hide zig from cargo-zigbuild.
    env PATH="$tools_folder/bin:$PATH" CARGO_TARGET_DIR="$target" MGPU_CARGO="cargo zigbuild" \
        MGPU_TARGET="$architecture-unknown-linux-gnu.2.$glibc" \
        "$python" -m pip wheel --disable-pip-version-check --no-deps --no-build-isolation --no-index \
        --wheel-dir "$folder" "$here" >&2 || return
    echo "$folder"/*.whl
}

# The tag, and what auditwheel says.
check_tag() {
    local architecture=$1 wheel=$2 minor report
    minor=$(basename "$wheel" | sed -n "s/.*-py3-none-manylinux_2_\([0-9]*\)_$architecture\.whl$/\1/p")
    [ -n "$minor" ] && [ "$minor" -le "$glibc" ] || fail "$(basename "$wheel") is not for glibc 2.$glibc on $architecture"
    report=$("$tools_folder/bin/auditwheel" show "$wheel") || fail "auditwheel cannot read $wheel"
    printf '%s\n' "$report"
    minor=$(printf '%s\n' "$report" | tr '\n' ' ' |
        sed -n "s/.*platform tag: *\"manylinux_2_\([0-9]*\)_$architecture\".*/\1/p")
    [ -n "$minor" ] && [ "$minor" -le "$glibc" ] ||
        fail "auditwheel: $(basename "$wheel") does not run everywhere with glibc 2.$glibc"
}

# Installs a wheel into a fresh environment, and sums with it on two ranks.
check_installed() {
    local wheel=$1 folder=$2
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-index "$wheel"
    cat >"$folder/sum.py" <<'PROGRAM'
import mgpurun

world = mgpurun.init()
total = mgpurun.all_reduce(bytearray([world.rank + 1]))
assert total[0] == 3, total[0]
print("summed on", world.size, "ranks")
PROGRAM
    "$folder/venv/bin/mgpurun" -n 2 --backend cpu "$folder/venv/bin/python" "$folder/sum.py"
}

# Unpacks a wheel of another architecture and runs its programs under an emulator: the launcher without ranks, and two ranks
# without a launcher. (qemu has a thread of its own in every process, and the launcher forks only where there is none.)
check_emulated() {
    local architecture=$1 wheel=$2 folder=$3 libraries=/usr/$1-linux-gnu emulator
    emulator=$(command -v "qemu-$architecture-static") && [ -e "$libraries/lib/libc.so.6" ] || {
        echo "skipped: running the wheel for $architecture (needs qemu-user-static and libc6-arm64-cross)"
        return
    }
    "$python" -m zipfile -e "$wheel" "$folder/unpacked"
    # zipfile forgets who may execute what.
    chmod +x "$folder"/unpacked/mgpurun-*.data/scripts/*
    local programs=("$folder"/unpacked/mgpurun-*.data/scripts) emulated=("$emulator" -L "$libraries") rank ranks=()
    "${emulated[@]}" "${programs[0]}/mgpurun" --version
    "${emulated[@]}" "${programs[0]}/mgpurun" -n 2 --backend cpu --dry-run "${programs[0]}/allreduce_perf" >/dev/null
    for rank in 0 1; do
        env WORLD_SIZE=2 RANK=$rank LOCAL_RANK=$rank MGPU_RUN_ID="wheel-$$" MGPU_BACKEND=cpu timeout 300 \
            "${emulated[@]}" "${programs[0]}/allreduce_perf" --max 1024 --check &
        ranks+=($!)
    done
    for rank in 0 1; do
        wait "${ranks[$rank]}" || fail "rank $rank of the wheel for $architecture fails"
    done
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for architecture in "${architectures[@]}"; do
    began=$SECONDS
    printf '\n== %s\n' "$architecture"
    rustup target add "$architecture-unknown-linux-gnu" 2>/dev/null ||
        rustc --print target-libdir --target "$architecture-unknown-linux-gnu" | xargs ls >/dev/null 2>&1 ||
        fail "Rust has no standard library for $architecture-unknown-linux-gnu: rustup target add"
    mkdir "$work/$architecture" "$work/$architecture/wheel"
    wheel=$(build "$architecture" "$work/$architecture/wheel") || fail "no wheel for $architecture"
    built=$((SECONDS - began))
    check_tag "$architecture" "$wheel"
    if [ "$architecture" = "$(uname -m)" ]; then
        check_installed "$wheel" "$work/$architecture"
    else
        check_emulated "$architecture" "$wheel" "$work/$architecture"
    fi
    cp "$wheel" "$out"
    echo "$out/$(basename "$wheel"): $(stat -c %s "$wheel") bytes, built in $built s"
done
