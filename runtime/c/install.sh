#!/usr/bin/env bash
# Builds the C library and installs it: header, shared and static library, pkg-config file.
#
#   runtime/c/install.sh [--prefix DIR] [--target-dir DIR] [--debug]
#
# The default prefix is /usr/local. The symbols of the shared library have the version of the interface: Cargo cannot give
# them one, so the shared library is linked here, from the static one.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
prefix=/usr/local
target=
profile=release
while [ $# -gt 0 ]; do
    case "$1" in
        --prefix) prefix=${2:?--prefix needs a folder} && shift 2 ;;
        --target-dir) target=${2:?--target-dir needs a folder} && shift 2 ;;
        --debug) profile=debug && shift ;;
        *)
            echo "usage: $0 [--prefix DIR] [--target-dir DIR] [--debug]" >&2
            exit 2
            ;;
    esac
done
target=${target:-${CARGO_TARGET_DIR:-$here/../../target}}

options=(--locked --manifest-path "$here/Cargo.toml" --target-dir "$target" --lib)
[ "$profile" = debug ] || options+=(--release)
cargo build "${options[@]}"

version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' "$here/../../Cargo.toml")
major=${version%%.*}
install -d "$prefix/include" "$prefix/lib/pkgconfig"
prefix=$(cd "$prefix" && pwd)
install -m 644 "$here/include/mgpu.h" "$prefix/include/mgpu.h"
install -m 644 "$target/$profile/libmgpu_c.a" "$prefix/lib/libmgpu_c.a"

work=$(mktemp -d)
trap 'rm -f "$work/mgpu.map" "$work/libmgpu_c.so.$version" && rmdir "$work"' EXIT
sed "s/@VERSION@/$major/" "$here/mgpu.map.in" >"$work/mgpu.map"
"${CC:-cc}" -shared -o "$work/libmgpu_c.so.$version" \
    -Wl,--whole-archive "$target/$profile/libmgpu_c.a" -Wl,--no-whole-archive \
    -Wl,--version-script="$work/mgpu.map" -Wl,-soname,"libmgpu_c.so.$major" -Wl,--gc-sections -Wl,-z,defs \
    -lpthread -ldl -lm -lgcc_s
install -m 755 "$work/libmgpu_c.so.$version" "$prefix/lib/"
ln -sf "libmgpu_c.so.$version" "$prefix/lib/libmgpu_c.so.$major"
ln -sf "libmgpu_c.so.$major" "$prefix/lib/libmgpu_c.so"
sed -e "s|@PREFIX@|$prefix|" -e "s/@VERSION@/$version/" "$here/mgpu.pc.in" >"$prefix/lib/pkgconfig/mgpu.pc"
echo "installed version $version in $prefix; compile with: cc program.c \$(pkg-config --cflags --libs mgpu)"
