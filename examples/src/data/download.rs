//! Downloads MNIST once from a mirror into a cache folder.
//!
//! The four files come over plain HTTP. The transport need not be trusted: the SHA-256 of each file's decompressed
//! content is pinned in [`FILES`], and a file gets its final name only after verification. TLS would protect nothing
//! more (it is no secret which digits somebody downloads) and would be by far the largest dependency of the examples.
//! The checksum is of the content, not of the gzip file, so mirrors may compress differently or not at all.
//!
//! ```text
//! NAME there and verified? ── done
//!     └── lock the folder ── for each mirror: NAME.part ← bytes ── verify ── fsync, rename to NAME ── done
//!                                  ↑             │            └── remove NAME.part, once more, next mirror
//!                                  └── interrupted: resume from its end (Range)
//! ```
//!
//! An interrupted transfer leaves its `.part` file, and the next attempt, in this run or a later one, requests only
//! the rest. If the resumed file has a wrong checksum, the old part may be to blame, so the same mirror is asked once
//! more for the whole file. Two processes that download into the same folder are serialised by a lock on
//! `download.lock`, which the kernel releases even if its holder is killed; the second one then finds the files.
//!
//! An existing file with the name of one of the four and other content is kept, as `NAME.other`.

mod progress;
#[cfg(test)]
mod tests;
mod transfer;
mod verify;

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

pub use progress::Progress;
use transfer::Client;
use verify::Content;

use super::{Attempt, DataError, Mnist, Origin, Reason, idx};

/// Web folders with the four files.
pub const MIRRORS: [&str; 2] =
    ["http://ossci-datasets.s3.amazonaws.com/mnist/", "http://storage.googleapis.com/cvdf-datasets/mnist/"];

/// A file to download, and its expected content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteFile<'a> {
    /// File name on the mirrors and in the folder.
    pub name: &'a str,
    /// SHA-256 of the decompressed content, 64 lower-case hexadecimal digits.
    pub sha256: &'a str,
    /// Size of the decompressed content in bytes. It also limits what is accepted from a mirror.
    pub len: u64,
}

/// The four files of MNIST.
pub const FILES: [RemoteFile<'static>; 4] = [
    RemoteFile {
        name: "train-images-idx3-ubyte.gz",
        sha256: "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        len: 47_040_016,
    },
    RemoteFile {
        name: "train-labels-idx1-ubyte.gz",
        sha256: "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        len: 60_008,
    },
    RemoteFile {
        name: "t10k-images-idx3-ubyte.gz",
        sha256: "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        len: 7_840_016,
    },
    RemoteFile {
        name: "t10k-labels-idx1-ubyte.gz",
        sha256: "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        len: 10_008,
    },
];

/// Downloads MNIST into the [default folder](default_folder) unless it is there, and reads it.
///
/// # Errors
/// As [`default_folder`], [`download`] and [`idx::read`].
pub fn mnist(progress: Progress) -> Result<Mnist, DataError> {
    let folder = download(&default_folder()?, &MIRRORS, progress)?;
    Ok(Mnist { origin: Origin::Downloaded(folder.clone()), ..idx::read(&folder)? })
}

/// MNIST from an earlier download, or `None`; never accesses the network.
///
/// # Errors
/// As [`idx::read`], if the files exist and are damaged.
pub fn cached() -> Result<Option<Mnist>, DataError> {
    match default_folder() {
        Ok(folder) if is_complete(&folder) => {
            Ok(Some(Mnist { origin: Origin::Downloaded(folder.clone()), ..idx::read(&folder)? }))
        }
        _ => Ok(None),
    }
}

/// The download folder: `$XDG_CACHE_HOME/mgpu/mnist`, or else `~/.cache/mgpu/mnist`.
///
/// # Errors
/// If neither `XDG_CACHE_HOME` nor `HOME` is an absolute path.
pub fn default_folder() -> Result<PathBuf, DataError> {
    folder_from(|name| std::env::var_os(name).map(PathBuf::from))
}

/// [`default_folder`] with other environment variables, for tests, which must not change those of the process.
fn folder_from(variable: impl Fn(&str) -> Option<PathBuf>) -> Result<PathBuf, DataError> {
    // The XDG base directory specification says to ignore relative paths.
    let absolute = |name: &str| variable(name).filter(|path| path.is_absolute());
    let cache = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
    Ok(cache.ok_or(DataError::NoCache)?.join("mgpu/mnist"))
}

/// True if the four files have their final names in `folder`, which they get only after verification.
pub fn is_complete(folder: &Path) -> bool {
    FILES.iter().all(|file| folder.join(file.name).is_file())
}

/// Downloads the four files of MNIST into `folder`, which is created if needed, and returns it. Existing files with
/// the right content are not downloaded again.
///
/// `mirrors` are addresses that end in a slash (otherwise one is added), tried in order; see [`MIRRORS`].
///
/// # Errors
/// [`DataError::Download`] with the reason of each mirror if a file cannot be downloaded; [`DataError::Io`] if the
/// folder cannot be written.
pub fn download(folder: &Path, mirrors: &[&str], progress: Progress) -> Result<PathBuf, DataError> {
    download_files(folder, &FILES, mirrors, progress)
}

