//! Verifies the content of a file against its pinned checksum.

use std::io::{self, ErrorKind, Read};
use std::path::Path;

use sha2::{Digest, Sha256};

use super::RemoteFile;
use crate::data::idx::open_content;

/// The state of a file's content.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// As expected.
    Right,
    /// Something else: its checksum, or why it has none.
    Wrong(String),
    /// The file does not exist.
    Absent,
}

/// Compares the checksum of a file's decompressed content with the pinned one. Reads at most one byte more than the
/// expected content, so a small gzip file that decompresses without end costs no time.
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
            // Errors of the decoder are about the content; errors of the file are local.
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
