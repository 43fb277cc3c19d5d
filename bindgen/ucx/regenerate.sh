#!/usr/bin/env bash
# Regenerates src/sys.rs from UCX's headers. With --check the committed file is not written; the exit status says
# whether it differs.
#
# Needs python3 with venv, rustfmt and the network (PyPI; crates.io if bindgen of the version below is not on PATH).
# UCX's headers and libclang come from their wheels, what the headers include from stubs/: neither UCX nor a compiler
# nor the system's headers are read, so every machine generates the same bytes.
#
#   UCX_WHEEL=FILE   take the headers from this downloaded wheel (43 MB), which must be of the version below.
set -euo pipefail

UCX_PACKAGE=libucx-cu12
UCX_VERSION=1.22.0
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

if [ -n "${UCX_WHEEL-}" ]; then
    wheel=$UCX_WHEEL
else
    "${pip[@]}" download --no-deps --no-cache-dir --only-binary :all: --dest "$work" "$UCX_PACKAGE==$UCX_VERSION"
    wheel=$(echo "$work"/libucx*.whl)
fi
found=$("$work/venv/bin/python" - "$wheel" "$work" <<'PYTHON'
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if name.startswith("libucx/include/")])
    print(wheel.read("libucx/UCX_WHEEL_VERSION.txt").decode().strip())
PYTHON
)
if [ "$found" != "$UCX_VERSION" ]; then
    echo "the headers are of UCX $found, but this script needs those of $UCX_VERSION" >&2
    exit 1
fi

bindgen=bindgen
if [ "$(bindgen --version 2>/dev/null || true)" != "bindgen $BINDGEN_VERSION" ]; then
    cargo install --quiet --locked --root "$work/cargo" --version "$BINDGEN_VERSION" bindgen-cli
    bindgen=$work/cargo/bin/bindgen
fi

# What src/ uses: all of it is in UCX 1.11 and later, with the same layout up to the fields that were added at the end
# of structs, which a `field_mask` selects. A library that lacks one of the functions is rejected as a whole.
functions='ucp_(get_version|init_version|cleanup)
ucp_worker_(create|destroy|get_address|release_address|get_efd|arm|signal|progress)
ucp_ep_(create|close_nbx)
ucp_tag_(send_nbx|recv_nbx|probe_nb|msg_recv_nbx|recv_request_test)
ucp_request_(check_status|cancel|free)
ucs_status_string'
types='ucs_(status|thread_mode)_t|ucp_feature|ucp_(worker_|ep_)?params_field|ucp_(op_attr|err_handling_mode|ep_close_flags)_t'

# The comments of the headers are left out: they are UCX's text. The target is fixed because sizes and the signedness
# of enums depend on it in principle; the types printed are the same on every 64-bit Linux.
"$bindgen" "$work/libucx/include/ucp/api/ucp.h" \
    --dynamic-loading UcxSymbols \
    --dynamic-link-require-all \
    --default-enum-style newtype \
    --bitfield-enum 'ucp_feature|ucp_.*_field|ucp_op_attr_t' \
    --allowlist-function "$(echo "$functions" | paste -sd '|')" \
    --allowlist-type "$types" \
    --no-doc-comments \
    --no-prepend-enum-name \
    --no-include-path-detection \
    --use-core \
    --wrap-unsafe-ops \
    --disable-header-comment \
    --raw-line "// Generated from the headers of UCX $UCX_VERSION (PyPI package $UCX_PACKAGE) by bindgen $BINDGEN_VERSION." \
    --raw-line "// Do not edit: run bindgen/ucx/regenerate.sh." \
    --rust-target "$RUST_TARGET" \
    --rust-edition 2024 \
    --rustfmt-configuration-file "$here/../../rustfmt.toml" \
    --output "$work/sys.rs" \
    -- -nostdinc -isystem "$here/stubs" -I "$work/libucx/include" --target=x86_64-unknown-linux-gnu

if $check; then
    if ! diff -u "$here/src/sys.rs" "$work/sys.rs"; then
        echo "src/sys.rs differs from the output of bindgen $BINDGEN_VERSION for UCX $UCX_VERSION: run $0" >&2
        exit 1
    fi
    echo "src/sys.rs equals the output of bindgen $BINDGEN_VERSION for UCX $UCX_VERSION"
else
    cp "$work/sys.rs" "$here/src/sys.rs"
    echo "wrote src/sys.rs from UCX $UCX_VERSION"
fi