/// [`download`] for other files.
///
/// # Errors
/// As [`download`].
pub fn download_files(
    folder: &Path,
    files: &[RemoteFile<'_>],
    mirrors: &[&str],
    progress: Progress,
) -> Result<PathBuf, DataError> {
    // First without the lock: this process may not be able to write to a complete folder.
    if missing(folder, files)?.is_empty() {
        return Ok(folder.to_owned());
    }
    fs::create_dir_all(folder).map_err(DataError::io(folder))?;
    let _lock = lock(folder, progress)?;
    let client = Client::new(progress);
    for file in missing(folder, files)? {
        fetch(&client, folder, file, mirrors)?;
    }
    Ok(folder.to_owned())
}

/// The files that are absent from `folder` or have wrong content.
fn missing<'f, 'a>(folder: &Path, files: &'f [RemoteFile<'a>]) -> Result<Vec<&'f RemoteFile<'a>>, DataError> {
    let mut missing = Vec::new();
    for file in files {
        let path = folder.join(file.name);
        if verify::content(&path, file).map_err(DataError::io(&path))? != Content::Right {
            missing.push(file);
        }
    }
    Ok(missing)
}

/// Waits for other downloads into `folder`. The lock is held until the returned file is closed.
fn lock(folder: &Path, progress: Progress) -> Result<File, DataError> {
    let path = folder.join("download.lock");
    let file =
        File::options().create(true).truncate(false).write(true).open(&path).map_err(DataError::io(&path))?;
    match file.try_lock() {
        Ok(()) => return Ok(file),
        Err(TryLockError::Error(error)) => return Err(DataError::io(&path)(error)),
        Err(TryLockError::WouldBlock) => {}
    }
    let _notice = progress.waiting(format!("waiting for another download into {}", folder.display()));
    file.lock().map_err(DataError::io(&path))?;
    Ok(file)
}

/// Downloads one file from the first mirror that has it.
fn fetch(client: &Client, folder: &Path, file: &RemoteFile<'_>, mirrors: &[&str]) -> Result<(), DataError> {
    let part = folder.join(format!("{}.part", file.name));
    let mut attempts = Vec::new();
    for &mirror in mirrors {
        match from_mirror(client, mirror, file, &part)? {
            Ok(()) => return keep(folder, &part, file.name),
            Err(reason) => attempts.push(Attempt { mirror: mirror.to_owned(), reason }),
        }
    }
    Err(DataError::Download { file: file.name.to_owned(), attempts })
}

/// Downloads one file into `part` and verifies it. The outer error is a local one, which no other mirror can fix; the
/// inner one is the mirror's.
fn from_mirror(
    client: &Client,
    mirror: &str,
    file: &RemoteFile<'_>,
    part: &Path,
) -> Result<Result<(), Reason>, DataError> {
    let url = format!("{}/{}", mirror.trim_end_matches('/'), file.name);
    let mut again = true;
    loop {
        let resumed = match client.transfer(&url, file, part)? {
            Ok(transfer) => transfer.resumed,
            Err(reason) => return Ok(Err(reason)),
        };
        let received = match verify::content(part, file).map_err(DataError::io(part))? {
            Content::Right => return Ok(Ok(())),
            Content::Wrong(received) => received,
            Content::Absent => "nothing".to_owned(),
        };
        remove(part)?;
        if !(resumed && again) {
            let (name, expected) = (file.name.to_owned(), file.sha256.to_owned());
            return Ok(Err(Reason::Checksum { file: name, expected, received }));
        }
        again = false;
    }
}

/// Renames a verified file to its final name, atomically: there is never a partial file of that name.
fn keep(folder: &Path, part: &Path, name: &str) -> Result<(), DataError> {
    // Flush the content before the rename; otherwise a crash could leave an empty file under the final name.
    File::open(part).and_then(|file| file.sync_all()).map_err(DataError::io(part))?;
    let path = folder.join(name);
    if path.symlink_metadata().is_ok() {
        fs::rename(&path, free_name(&path)).map_err(DataError::io(&path))?;
    }
    fs::rename(part, &path).map_err(DataError::io(&path))?;
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(DataError::io(folder))
}

/// `path.other`, or `path.other-2`, … if that exists.
fn free_name(path: &Path) -> PathBuf {
    let numbered = |number: u64| {
        let mut name = path.as_os_str().to_owned();
        name.push(if number == 1 { ".other".to_owned() } else { format!(".other-{number}") });
        PathBuf::from(name)
    };
    let mut names = (1..).map(numbered);
    names.find(|name| name.symlink_metadata().is_err()).expect("no folder has so many entries")
}

/// Removes a file that may be absent.
fn remove(path: &Path) -> Result<(), DataError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(DataError::io(path)(error)),
        _ => Ok(()),
    }
}
