//! Errors of loading data.

use std::fmt;
use std::path::PathBuf;

/// Why there is no data.
#[derive(thiserror::Error)]
pub enum DataError {
    /// A folder without some of the four files.
    #[error(
        "no MNIST in {}: missing {}; the folder has {}; fetch the files with --download, or train on generated \
         digits with --synthetic",
        folder.display(), missing.join(", "), Listed(found)
    )]
    Missing {
        /// The folder.
        folder: PathBuf,
        /// The files that are not there, by their original names.
        missing: Vec<String>,
        /// What the folder contains instead.
        found: Vec<String>,
    },
    /// A file or folder that cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The error of the system.
        source: std::io::Error,
    },
    /// A file with wrong bytes.
    #[error("{} at byte {offset}{}: {problem}", path.display(), if *gzip { " after decompression" } else { "" })]
    Format {
        /// The file.
        path: PathBuf,
        /// Offset in the content; for gzipped files, in the decompressed content.
        offset: u64,
        /// True if the file is gzipped.
        gzip: bool,
        /// What is wrong.
        problem: String,
    },
    /// Files that do not match each other.
    #[error("{}: {problem}", folder.display())]
    Mismatch {
        /// The folder.
        folder: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A file that no mirror delivered.
    #[error(
        "cannot download {file}:{}\ngive a folder that has it with --data DIR, or train on generated digits with \
         --synthetic",
        Answers(attempts)
    )]
    Download {
        /// The file's name.
        file: String,
        /// The failed attempts, in the order of the mirrors.
        attempts: Vec<Attempt>,
    },
    /// Neither `XDG_CACHE_HOME` nor `HOME` says where downloads are kept.
    #[error(
        "no folder to download to: set XDG_CACHE_HOME or HOME, or give a folder with MNIST by --data DIR"
    )]
    NoCache,
}

impl From<DataError> for mgpu::Error {
    fn from(error: DataError) -> Self {
        mgpu::Error::program(error)
    }
}

/// As [`Display`](fmt::Display), because Rust prints errors returned from `main` with `Debug`.
impl fmt::Debug for DataError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A mirror, and why it failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// The mirror's address.
    pub mirror: String,
    /// The reason.
    pub reason: Reason,
}

/// Why a mirror did not deliver a file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// The mirror could not be reached, or the connection broke and could not be resumed.
    #[error("{0}")]
    Connection(String),
    /// The response was not the file.
    #[error("answered with HTTP status {0}")]
    Status(u16),
    /// The response was larger than the file can be.
    #[error("sent more than the {limit} bytes that {file} can have")]
    TooLong {
        /// The file's name.
        file: String,
        /// Limit of bytes at which the transfer was ended.
        limit: u64,
    },
    /// The content was wrong. The received file has been removed.
    #[error("sent {file} with wrong content: expected SHA-256 {expected}, received {received}")]
    Checksum {
        /// The file's name.
        file: String,
        /// The pinned sum of the decompressed content, in hexadecimal.
        expected: String,
        /// The checksum of the received content, or why there is none.
        received: String,
    },
}

impl DataError {
    /// For `map_err`: an error of the system about `path`.
    pub(super) fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| DataError::Io { path, source }
    }
}

/// File names on one line; if there are many, only the first ones.
struct Listed<'a>(&'a [String]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        if self.0.is_empty() {
            return f.write_str("no files");
        }
        f.write_str(&self.0[..self.0.len().min(SHOWN)].join(", "))?;
        match self.0.len().saturating_sub(SHOWN) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

/// One line for each mirror.
struct Answers<'a>(&'a [Attempt]);

impl fmt::Display for Answers<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str(" no mirror was given");
        }
        self.0.iter().try_for_each(|Attempt { mirror, reason }| write!(f, "\n  {mirror}: {reason}"))
    }
}
