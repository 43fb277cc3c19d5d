//! The folder of the rendezvous socket: private to its user, removed by its owner.
//!
//! A killed launcher leaves its folder behind, and a later launcher removes it. It knows that the folder is unused by a
//! lock: the owner holds a lock (`flock`) on the folder itself, which the kernel releases when the owner ends, however it
//! ends. A process removes a folder only while it holds the folder's lock. One race remains: between creating the folder
//! and locking it, another process (the remover) may find it unlocked. There are three cases:
//!
//! - The remover locks it first. The owner sees that the lock is taken and uses a folder of another name.
//! - The remover locks it, removes it and releases the lock before the owner tries to lock. The owner then finds no folder
//!   under the name, or locks a folder that no longer has a name. So it checks *after* locking whether the name still
//!   refers to the locked folder; if not, it uses a folder of another name.
//! - The owner locks it first, and the name still refers to it. From then on no other process can lock it, and so none
//!   removes it.
//!
//! The remover also checks that the name refers to the folder that it has locked before it removes anything. No process
//! ever waits for a lock. If the file system does not support locks, no process gets one, and abandoned folders stay.
//!
//! A rank may write a file there, `error-N.json`, that says why it failed.
//!
//! These folders lie in places where users keep their own files, some of which may have similar names. So a folder is
//! removed only if nothing but a launcher can have created it: its name is the prefix and 16 hexadecimal digits, it is
//! private to this user, and it holds nothing but the socket and regular files with the names of ranks' error files. Only
//! these are unlinked, and then the empty folder is removed. No removal is recursive, so a file that another process adds
//! at the last moment is kept, with the folder.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::libc;
use nix::unistd::geteuid;

use crate::protocol::new_run_id;
use crate::{Error, Result};

/// Prefix of the folders' names.
const PREFIX: &str = "mgpurun-socket-";
/// Number of hexadecimal digits after the prefix.
const DIGITS: usize = 16;
/// Name of the socket in the folder.
const SOCKET: &str = "rendezvous";
/// Maximum length of a Unix socket's path, with its terminating zero.
const MAX_SOCKET_PATH: usize = 108;
/// Names to try if other processes lock or remove the folder before this one locks it.
const ATTEMPTS: u32 = 8;

/// What the name of an error file has before and after the number of its rank on this host.
const ERROR_FILE: (&str, &str) = ("error-", ".json");

/// A folder of mode 0700, removed with its socket and error files on drop.
#[derive(Debug)]
pub(super) struct PrivateDirectory {
    path: PathBuf,
    /// Held as long as the folder is in use; `None` if the file system does not support locks.
    lock: Option<Flock<File>>,
}

impl PrivateDirectory {
    /// Creates a folder in `XDG_RUNTIME_DIR`, or else in the folder of temporary files.
    pub(super) fn create() -> Result<Self> {
        remove_abandoned();
        let mut refusals = Vec::new();
        for base in bases() {
            match Self::create_in(&base, lock) {
                Ok(directory) => return Ok(directory),
                Err(refusal) => refusals.push(refusal),
            }
        }
        Err(Error::system("create a private folder for the rendezvous socket", refusals.join("; ")))
    }

    /// Creates the folder in `base` and locks it with `lock`.
    fn create_in(base: &Path, lock: impl Fn(&Path) -> io::Result<Lock>) -> Result<Self, String> {
        for _ in 0..ATTEMPTS {
            let number = new_run_id().map_err(|error| error.to_string())?;
            let path = base.join(format!("{PREFIX}{}", &number[..DIGITS]));
            if path.join(SOCKET).as_os_str().len() >= MAX_SOCKET_PATH {
                return Err(format!("{} is too long for the path of a socket", path.display()));
            }
            let failed = |error: io::Error| format!("{}: {error}", path.display());
            DirBuilder::new().mode(0o700).create(&path).map_err(failed)?;
            let lock = match lock(&path) {
                Ok(Lock::Held(lock)) => Some(lock),
                Ok(Lock::Unsupported) => None,
                Ok(Lock::Taken) => continue,
                Err(error) => {
                    let _ = fs::remove_dir(&path);
                    return Err(failed(error));
                }
            };
            return Ok(PrivateDirectory { path, lock });
        }
        Err(format!("{}: other processes remove every new folder at once", base.display()))
    }

