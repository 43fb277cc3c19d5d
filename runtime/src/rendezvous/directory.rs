//! The folder of the rendezvous socket: private to its user, gone with its owner.
//!
//! A launcher that is killed leaves its folder behind, and a later one removes it. How does it know that nobody uses
//! it? The owner holds a lock (`flock`) on the folder itself, which the kernel takes back when the owner is gone,
//! however it went. Nobody removes a folder without holding its lock. What is left is the moment between making a folder
//! and locking it, in which somebody else may find it without a lock:
//!
//! - He locks it first. The owner sees that the lock is taken, and uses a folder of another name.
//! - He locks it, removes it and lets it go before the owner tries. The owner then finds no folder under the name, or
//!   gets the lock of a folder that has no name any more. So it looks, *after* it has the lock, whether the name still
//!   leads to what it has locked; if not, it uses a folder of another name.
//! - The owner locks it first, and the name still leads to it. From now on nobody else gets the lock, and what nobody
//!   has locked nobody removes.
//!
//! In the same way the remover looks whether the name leads to what it has locked before it removes anything. Nobody
//! ever waits for a lock. Where the file system knows no locks, nobody gets one, and nothing abandoned is removed.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::libc;
use nix::unistd::geteuid;

use crate::{Error, Result};

/// What the folders' names begin with.
const PREFIX: &str = "mgpurun-";
/// Name of the socket in the folder.
const SOCKET: &str = "rendezvous";
/// Longest path of a Unix socket, with its terminating zero.
const MAX_SOCKET_PATH: usize = 108;
/// Names tried where others remove the folder before it is locked.
const ATTEMPTS: u32 = 8;

/// A folder of mode 0700, removed with all it holds on drop.
#[derive(Debug)]
pub(super) struct PrivateDirectory {
    path: PathBuf,
    /// Held as long as the folder is in use; `None` where the file system knows no locks.
    _lock: Option<Flock<File>>,
}

impl PrivateDirectory {
    /// Makes the folder of run `run_id` in `XDG_RUNTIME_DIR`, or among the temporary files.
    pub(super) fn create(run_id: &str) -> Result<Self> {
        remove_abandoned();
        let mut refusals = Vec::new();
        for base in bases() {
            match Self::create_in(&base, run_id, lock) {
                Ok(directory) => return Ok(directory),
                Err(refusal) => refusals.push(refusal),
            }
        }
        Err(Error::system("make a private folder for the rendezvous socket", refusals.join("; ")))
    }

    /// Makes the folder in `base` and locks it with `lock`.
    fn create_in(
        base: &Path,
        run_id: &str,
        lock: impl Fn(&Path) -> io::Result<Lock>,
    ) -> Result<Self, String> {
        // Enough of it to be unique among the launchers of a machine.
        let run: String = run_id.chars().filter(char::is_ascii_alphanumeric).take(16).collect();
        for attempt in 0..ATTEMPTS {
            let suffix = if attempt == 0 { String::new() } else { format!("-{attempt}") };
            let path = base.join(format!("{PREFIX}{run}{suffix}"));
            if path.join(SOCKET).as_os_str().len() >= MAX_SOCKET_PATH {
                return Err(format!("{} is too long for a socket's path", path.display()));
            }
            let failed = |error: io::Error| format!("{}: {error}", path.display());
            DirBuilder::new().mode(0o700).create(&path).map_err(failed)?;
            let lock = match lock(&path).map_err(failed)? {
                Lock::Held(lock) => Some(lock),
                Lock::Unsupported => None,
                Lock::Taken => continue,
            };
            return Ok(PrivateDirectory { path, _lock: lock });
        }
        Err(format!("{}: what is made here is removed at once by others", base.display()))
    }

    /// Where the socket belongs.
    pub(super) fn socket(&self) -> PathBuf {
        self.path.join(SOCKET)
    }
}

impl Drop for PrivateDirectory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// Removes the folders that killed launchers of this user have left, and says how many.
///
/// Every launcher does this when it starts. Folders of launchers that are running, or about to, are left alone; nothing
/// is waited for.
pub fn remove_abandoned() -> usize {
    bases().iter().map(|base| remove_abandoned_in(base)).sum()
}

/// Where folders are made, the best place first. Ranks may be in other folders than the launcher: none is relative.
fn bases() -> Vec<PathBuf> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|base| !base.is_empty()).map(PathBuf::from);
    let bases = runtime.into_iter().chain([std::env::temp_dir()]);
    bases.map(|base| std::path::absolute(&base).unwrap_or(base)).collect()
}

