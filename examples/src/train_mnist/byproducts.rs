//! By-product files of a training: metrics, plot, events, timeline, logits.
//!
//! A path that cannot be written is an error before training starts. Later failures, such as a full disk, lose only
//! that file: a warning is printed once, training continues, checkpoints are written, and the exit code is unchanged.
//! Otherwise a launcher would restart a completed training because of a lost by-product file.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use mgpu::output_file;
use nix::errno::Errno;
use nix::fcntl::OFlag;

use crate::print::errln;

/// Upper limit of bytes that wait for free space.
const MOST_PENDING: usize = 1 << 20;

/// A file, and whether the user has been warned about it.
#[derive(Debug)]
pub(super) struct ByProduct<F> {
    file: F,
    has_failed: bool,
}

impl<F> ByProduct<F> {
    pub(super) fn new(file: F) -> Self {
        ByProduct { file, has_failed: false }
    }

    /// Runs `update` on the file. Prints a warning at the first failure.
    pub(super) fn update(&mut self, update: impl FnOnce(&mut F) -> Result<(), String>) {
        if let Err(problem) = update(&mut self.file)
            && !std::mem::replace(&mut self.has_failed, true)
        {
            warn("training", &problem);
        }
    }
}

/// Warns about a by-product file of `run`, a training or an evaluation.
pub(super) fn warn(run: &str, problem: &str) {
    errln!("train_mnist: {problem}; {run} continues without this file");
}

/// The error message for the file named by `flag`.
pub(super) fn cannot_write(flag: &str, path: &Path, error: &io::Error) -> String {
    format!("cannot write {flag} {}: {error}", path.display())
}

/// An append-only file. Data that cannot be written is retried before new data, so the file has no gap and no partial
/// record once the disk has space again.
#[derive(Debug)]
pub(super) struct AppendedFile {
    flag: &'static str,
    path: PathBuf,
    file: File,
    pending: Vec<u8>,
}

impl AppendedFile {
    /// Opens the file `path` named by `flag` and keeps its contents.
    ///
    /// # Errors
    /// If the file cannot be written; names flag and file. A pipe without a reader is an error; opening does not
    /// block.
    pub(super) fn open(flag: &'static str, path: &Path) -> Result<Self, String> {
        Self::opened(flag, path, OpenOptions::new().create(true))
    }

    /// As [`open`](Self::open), for a file that does not exist yet.
    pub(super) fn create(flag: &'static str, path: &Path) -> Result<Self, String> {
        Self::opened(flag, path, OpenOptions::new().create_new(true))
    }

    fn opened(flag: &'static str, path: &Path, options: &mut OpenOptions) -> Result<Self, String> {
        let flags = OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
        let opened = options.append(true).custom_flags(flags.bits()).open(path).and_then(|file| {
            let metadata = file.metadata()?;
            match metadata.file_type().is_block_device() {
                true => Err(io::Error::new(ErrorKind::InvalidInput, "it is a block device")),
                false => Ok(output_file::standard_stream(&metadata).unwrap_or(file)),
            }
        });
        let file = opened.map_err(|error| match error.raw_os_error() {
            Some(number) if number == Errno::ENXIO as i32 => {
                format!("cannot write {flag} {}: nobody reads from it", path.display())
            }
            _ => cannot_write(flag, path, &error),
        })?;
        Ok(AppendedFile { flag, path: path.to_owned(), file, pending: Vec::new() })
    }

    /// Adds a record, which the next [`flush`](Self::flush) writes.
    pub(super) fn push(&mut self, record: &[u8]) -> Result<(), String> {
        if self.pending.len() + record.len() > MOST_PENDING {
            let error = io::Error::new(ErrorKind::StorageFull, "too much data is waiting to be written");
            return Err(cannot_write(self.flag, &self.path, &error));
        }
        self.pending.extend_from_slice(record);
        Ok(())
    }

    /// Writes as much of the pending data as possible.
    pub(super) fn flush(&mut self) -> Result<(), String> {
        while !self.pending.is_empty() {
            match self.file.write(&self.pending) {
                Ok(count) => drop(self.pending.drain(..count)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // A pipe whose reader is slow.
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(cannot_write(self.flag, &self.path, &error)),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn pending_records_are_written_when_there_is_room_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics");
        fs::write(&path, "before\n").unwrap();
        let mut file = AppendedFile::open("--metrics", &path).unwrap();
        // Simulates a full disk.
        let there =
            std::mem::replace(&mut file.file, OpenOptions::new().write(true).open("/dev/full").unwrap());
        let mut by_product = ByProduct::new(file);
        let mut problems = Vec::new();
        for record in ["one\n", "two\n"] {
            by_product.update(|file| {
                file.push(record.as_bytes())?;
                let flushed = file.flush();
                problems.extend(flushed.clone().err());
                flushed
            });
        }
        let expected =
            format!("cannot write --metrics {}: No space left on device (os error 28)", path.display());
        assert_eq!((problems, by_product.has_failed), (vec![expected.clone(), expected], true));
        by_product.file.file = there;
        by_product.update(AppendedFile::flush);
        assert_eq!(fs::read_to_string(&path).unwrap(), "before\none\ntwo\n");
    }

    #[test]
    fn pending_records_are_bounded() {
        let mut file = AppendedFile::open("--metrics", "/dev/full".as_ref()).unwrap();
        let record = vec![b'x'; MOST_PENDING / 2];
        assert!(file.push(&record).is_ok() && file.push(&record).is_ok());
        let error = "cannot write --metrics /dev/full: too much data is waiting to be written";
        assert_eq!(file.push(b"x").unwrap_err(), error);
        assert_eq!(file.pending.len(), MOST_PENDING);
    }

    #[test]
    fn a_pipe_without_a_reader_is_an_error_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let error = AppendedFile::open("--metrics", &path).unwrap_err();
        assert_eq!(error, format!("cannot write --metrics {}: nobody reads from it", path.display()));
        let error = AppendedFile::open("--metrics", folder.path()).unwrap_err();
        assert!(error.ends_with("Is a directory (os error 21)"), "{error}");
    }
}
