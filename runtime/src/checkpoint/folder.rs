//! The checkpoint folder: names of checkpoints, the lock of the writer, and leftovers of killed runs.
//!
//! `step-00001234` is a complete checkpoint. Names that begin with a dot are not: `.step-00001234.partial` is being
//! written, `.step-00001234.removed` is being deleted. `step-00001234.replaced` is complete, and is about to be
//! replaced by a new checkpoint of the same step (`publish`).
//!
//! There is one writer at a time. It holds a lock on the folder, which the kernel releases when the process ends. So
//! every hidden name that the next writer finds after taking the lock belongs to a dead process and can be removed
//! (`removal`), and two runs that use the same folder by mistake do not delete each other's checkpoints. On file
//! systems without locks, hidden names are left alone. On a network file system a lock may only be known to one host:
//! there, two runs must not share a folder. Readers need no lock (`read`).
//!
//! The lock belongs to the folder's inode, not to its name. If the folder is removed and created again while a writer
//! lives, another writer may lock the new one. So a writer compares the two inodes before it gives a checkpoint its
//! name.

use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{AT_FDCWD, AtFlags};
use nix::unistd::{AccessFlags, faccessat};

use super::failed;
use super::files::flush_folder;
use super::manifest::MANIFEST;
use super::removal::{is_folder, is_ours, is_taken, remove_written};
use super::shared_folder;
use crate::Result;

const PREFIX: &str = "step-";
pub(super) const PARTIAL: &str = "partial";
pub(super) const REMOVED: &str = "removed";
pub(super) const REPLACED: &str = "replaced";

/// A checkpoint with the step in its name. Greater is newer.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct NamedCheckpoint {
    pub(super) step: u64,
    /// False for `step-N.replaced`.
    pub(super) current: bool,
    pub(super) path: PathBuf,
}

impl NamedCheckpoint {
    fn new(path: PathBuf) -> Option<Self> {
        let name = path.file_name()?.to_str()?.strip_prefix(PREFIX)?;
        let (digits, current) = match name.split_once('.') {
            None => (name, true),
            Some((digits, REPLACED)) => (digits, false),
            Some(_) => return None,
        };
        let step = step_of(digits)?;
        holds_checkpoint(&path).then_some(NamedCheckpoint { step, current, path })
    }

    /// Whether a writer has written it, so that it may be removed.
    pub(super) fn is_ours(&self) -> bool {
        is_ours(&self.path, self.step)
    }
}

/// Whether `path` is a folder, or a link to one, that contains a checkpoint or parts of one.
pub(super) fn holds_checkpoint(path: &Path) -> bool {
    let is_part = |name: &str| name == MANIFEST || name.ends_with(".safetensors");
    match fs::read_dir(path) {
        Ok(entries) => entries.flatten().any(|entry| entry.file_name().to_str().is_some_and(is_part)),
        // If the permissions deny reading it, the reader reports an error later.
        Err(error) => error.kind() == ErrorKind::PermissionDenied,
    }
}

/// The step as it appears in names. Names in any other form are not ours.
fn digits_of(step: u64) -> String {
    format!("{step:08}")
}

fn step_of(digits: &str) -> Option<u64> {
    digits.parse().ok().filter(|step| digits == digits_of(*step))
}

/// The checkpoints in `folder`, oldest first; none if there is no such folder.
pub(super) fn list(folder: &Path) -> Result<Vec<NamedCheckpoint>> {
    let mut named: Vec<NamedCheckpoint> =
        entries(folder)?.into_iter().filter_map(NamedCheckpoint::new).collect();
    named.sort();
    Ok(named)
}

/// The newest checkpoint in `folder`, damaged or not; `None` if there is none. Use [`find`](super::find) to open and
/// verify it.
///
/// # Errors
/// If the folder cannot be read.
pub fn latest(folder: &Path) -> Result<Option<PathBuf>> {
    Ok(list(folder)?.pop().map(|named| named.path))
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(failed(folder, error)),
        Ok(entries) => entries
            .map(|entry| entry.map(|entry| entry.path()).map_err(|error| failed(folder, error)))
            .collect(),
    }
}

