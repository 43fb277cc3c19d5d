//! Digests of files, to compare programs of different processes and hosts.

use std::fs::File;
use std::hash::Hasher;
use std::io::{self, Read};
use std::path::Path;

use xxhash_rust::xxh3::Xxh3;

/// Digest of a file's contents. It tells different builds apart; it is no protection against forgery.
///
/// # Errors
/// If the file cannot be read.
pub fn of_file(path: &Path) -> io::Result<u64> {
    let (mut file, mut hash) = (File::open(path)?, Xxh3::new());
    let mut bytes = vec![0; 1 << 20];
    loop {
        match file.read(&mut bytes) {
            Ok(0) => return Ok(hash.finish()),
            Ok(count) => hash.write(&bytes[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
