//! Names the shared library: programs that link it look for the version of the interface that they were built with.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let version = std::env::var("CARGO_PKG_VERSION_MAJOR").expect("Cargo sets it");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libmgpu_c.so.{version}");
}
