//! What can go wrong on the way to the data.

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
        /// What is there instead.
        found: Vec<String>,
    },
    /// A file or folder that cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file whose bytes are not what they should be.
    #[error("{} at byte {offset}{}: {problem}", path.display(), if *gzip { " after decompression" } else { "" })]
    Format {
        /// The file.
        path: PathBuf,
        /// Where in the content: of a gzipped file, of what is compressed in it.
        offset: u64,
        /// True if the file is gzipped.
        gzip: bool,
        /// What is wrong.
        problem: String,
    },
    /// Files that do not belong together.
    #[error("{}: {problem}", folder.display())]
    Mismatch {
        /// The folder.
        folder: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A file that no mirror has delivered as it should be.
    #[error(
        "cannot download {file}:{}\ngive a folder that has it with --data DIR, or train on generated digits with \
         --synthetic",
        Answers(attempts)
    )]
    Download {
        /// The file's name.
        file: String,
        /// What became of it at each mirror, in order.
        attempts: Vec<Attempt>,
    },
    /// Neither `XDG_CACHE_HOME` nor `HOME` says where downloads are kept.
    #[error(
        "no folder to download to: set XDG_CACHE_HOME or HOME, or give a folder that has MNIST with --data DIR"
    )]
    NoCache,
}

/// As [`Display`](fmt::Display): `main` shows an error that it returns in this way.
impl fmt::Debug for DataError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A mirror, and why it did not deliver.
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
    /// It was not reached, or the connection broke and could not be taken up again.
    #[error("{0}")]
    Connection(String),
    /// It answered something else than the file.
    #[error("answered with HTTP status {0}")]
    Status(u16),
    /// It sent more than the file can have.
    #[error("sent more than the {limit} bytes that {file} can have")]
    TooLong {
        /// The file's name.
        file: String,
        /// Bytes after which the transfer was ended.
        limit: u64,
    },
    /// It delivered a file with other content. What arrived has been removed.
    #[error("sent a {file} of another content: expected SHA-256 {expected}, received {received}")]
    Checksum {
        /// The file's name.
        file: String,
        /// The pinned sum of the decompressed content, in hexadecimal.
        expected: String,
        /// The sum of what arrived, or why there is none.
        received: String,
    },
}

impl DataError {
    /// For `map_err`: what the system said about `path`.
    pub(super) fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| DataError::Io { path, source }
    }
}

/// File names on one line; of many only the first.
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
            return f.write_str(" no mirror was named");
        }
        self.0.iter().try_for_each(|Attempt { mirror, reason }| write!(f, "\n  {mirror}: {reason}"))
    }
}
