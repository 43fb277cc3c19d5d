//! The folder that checkpoints lie in: their names, who may write, and what killed runs have left.
//!
//! `step-00001234` is a whole checkpoint. Names that begin with a dot are not: `.step-00001234.partial` is being written,
//! `.step-00001234.removed` was one and is being deleted. `step-00001234.replaced` is whole, and gives way to the new
//! one of the same step (`publish`).
//!
//! One writer at a time: it holds a lock on the folder, which the kernel releases however the process ends. So whatever hidden
//! name the next writer finds once it has the lock is of a dead one, and can go; and two runs that were given
//! the same folder by mistake do not delete each other's checkpoints. Where the file system has no locks hidden names are left
//! alone, and on a network file system a lock may be known to one host only: there two runs must not share a folder. Readers need
//! no lock (`read`).

use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::failed;
use super::files::flush_folder;
use crate::Result;

const PREFIX: &str = "step-";
const PARTIAL: &str = "partial";
pub(super) const REMOVED: &str = "removed";
pub(super) const REPLACED: &str = "replaced";

/// A checkpoint by its name. Greater is newer.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Named {
    pub(super) step: u64,
    /// It does not wait to be replaced.
    pub(super) current: bool,
    pub(super) path: PathBuf,
}

impl Named {
    fn new(path: PathBuf) -> Option<Self> {
        let name = path.file_name()?.to_str()?.strip_prefix(PREFIX)?;
        let (digits, current) = match name.split_once('.') {
            None => (name, true),
            Some((digits, REPLACED)) => (digits, false),
            Some(_) => return None,
        };
        let step = digits.parse().ok().filter(|step| digits == digits_of(*step))?;
        path.is_dir().then_some(Named { step, current, path })
    }
}

/// A step in names: nothing that is written otherwise is ours.
fn digits_of(step: u64) -> String {
    format!("{step:08}")
}

/// The checkpoints in `folder`, oldest first; none if there is no such folder.
pub(super) fn list(folder: &Path) -> Result<Vec<Named>> {
    let mut named: Vec<Named> = entries(folder)?.into_iter().filter_map(Named::new).collect();
    named.sort();
    Ok(named)
}

/// The newest checkpoint in `folder`, whatever state it is in; `None` if there is none. [`find`](super::find) opens and
/// verifies it, too.
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

/// A folder that this process writes to, and no other.
#[derive(Debug)]
pub(super) struct Folder {
    pub(super) path: PathBuf,
    /// Released when it is closed.
    _lock: Option<File>,
}

impl Folder {
    /// Makes the folder if it is not there, and removes what killed writers have left.
    pub(super) fn open(path: &Path) -> Result<Self> {
        make(path)?;
        let handle = File::open(path).map_err(|error| failed(path, error))?;
        let lock = match handle.try_lock() {
            Ok(()) => Some(handle),
            Err(TryLockError::WouldBlock) => {
                let problem = "another run is writing its checkpoints here: end it, or choose another folder";
                return Err(failed(path, problem));
            }
            // Not every file system has locks.
            Err(TryLockError::Error(_)) => None,
        };
        if lock.is_some() {
            for leftover in entries(path)?.into_iter().filter(|path| is_leftover(path)) {
                remove_tree(&leftover)?;
            }
        }
        Ok(Folder { path: path.to_owned(), _lock: lock })
    }

    /// The name of the checkpoint after `step` steps.
    pub(super) fn target(&self, step: u64) -> PathBuf {
        self.path.join(format!("{PREFIX}{}", digits_of(step)))
    }

    /// What it is called until it is whole.
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

fn is_leftover(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let Some((name, suffix)) = name.strip_prefix('.').and_then(|name| name.rsplit_once('.')) else {
        return false;
    };
    // One that was being replaced may have been removed under that name.
    let step = name.strip_suffix(REPLACED).map_or(name, |name| name.trim_end_matches('.'));
    let digits = step.strip_prefix(PREFIX).unwrap_or_default();
    let is_ours = digits.parse().is_ok_and(|step| digits == digits_of(step));
    is_ours && [PARTIAL, REMOVED].contains(&suffix) && path.is_dir()
}

/// Removes a folder with all that is in it, if it is there.
pub(super) fn remove_tree(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(failed(path, error)),
        _ => Ok(()),
    }
}

/// Makes a folder, and those it lies in, so that they outlast a power failure.
fn make(path: &Path) -> Result<()> {
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
    use super::*;

    #[test]
    fn names_say_what_is_a_checkpoint_and_which_is_newest() {
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
        names.iter().for_each(|name| fs::create_dir(path.join(name)).unwrap());
        let found: Vec<_> =
            list(path).unwrap().into_iter().map(|named| (named.step, named.current)).collect();
        assert_eq!(found, [(20, true), (100, false), (100, true), (123_456_789, true)]);
        assert_eq!(latest(path).unwrap().unwrap(), path.join("step-123456789"));
        assert_eq!(latest(&path.join("none")).unwrap(), None);
    }

    #[test]
    fn leftovers_are_removed_once_nobody_writes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("made/on/the/way");
        let first = Folder::open(&path).unwrap();
        let kept =
            ["step-00000001", ".step", ".other.partial", ".step-by-step.partial", ".step-5.partial", "notes"];
        let replaced = first.target(4).with_extension(REPLACED);
        let left = [first.partial(2), hidden(&first.target(3), REMOVED), hidden(&replaced, REMOVED)];
        for folder in kept.map(|name| path.join(name)).iter().chain(&left) {
            fs::create_dir(folder).unwrap();
            fs::write(folder.join("file"), b"content").unwrap();
        }
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
