//! MNIST: from files, from a download, or generated.

mod dataset;
pub mod digits;
pub mod idx;

pub use dataset::{CLASSES, Dataset, IMAGE_LEN, Mnist, Origin, SIDE, Split};

use std::path::PathBuf;

/// Why there is no data.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A folder without the files.
    #[error("no MNIST in {}: missing {}", folder.display(), missing.join(", "))]
    Missing {
        /// The folder.
        folder: PathBuf,
        /// The files that are not there.
        missing: Vec<String>,
    },
    /// A file that cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file whose bytes are not what they should be.
    #[error("{} at byte {offset}: {problem}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Where, in the uncompressed file.
        offset: u64,
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
    /// No mirror has delivered.
    #[error("cannot download MNIST:\n{}\ngive a folder that has it with --data DIR, or train on generated digits with --synthetic", attempts.join("\n"))]
    Download {
        /// What each mirror answered.
        attempts: Vec<String>,
    },
}

impl DataError {
    fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| DataError::Io { path, source }
    }
}