    /// Path of the socket.
    pub(super) fn socket(&self) -> PathBuf {
        self.path.join(SOCKET)
    }

    /// Path of the error file of the `number`-th rank of this host, which does not exist yet.
    pub(super) fn error_file(&self, number: u32) -> PathBuf {
        let (before, after) = ERROR_FILE;
        self.path.join(format!("{before}{number}{after}"))
    }
}

impl Drop for PrivateDirectory {
    fn drop(&mut self) {
        if remove(&self.path).is_err() {
            // The descriptor of the lock may have been the last one, and a folder cannot be read without one.
            self.lock = None;
            let _ = remove(&self.path);
        }
    }
}

/// Removes the folders that killed launchers of this user have left. Returns their number.
///
/// Every launcher does this when it starts. It does not touch folders of launchers that are running or starting, and it
/// does not block.
pub fn remove_abandoned() -> usize {
    bases().iter().map(|base| remove_abandoned_in(base)).sum()
}

/// Where folders are created, the preferred place first. The paths are absolute, since the working directory of a rank
/// may differ from the launcher's.
fn bases() -> Vec<PathBuf> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|base| !base.is_empty()).map(PathBuf::from);
    let bases = runtime.into_iter().chain([std::env::temp_dir()]);
    bases.map(|base| std::path::absolute(&base).unwrap_or(base)).collect()
}

fn remove_abandoned_in(base: &Path) -> usize {
    let entries = fs::read_dir(base).into_iter().flatten().flatten();
    let named = entries.filter(|entry| is_our_name(entry.file_name().as_encoded_bytes()));
    let is_removed = |path: &PathBuf| match lock(path) {
        // Removed while the lock is held.
        Ok(Lock::Held(lock)) => is_private(&lock) && holds_nothing_else(path) && remove(path).is_ok(),
        _ => false,
    };
    named.map(|entry| entry.path()).filter(is_removed).count()
}

fn is_our_name(name: &[u8]) -> bool {
    let is_digit = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    name.strip_prefix(PREFIX.as_bytes())
        .is_some_and(|digits| digits.len() == DIGITS && digits.iter().all(is_digit))
}

/// True if other users may neither read nor write the folder, as is so for those created here.
fn is_private(folder: &File) -> bool {
    folder.metadata().is_ok_and(|metadata| metadata.mode() & 0o077 == 0)
}

/// True if the folder holds nothing but the socket and error files, if anything.
fn holds_nothing_else(path: &Path) -> bool {
    let Ok(mut entries) = fs::read_dir(path) else { return false };
    entries.all(|entry| entry.is_ok_and(|entry| is_ours(&entry)))
}

/// True for the socket, and for what has the name of an error file. A rank may have put a link, a pipe, a socket or a
/// folder there: removing the name loses nothing, unless the folder holds something.
fn is_ours(entry: &fs::DirEntry) -> bool {
    let (name, (before, after)) = (entry.file_name(), ERROR_FILE);
    let number =
        name.to_str().and_then(|name| name.strip_prefix(before)).and_then(|name| name.strip_suffix(after));
    let is_error_file = number.is_some_and(|number| number.parse::<u32>().is_ok());
    // The type is that of the entry itself, not of what a link refers to.
    entry.file_type().is_ok_and(|kind| match () {
        () if name == SOCKET => kind.is_socket(),
        () if !is_error_file => false,
        () if kind.is_dir() => fs::read_dir(entry.path()).is_ok_and(|mut entries| entries.next().is_none()),
        () => kind.is_file() || kind.is_symlink() || kind.is_fifo() || kind.is_socket(),
    })
}