fn remove_abandoned_in(base: &Path) -> usize {
    let entries = std::fs::read_dir(base).into_iter().flatten().flatten();
    let named = entries.filter(|entry| entry.file_name().as_encoded_bytes().starts_with(PREFIX.as_bytes()));
    let remove = |path: PathBuf| match lock(&path) {
        // Removed while the lock is held.
        Ok(Lock::Held(_lock)) => std::fs::remove_dir_all(&path).is_ok(),
        _ => false,
    };
    named.map(|entry| remove(entry.path())).filter(|removed| *removed).count()
}

/// What came of an attempt to lock a folder.
enum Lock {
    /// It is locked, its name leads to it, and it belongs to this user.
    Held(Flock<File>),
    /// Somebody else holds the lock, or has removed the folder.
    Taken,
    /// The file system knows no locks.
    Unsupported,
}

/// Tries to lock the folder at `path`.
fn lock(path: &Path) -> io::Result<Lock> {
    let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW;
    let folder = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Ok(folder) => folder,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Lock::Taken),
        Err(error) => return Err(error),
    };
    let locked = match Flock::lock(folder, FlockArg::LockExclusiveNonblock) {
        Ok(locked) => locked,
        Err((_, Errno::EWOULDBLOCK)) => return Ok(Lock::Taken),
        Err(_) => return Ok(Lock::Unsupported),
    };
    let ours = locked.metadata()?;
    let is_same = |named: std::fs::Metadata| (named.dev(), named.ino()) == (ours.dev(), ours.ino());
    let ours_by_name = std::fs::symlink_metadata(path).is_ok_and(is_same);
    match ours_by_name && ours.uid() == geteuid().as_raw() {
        true => Ok(Lock::Held(locked)),
        false => Ok(Lock::Taken),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn count(base: &Path) -> usize {
        std::fs::read_dir(base).unwrap().count()
    }

    #[test]
    fn a_folder_in_use_stays_and_an_abandoned_one_goes() {
        let base = tempfile::tempdir().unwrap();
        // Neither a socket nor anything else is in it yet.
        let directory = PrivateDirectory::create_in(base.path(), "0123456789abcdef0123", lock).unwrap();
        assert_eq!(directory.socket(), base.path().join("mgpurun-0123456789abcdef/rendezvous"));
        assert_eq!(remove_abandoned_in(base.path()), 0);
        assert_eq!(count(base.path()), 1);

        let abandoned = base.path().join("mgpurun-1");
        std::fs::create_dir_all(abandoned.join("deeper")).unwrap();
        std::fs::write(abandoned.join("rendezvous"), b"").unwrap();
        std::fs::create_dir(base.path().join("of-another-program")).unwrap();
        std::fs::write(base.path().join("mgpurun-file"), b"").unwrap();
        std::os::unix::fs::symlink(base.path(), base.path().join("mgpurun-link")).unwrap();
        assert_eq!(remove_abandoned_in(base.path()), 1);
        assert!(!abandoned.exists());
        assert_eq!(count(base.path()), 4);

        drop(directory);
        assert_eq!(count(base.path()), 3);
    }

    /// Somebody removes abandoned folders at every moment of the making of one.
    #[test]
    fn a_folder_that_is_found_before_it_is_locked_is_not_used() {
        let base = tempfile::tempdir().unwrap();
        let disturbed = Cell::new(0);
        let removed_before = |path: &Path| {
            if disturbed.replace(disturbed.get() + 1) < 2 {
                assert_eq!(remove_abandoned_in(base.path()), 1);
            }
            lock(path)
        };
        let directory = PrivateDirectory::create_in(base.path(), "a", removed_before).unwrap();
        assert_eq!(directory.socket(), base.path().join("mgpurun-a-2/rendezvous"));
        assert_eq!((remove_abandoned_in(base.path()), count(base.path())), (0, 1));

        let holder = Cell::new(None);
        let locked_before = |path: &Path| {
            let theirs = holder.take().map_or_else(|| lock(path).ok(), Some);
            holder.set(theirs);
            lock(path)
        };
        let other = PrivateDirectory::create_in(base.path(), "b", locked_before).unwrap();
        assert_eq!(other.socket(), base.path().join("mgpurun-b-1/rendezvous"));
    }

    /// Launchers that start and others that clean up, all at once: nobody loses a folder in use.
    #[test]
    fn nobody_loses_a_folder_to_others_that_clean_up() {
        let base = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for owner in 0..3 {
                let base = base.path();
                scope.spawn(move || {
                    for run in 0..200 {
                        remove_abandoned_in(base);
                        let run_id = format!("{owner}x{run}");
                        // All names may be lost to the others, which is an error and no loss.
                        let Ok(directory) = PrivateDirectory::create_in(base, &run_id, lock) else {
                            continue;
                        };
                        std::fs::write(directory.socket(), b"").unwrap();
                        std::thread::yield_now();
                        assert!(directory.socket().exists(), "{run_id}");
                    }
                });
            }
        });
        remove_abandoned_in(base.path());
        assert_eq!(count(base.path()), 0);
    }
}
