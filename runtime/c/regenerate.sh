#!/usr/bin/env bash
# Regenerates include/mgpu.h from src. With --check the committed file is not written; the exit status says whether it
# differs.
#
# Needs cargo, and crates.io if cbindgen of the version below is not on PATH.
set -euo pipefail

CBINDGEN_VERSION=0.29.2

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

cbindgen=cbindgen
if [ "$(cbindgen --version 2>/dev/null || true)" != "cbindgen $CBINDGEN_VERSION" ]; then
    cargo install --quiet --locked --root "$work/cargo" --version "$CBINDGEN_VERSION" cbindgen
    cbindgen=$work/cargo/bin/cbindgen
fi

# Warnings are about the feature of the build, which the header has as a macro.
"$cbindgen" --quiet --config "$here/cbindgen.toml" --output "$work/mgpu.h" "$here"

if $check; then
    if ! diff -u "$here/include/mgpu.h" "$work/mgpu.h"; then
        echo "include/mgpu.h differs from the output of cbindgen $CBINDGEN_VERSION: run $0" >&2
        exit 1
    fi
    echo "include/mgpu.h equals the output of cbindgen $CBINDGEN_VERSION"
else
    cp "$work/mgpu.h" "$here/include/mgpu.h"
    echo "wrote include/mgpu.h"
fi
