//! Whether a file has the content that is pinned for it.

use std::io::{self, ErrorKind, Read};
use std::path::Path;

use sha2::{Digest, Sha256};

use super::RemoteFile;
use crate::data::idx::open_content;

/// What is in a file.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// What should be in it.
    Right,
    /// Something else: its sum, or why it has none.
    Wrong(String),
    /// There is no such file.
    Absent,
}

/// Compares a file's decompressed content with the pinned sum. Reads no more than the right content and a byte, so
/// that a small gzip file which unfolds without end takes no time.
pub(super) fn content(path: &Path, file: &RemoteFile<'_>) -> io::Result<Content> {
    let (bytes, gzip) = match open_content(path) {
        Ok(opened) => opened,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Content::Absent),
        Err(error) => return Err(error),
    };
    let mut bytes = bytes.take(file.len + 1);
    let mut sum = Sha256::new();
    let mut len = 0;
    let mut chunk = vec![0; 1 << 16];
    loop {
        match bytes.read(&mut chunk) {
            Ok(0) => break,
            Ok(read) => {
                sum.update(&chunk[..read]);
                len += read as u64;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            // The decoder's errors are about the content, the file's own are about this machine.
            Err(error) if gzip => return Ok(Content::Wrong(format!("damaged gzip data ({error})"))),
            Err(error) => return Err(error),
        }
    }
    if len > file.len {
        return Ok(Content::Wrong(format!("more than the {} bytes expected", file.len)));
    }
    let sum: String = sum.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(if sum == file.sha256 { Content::Right } else { Content::Wrong(sum) })
}
