//! Permission for the processor's tile registers (AMX), which the kernel gives to a process that asks.

use std::io;

/// Asks for tile registers for all threads of this process. Asking again is allowed.
///
/// # Errors
/// If the processor has none; if the kernel is older than Linux 5.16 or a sandbox forbids the call; if a thread has a stack
/// for signals that is too small for them.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub fn request() -> io::Result<()> {
    use nix::libc;
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: the call takes two numbers and changes nothing but the permission.
    match unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// As on x86-64, where there are none.
///
/// # Errors
/// Always.
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
pub fn request() -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}
