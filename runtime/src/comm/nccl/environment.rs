//! How a rank tells NCCL which interface to take: by variables of its own environment, since NCCL has no other way. It reads
//! them when the process creates its first communicator or unique id.
//!
//! A program has several threads by then (those of the driver, of the rendezvous, perhaps of an interpreter), and any of them
//! may call getenv(3). setenv(3) may move the list of variables and free the old one under their eyes (up to glibc 2.40). So
//! this makes a new list, publishes it, and frees nothing: whoever reads the old list can finish. It is done at most once for
//! each variable, and only if the user has asked for it (`MGPU_NCCL_PREFLIGHT=set`).

use std::ffi::{CStr, CString, c_char};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

unsafe extern "C" {
    /// The variables of this process, each `NAME=VALUE`, behind them a null pointer.
    static mut environ: *mut *mut c_char;
}

/// Sets variables of this process. Threads may read the environment meanwhile, but not change it. Variables with a null
/// character are left out.
pub(crate) fn set_variables(variables: &[(String, String)]) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    for (name, value) in variables {
        if let Ok(entry) = CString::new(format!("{name}={value}")) {
            set_variable(name, entry);
        }
    }
}

/// Replaces the list of variables by one with `entry` for `name`.
fn set_variable(name: &str, entry: CString) {
    // SAFETY: a pointer that the C library accesses as one word, and that lives as long as the process.
    let list = unsafe { AtomicPtr::from_ptr(&raw mut environ) };
    let mut entries = Vec::new();
    let mut next = list.load(Ordering::Acquire);
    // SAFETY: the list ends with a null pointer, and so does a process without variables. Nobody changes the list now, as
    // `World::from_env` demands.
    while let Some(old) = unsafe { next.as_ref() }.copied().filter(|old| !old.is_null()) {
        // SAFETY: an entry is a string of C.
        let text = unsafe { CStr::from_ptr(old) }.to_bytes();
        let is_replaced = text.strip_prefix(name.as_bytes()).is_some_and(|rest| rest.starts_with(b"="));
        if !is_replaced {
            entries.push(old);
        }
        // SAFETY: behind an entry there is another one, or the null pointer.
        next = unsafe { next.add(1) };
    }
    entries.extend([entry.into_raw(), ptr::null_mut()]);
    // Never freed: other threads may keep a pointer to the list or into it.
    list.store(entries.leak().as_mut_ptr(), Ordering::Release);
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use super::*;

    #[test]
    fn variables_are_set_while_other_threads_read_them() {
        const NAME: &str = "MGPU_TEST_OF_VARIABLES";
        let path = std::env::var("PATH").unwrap();
        let is_done = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !is_done.load(Ordering::Relaxed) {
                        assert_eq!(std::env::var("PATH").as_ref(), Ok(&path));
                    }
                });
            }
            for round in 0..100 {
                let pair = |name: &str| (name.to_owned(), format!("={round}"));
                set_variables(&[pair(NAME), pair(&format!("{NAME}_2"))]);
                assert_eq!(std::env::var(NAME), Ok(format!("={round}")));
            }
            is_done.store(true, Ordering::Relaxed);
        });
        set_variables(&[(NAME.to_owned(), "a\0b".to_owned())]);
        let seen = Command::new("env").output().unwrap().stdout;
        let seen = String::from_utf8_lossy(&seen).into_owned();
        let own: Vec<&str> = seen.lines().filter(|line| line.starts_with(NAME)).collect();
        assert_eq!(own, [format!("{NAME}==99"), format!("{NAME}_2==99")]);
        assert!(seen.lines().any(|line| line == format!("PATH={path}")));
    }
}