/// Removes the socket and the error files of a folder, and then the folder, if nothing else is in it.
fn remove(path: &Path) -> io::Result<()> {
    for entry in fs::read_dir(path)?.flatten().filter(is_ours) {
        let is_folder = entry.file_type()?.is_dir();
        // Neither follows a link, and a folder with something in it is not removed.
        if is_folder { fs::remove_dir(entry.path()) } else { fs::remove_file(entry.path()) }?;
    }
    fs::remove_dir(path)
}

/// The result of trying to lock a folder.
enum Lock {
    /// It is locked, its name refers to it, and it belongs to this user.
    Held(Flock<File>),
    /// Another process holds the lock or has removed the folder.
    Taken,
    /// The file system does not support locks.
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
    let is_same = |named: fs::Metadata| (named.dev(), named.ino()) == (ours.dev(), ours.ino());
    let ours_by_name = fs::symlink_metadata(path).is_ok_and(is_same);
    match ours_by_name && ours.uid() == geteuid().as_raw() {
        true => Ok(Lock::Held(locked)),
        false => Ok(Lock::Taken),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::collections::BTreeMap;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;

    use proptest::prelude::*;

    use super::*;

    fn count(base: &Path) -> usize {
        fs::read_dir(base).unwrap().count()
    }

    fn put_socket(path: &Path) {
        drop(UnixListener::bind(path).unwrap());
    }

    #[test]
    fn a_folder_in_use_is_kept_and_an_abandoned_one_is_removed() {
        let base = tempfile::tempdir().unwrap();
        // The socket is not in it yet.
        let directory = PrivateDirectory::create_in(base.path(), lock).unwrap();
        assert_eq!(remove_abandoned_in(base.path()), 0);
        put_socket(&directory.socket());
        assert_eq!((remove_abandoned_in(base.path()), count(base.path())), (0, 1));
        let path = directory.path.clone();
        drop(directory);
        assert_eq!(count(base.path()), 0);

        DirBuilder::new().mode(0o700).create(&path).unwrap();
        put_socket(&path.join(SOCKET));
        assert_eq!((remove_abandoned_in(base.path()), count(base.path())), (1, 0));
    }

    #[test]
    fn foreign_files_in_a_folder_are_kept() {
        let base = tempfile::tempdir().unwrap();
        let directory = PrivateDirectory::create_in(base.path(), lock).unwrap();
        put_socket(&directory.socket());
        let foreign = directory.path.join("weights");
        fs::write(&foreign, "w").unwrap();
        let socket = directory.socket();
        drop(directory);
        assert_eq!((fs::read(foreign).unwrap(), socket.exists()), (b"w".to_vec(), false));
    }

    #[test]
    fn a_folder_that_cannot_be_locked_is_removed() {
        let base = tempfile::tempdir().unwrap();
        let refuse = |_: &Path| Err(Errno::EMFILE.into());
        let refusal = PrivateDirectory::create_in(base.path(), refuse).unwrap_err();
        assert!(refusal.contains("Too many open files"), "{refusal}");
        assert_eq!(count(base.path()), 0);
    }

    /// Another process removes abandoned folders at each point of the creation of one.
    #[test]
    fn a_folder_that_another_process_locks_first_is_not_used() {
        let base = tempfile::tempdir().unwrap();
        let tried = RefCell::new(Vec::new());
        let removed_before = |path: &Path| {
            tried.borrow_mut().push(path.to_owned());
            if tried.borrow().len() < 3 {
                assert_eq!(remove_abandoned_in(base.path()), 1);
            }
            lock(path)
        };
        let directory = PrivateDirectory::create_in(base.path(), removed_before).unwrap();
        assert_eq!((tried.borrow().len(), &directory.path), (3, &tried.borrow()[2]));
        assert_eq!((remove_abandoned_in(base.path()), count(base.path())), (0, 1));

        let holder = Cell::new(None);
        let locked_before = |path: &Path| {
            let theirs =
                holder.take().map_or_else(|| lock(path).ok().map(|lock| (path.to_owned(), lock)), Some);
            holder.set(theirs);
            lock(path)
        };
        let other = PrivateDirectory::create_in(base.path(), locked_before).unwrap();
        assert_ne!(holder.take().unwrap().0, other.path);
    }

    #[test]
    fn error_files_are_removed_with_the_folder_and_other_files_are_kept() {
        let base = tempfile::tempdir().unwrap();
        let directory = PrivateDirectory::create_in(base.path(), lock).unwrap();
        put_socket(&directory.socket());
        for number in [0, 12] {
            fs::write(directory.error_file(number), "{}").unwrap();
        }
        drop(directory);
        assert_eq!(count(base.path()), 0);
        let directory = PrivateDirectory::create_in(base.path(), lock).unwrap();
        let (folder, other) = (directory.path.clone(), directory.path.join("error-0.json.tmp"));
        fs::write(&other, "kept").unwrap();
        fs::write(directory.error_file(0), "{}").unwrap();
        drop(directory);
        assert_eq!(paths(&folder), [other]);
    }

    /// A rank may replace its error file by anything.
    #[test]
    fn what_replaces_an_error_file_is_removed_unless_it_holds_something() {
        let (base, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::write(outside.path().join("file"), "kept").unwrap();
        let replaced = || {
            let directory = PrivateDirectory::create_in(base.path(), lock).unwrap();
            put_socket(&directory.socket());
            symlink(outside.path(), directory.error_file(0)).unwrap();
            symlink(outside.path().join("file"), directory.error_file(1)).unwrap();
            nix::unistd::mkfifo(&directory.error_file(2), nix::sys::stat::Mode::S_IRWXU).unwrap();
            put_socket(&directory.error_file(3));
            fs::create_dir(directory.error_file(4)).unwrap();
            symlink("nowhere", directory.error_file(5)).unwrap();
            directory
        };
        drop(replaced());
        assert_eq!(count(base.path()), 0);
        // The same for a launcher that was killed.
        let killed = replaced();
        let path = killed.path.clone();
        drop(std::mem::ManuallyDrop::new(killed).lock.take());
        assert_eq!((remove_abandoned_in(base.path()), path.exists()), (1, false));
        let directory = replaced();
        let kept = directory.error_file(4).join("kept");
        fs::write(&kept, "kept").unwrap();
        drop(directory);
        assert!(kept.exists());
        assert_eq!(remove_abandoned_in(base.path()), 0);
        assert!(kept.exists() && outside.path().join("file").exists());
    }

    /// Launchers start and clean up concurrently: none loses a folder in use.
    #[test]
    fn concurrent_cleanup_never_removes_a_folder_in_use() {
        let base = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                let base = base.path();
                scope.spawn(move || {
                    for _ in 0..200 {
                        remove_abandoned_in(base);
                        // All names may be lost to the others: that is an error, but no folder in use is lost.
                        let Ok(directory) = PrivateDirectory::create_in(base, lock) else { continue };
                        put_socket(&directory.socket());
                        std::thread::yield_now();
                        assert!(directory.socket().exists());
                    }
                });
            }
        });
        remove_abandoned_in(base.path());
        assert_eq!(count(base.path()), 0);
    }

    /// What a name in the base folder may refer to.
    #[derive(Debug, Clone)]
    enum Kept {
        File,
        Socket,
        /// A link to a folder outside.
        Link,
        /// A folder with its mode.
        Folder(u32, BTreeMap<String, Kept>),
    }

    impl Kept {
        fn put(&self, path: &Path, outside: &Path) {
            match self {
                Kept::File => fs::write(path, "kept").unwrap(),
                Kept::Socket => put_socket(path),
                Kept::Link => symlink(outside, path).unwrap(),
                Kept::Folder(mode, entries) => {
                    fs::create_dir(path).unwrap();
                    fs::set_permissions(path, fs::Permissions::from_mode(*mode)).unwrap();
                    entries.iter().for_each(|(name, entry)| entry.put(&path.join(name), outside));
                }
            }
        }

        /// True for a folder that a killed launcher may have left.
        fn is_abandoned(&self, name: &str) -> bool {
            let Kept::Folder(0o700, entries) = self else { return false };
            let is_error_file = |name: &str| ["error-0.json", "error-17.json"].contains(&name);
            let left = entries.iter().all(|(name, entry)| match entry {
                Kept::Socket => name == SOCKET || is_error_file(name),
                Kept::File | Kept::Link => is_error_file(name),
                Kept::Folder(_, entries) => is_error_file(name) && entries.is_empty(),
            });
            let is_digit = |c: char| "0123456789abcdef".contains(c);
            let digits = name.strip_prefix("mgpurun-socket-").unwrap_or_default();
            digits.len() == 16 && digits.chars().all(is_digit) && left
        }
    }

    fn any_kept() -> impl Strategy<Value = Kept> {
        let error_file =
            prop::sample::select(vec!["error-0.json", "error-17.json", "error-.json", "error-x.json"]);
        let name = prop_oneof![
            3 => Just(SOCKET.to_owned()),
            2 => error_file.prop_map(str::to_owned),
            1 => "[a-z.]{3,8}",
        ];
        let leaf = prop_oneof![2 => Just(Kept::Socket), 1 => Just(Kept::File), 1 => Just(Kept::Link)];
        leaf.prop_recursive(2, 8, 3, move |kept| {
            let mode = prop_oneof![4 => Just(0o700), 1 => Just(0o755)];
            (mode, prop::collection::btree_map(name.clone(), kept, 0..3))
                .prop_map(|(mode, entries)| Kept::Folder(mode, entries))
        })
    }

    /// Names of our folders, and names that resemble them.
    fn any_name() -> impl Strategy<Value = String> {
        prop_oneof![
            6 => "mgpurun-socket-[0-9a-f]{16}",
            1 => "mgpurun-socket-[0-9a-f]{15}",
            1 => "mgpurun-socket-[0-9a-f]{17}",
            1 => "mgpurun-socket-[0-9A-F]{16}",
            1 => "mgpurun-socket-[0-9a-f]{16}-1",
            1 => "mgpurun-[0-9a-f]{16}",
            1 => "mgpurun-[a-z]{1,12}",
        ]
    }

    /// Every path below `base`, without following links.
    fn paths(base: &Path) -> Vec<PathBuf> {
        let mut paths = Vec::new();
        for entry in fs::read_dir(base).unwrap().flatten() {
            if entry.file_type().unwrap().is_dir() {
                paths.extend(self::paths(&entry.path()));
            }
            paths.push(entry.path());
        }
        paths.sort();
        paths
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

        #[test]
        fn only_folders_that_a_launcher_made_are_removed(
            entries in prop::collection::btree_map(any_name(), any_kept(), 0..6)
        ) {
            let (base, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            put_socket(&outside.path().join(SOCKET));
            for (name, kept) in &entries {
                kept.put(&base.path().join(name), outside.path());
            }
            let mut expected = paths(base.path());
            let is_abandoned = |(name, kept): &(&String, &Kept)| kept.is_abandoned(name);
            let abandoned: Vec<PathBuf> =
                entries.iter().filter(is_abandoned).map(|(name, _)| base.path().join(name)).collect();
            expected.retain(|path| !abandoned.iter().any(|folder| path.starts_with(folder)));
            prop_assert_eq!(remove_abandoned_in(base.path()), abandoned.len());
            prop_assert_eq!(paths(base.path()), expected);
            prop_assert!(outside.path().join(SOCKET).exists());
        }
    }
}
