#!/usr/bin/env bash
# Regenerates src/sys.rs from nccl.h. With --check the committed file is not written; the exit status says whether it
# differs.
#
# Needs python3 with venv, rustfmt and the network (PyPI; crates.io if bindgen of the version below is not on PATH).
# NCCL's header and libclang come from their wheels, what nccl.h includes from stubs/: neither CUDA nor a compiler nor
# the system's headers are read, so every machine generates the same bytes.
#
#   NCCL_WHEEL=FILE   take the header from this downloaded wheel, which must be of the version below. (The wheel is
#                     300 MB, and CI downloads it anyway for the test that loads the library.)
set -euo pipefail

NCCL_PACKAGE=nvidia-nccl-cu13
NCCL_VERSION=2.32.3
LIBCLANG_VERSION=18.1.1
BINDGEN_VERSION=0.73.2
RUST_TARGET=1.90

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
check=false
case "${1-}" in
    '') ;;
    --check) check=true ;;
    *)
        echo "usage: $0 [--check]" >&2
        exit 2
        ;;
esac

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python3 -m venv "$work/venv"
pip=("$work/venv/bin/python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install "libclang==$LIBCLANG_VERSION"
LIBCLANG_PATH=$("$work/venv/bin/python" -c 'import clang, os; print(os.path.join(clang.__path__[0], "native"))')
export LIBCLANG_PATH

if [ -n "${NCCL_WHEEL-}" ]; then
    wheel=$NCCL_WHEEL
else
    "${pip[@]}" download --no-deps --no-cache-dir --only-binary :all: --dest "$work" "$NCCL_PACKAGE==$NCCL_VERSION"
    wheel=$(echo "$work"/nvidia_nccl*.whl)
fi
"$work/venv/bin/python" - "$wheel" "$work/nccl.h" <<'PYTHON'
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel, open(sys.argv[2], "wb") as header:
    header.write(wheel.read("nvidia/nccl/include/nccl.h"))
PYTHON
found=$(awk '$1 == "#define" && $2 ~ /^NCCL_(MAJOR|MINOR|PATCH)$/ { v = v sep $3; sep = "." } END { print v }' "$work/nccl.h")
if [ "$found" != "$NCCL_VERSION" ]; then
    echo "the header is of NCCL $found, but this script needs that of $NCCL_VERSION" >&2
    exit 1
fi

bindgen=bindgen
if [ "$(bindgen --version 2>/dev/null || true)" != "bindgen $BINDGEN_VERSION" ]; then
    cargo install --quiet --locked --root "$work/cargo" --version "$BINDGEN_VERSION" bindgen-cli
    bindgen=$work/cargo/bin/bindgen
fi

# The comments of nccl.h are left out: they are NVIDIA's text. The target is fixed because sizes and the signedness of
# enums depend on it in principle; the types printed are the same on every 64-bit Linux.
"$bindgen" "$work/nccl.h" \
    --dynamic-loading NcclSymbols \
    --default-enum-style newtype \
    --allowlist-item 'nccl.*|NCCL_.*' \
    --no-doc-comments \
    --no-prepend-enum-name \
    --no-include-path-detection \
    --use-core \
    --wrap-unsafe-ops \
    --disable-header-comment \
    --raw-line "// Generated from the nccl.h of NCCL $NCCL_VERSION (PyPI package $NCCL_PACKAGE) by bindgen $BINDGEN_VERSION." \
    --raw-line "// Do not edit: run bindgen/regenerate.sh." \
    --rust-target "$RUST_TARGET" \
    --rust-edition 2024 \
    --rustfmt-configuration-file "$here/../rustfmt.toml" \
    --output "$work/sys.rs" \
    -- -nostdinc -isystem "$here/stubs" --target=x86_64-unknown-linux-gnu

if $check; then
    if ! diff -u "$here/src/sys.rs" "$work/sys.rs"; then
        echo "src/sys.rs differs from the output of bindgen $BINDGEN_VERSION for NCCL $NCCL_VERSION: run $0" >&2
        exit 1
    fi
    echo "src/sys.rs equals the output of bindgen $BINDGEN_VERSION for NCCL $NCCL_VERSION"
else
    cp "$work/sys.rs" "$here/src/sys.rs"
    echo "wrote src/sys.rs from NCCL $NCCL_VERSION"
fi