/// A folder that only this process writes to.
#[derive(Debug)]
pub(super) struct Folder {
    pub(super) path: PathBuf,
    /// Holds the lock until it is closed, if the file system has locks.
    handle: File,
}

impl Folder {
    /// Creates the folder if it does not exist, and removes leftovers of killed writers.
    pub(super) fn open(path: &Path) -> Result<Self> {
        make(path)?;
        let handle = File::open(path).map_err(|error| failed(path, error))?;
        let is_locked = match handle.try_lock() {
            Ok(()) => true,
            Err(TryLockError::WouldBlock) => {
                let problem = "another run is writing its checkpoints here: end it, or choose another folder";
                return Err(failed(path, problem));
            }
            // Not every file system has locks.
            Err(TryLockError::Error(_)) => false,
        };
        let folder = Folder { path: path.to_owned(), handle };
        folder.check()?;
        // Fail now rather than at the first checkpoint.
        faccessat(AT_FDCWD, path, AccessFlags::W_OK | AccessFlags::X_OK, AtFlags::AT_EACCESS)
            .map_err(|error| failed(path, format!("cannot be written to: {}", error.desc())))?;
        if is_locked {
            for leftover in entries(path)? {
                if let Some(step) = step_of_leftover(&leftover) {
                    remove_written(&leftover, &folder.target(step))?;
                }
                shared_folder::remove_leftover(&leftover);
            }
        }
        Ok(folder)
    }

    /// Checks that the folder's name still refers to the locked folder.
    pub(super) fn check(&self) -> Result<()> {
        let identity = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
        let here = fs::metadata(&self.path).map(identity);
        let locked = self.handle.metadata().map(identity).map_err(|error| failed(&self.path, error))?;
        match here {
            Ok(here) if here == locked => Ok(()),
            Ok(_) => {
                let problem = "the folder was replaced by another one of this name while this run was writing to it: start \
                               again, and do not replace the folder during the run";
                Err(failed(&self.path, problem))
            }
            Err(error) => {
                Err(failed(&self.path, format!("the folder that this run writes to is gone: {error}")))
            }
        }
    }

    /// The path of the checkpoint of `step`.
    pub(super) fn target(&self, step: u64) -> PathBuf {
        self.path.join(format!("{PREFIX}{}", digits_of(step)))
    }

    /// The path of that checkpoint until it is complete.
    pub(super) fn partial(&self, step: u64) -> PathBuf {
        hidden(&self.target(step), PARTIAL)
    }

    pub(super) fn flush(&self) -> Result<()> {
        flush_folder(&self.path)
    }
}

/// `.NAME.suffix` beside `path`.
pub(super) fn hidden(path: &Path, suffix: &str) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{suffix}"))
}

/// The step of the checkpoint that a killed writer was writing or removing at `path`.
fn step_of_leftover(path: &Path) -> Option<u64> {
    let name = path.file_name()?.to_str()?;
    let (name, suffix) = name.strip_prefix('.')?.rsplit_once('.')?;
    // A replaced checkpoint keeps that suffix while it is removed.
    let step = name.strip_suffix(REPLACED).map_or(name, |name| name.trim_end_matches('.'));
    let step = step_of(step.strip_prefix(PREFIX)?)?;
    ([PARTIAL, REMOVED].contains(&suffix) && is_folder(path)).then_some(step)
}

/// Creates a folder and its parents, and flushes them so that they survive a power failure.
pub(super) fn make(path: &Path) -> Result<()> {
    if is_taken(path) && !path.is_dir() {
        return Err(failed(path, "not a folder: choose another name for the checkpoints"));
    }
    let missing: Vec<&Path> = path.ancestors().take_while(|path| !path.exists()).collect();
    fs::create_dir_all(path).map_err(|error| failed(path, error))?;
    for made in missing {
        match made.parent() {
            Some(parent) if parent.as_os_str().is_empty() => flush_folder(Path::new("."))?,
            Some(parent) => flush_folder(parent)?,
            None => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::super::files::MARK;
    use super::*;

    #[test]
    fn checkpoints_are_recognised_by_name_and_content_and_sorted_by_step() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let names = [
            "step-00000020",
            "step-00000100",
            "step-00000100.replaced",
            "step-123456789",
            "step-+5",
            "step-",
            "step-7.old",
            "step-7",
            "steps",
            ".step-00000200.partial",
            "damaged-step-00000300",
        ];
        for folder in names.map(|name| path.join(name)) {
            fs::create_dir(&folder).unwrap();
            fs::write(folder.join(MANIFEST), b"").unwrap();
        }
        // Folders, a file and a link without any part of a checkpoint.
        fs::create_dir_all(path.join("step-00000400/step-00000001")).unwrap();
        fs::write(path.join("step-00000500"), b"a file").unwrap();
        std::os::unix::fs::symlink("step-00000400", path.join("step-00000600")).unwrap();
        let found: Vec<_> =
            list(path).unwrap().into_iter().map(|named| (named.step, named.current)).collect();
        assert_eq!(found, [(20, true), (100, false), (100, true), (123_456_789, true)]);
        assert_eq!(latest(path).unwrap().unwrap(), path.join("step-123456789"));
        assert_eq!(latest(&path.join("none")).unwrap(), None);
    }

    #[test]
    fn unwritable_folders_are_rejected_at_open() {
        let folder = tempfile::tempdir().unwrap();
        let refused = |path: &Path| Folder::open(path).unwrap_err().to_string();
        let names = ["file", "fifo", "dangling", "loop"].map(|name| folder.path().join(name));
        fs::write(&names[0], b"a file").unwrap();
        nix::unistd::mkfifo(&names[1], nix::sys::stat::Mode::S_IRWXU).unwrap();
        std::os::unix::fs::symlink("nowhere", &names[2]).unwrap();
        std::os::unix::fs::symlink("loop", &names[3]).unwrap();
        for path in &names {
            let expected = format!(
                "checkpoint {}: not a folder: choose another name for the checkpoints",
                path.display()
            );
            assert_eq!(refused(path), expected);
        }
        assert!(refused(&names[0].join("inside")).ends_with("Not a directory (os error 20)"));
        assert_eq!(fs::read(&names[0]).unwrap(), b"a file");
        // Root may write everywhere.
        if !nix::unistd::geteuid().is_root() {
            let path = folder.path().join("read-only");
            fs::create_dir(&path).unwrap();
            fs::set_permissions(&path, PermissionsExt::from_mode(0o555)).unwrap();
            assert!(refused(&path).ends_with("cannot be written to: Permission denied"));
        }
    }

    #[test]
    fn a_recreated_folder_is_not_written_to() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("checkpoints");
        let first = Folder::open(&path).unwrap();
        fs::remove_dir(&path).unwrap();
        let gone = "the folder that this run writes to is gone: No such file or directory (os error 2)";
        assert!(first.check().unwrap_err().to_string().ends_with(gone));
        let second = Folder::open(&path).unwrap();
        let error = first.check().unwrap_err().to_string();
        assert!(
            error.contains("checkpoints: the folder was replaced by another one of this name"),
            "{error}"
        );
        second.check().unwrap();
    }

    #[test]
    fn leftovers_are_removed_once_the_lock_is_free() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("made/on/the/way");
        let first = Folder::open(&path).unwrap();
        let kept =
            ["step-00000001", ".step", ".other.partial", ".step-by-step.partial", ".step-5.partial", "notes"];
        let replaced = first.target(4).with_extension(REPLACED);
        let left = [first.partial(2), hidden(&first.target(3), REMOVED), hidden(&replaced, REMOVED)];
        for folder in kept.map(|name| path.join(name)) {
            fs::create_dir(&folder).unwrap();
            fs::write(folder.join("file"), b"content").unwrap();
        }
        left.iter().for_each(|folder| fs::create_dir(folder).unwrap());
        fs::write(left[0].join("weights.safetensors"), [&[0; 8], MARK, b",\"cut"].concat()).unwrap();
        let error = Folder::open(&path).unwrap_err().to_string();
        assert!(
            error.ends_with("another run is writing its checkpoints here: end it, or choose another folder")
        );
        assert!(left.iter().all(|path| path.exists()), "of a run that is alive");
        drop(first);
        let _second = Folder::open(&path).unwrap();
        assert!(!left.iter().any(|path| path.exists()));
        assert!(kept.iter().all(|name| path.join(name).join("file").exists()));
    }
}
