//! Removes files that a writer has written, and nothing else.
//!
//! Users keep files of their own in checkpoint folders: notes, evaluation results, links. So nothing is removed
//! recursively, and a name alone is not enough. A file is removed if it is a regular file, has a name that a writer
//! uses, and has content that a writer writes:
//! - in a complete checkpoint: the manifest itself, and files that it lists, if they have the listed size and begin
//!   with a writer's mark (or have the listed checksum: early files had no mark);
//! - in an incomplete checkpoint, which has no manifest yet: safetensors files with that mark or of length 0, and the
//!   beginning of a manifest.
//!
//! Everything else is kept: files that remain in a folder are moved back to the folder's final name. Notes in
//! `step-00000012` still exist after the checkpoint was removed. If a name is taken, a number is appended.

use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use super::failed;
use super::files::{MARK, flush_folder, has_checksum, read_manifest};
use super::folder::PARTIAL;
use super::manifest::{BEFORE, FileEntry, MANIFEST, Manifest};
use crate::Result;

/// Whether `path` is a complete checkpoint of `step`, written by a writer: a folder, not a link, with a valid
/// manifest.
pub(super) fn is_ours(path: &Path, step: u64) -> bool {
    is_folder(path) && read_manifest(path).is_ok_and(|manifest| manifest.step == step)
}

/// Whether `path` is a folder and not a link to one.
pub(super) fn is_folder(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|metadata| metadata.is_dir())
}

/// Whether there is anything at `path`, including a dangling link.
pub(super) fn is_taken(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// `path`, or `path-2`, `path-3`, … if that is taken.
pub(super) fn unused_name(path: &Path) -> PathBuf {
    let numbered = |number: u64| {
        let mut name = path.as_os_str().to_owned();
        name.push(format!("-{number}"));
        PathBuf::from(name)
    };
    let names = std::iter::once(path.to_owned()).chain((2..).map(numbered));
    names.into_iter().find(|name| !is_taken(name)).expect("no folder has so many entries")
}

/// Frees the name `hidden`: removes the files in that folder that a writer has written, and moves the others to the
/// folder `home`. If it is not a folder, it is renamed.
pub(super) fn remove_written(hidden: &Path, home: &Path) -> Result<()> {
    if !is_taken(hidden) {
        return Ok(());
    }
    if !is_folder(hidden) {
        return fs::rename(hidden, unused_name(hidden)).map_err(|error| failed(hidden, error));
    }
    let stage = LeftoverState::of(hidden);
    let (mut ours, mut others) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(hidden).map_err(|error| failed(hidden, error))? {
        let path = entry.map_err(|error| failed(hidden, error))?.path();
        if was_written(&path, &stage) { ours.push(path) } else { others.push(path) }
    }
    move_into(&others, home)?;
    // Remove the manifest last: if this writer is killed here, the manifest tells the next one which files are ours.
    ours.sort_by_key(|path| path.ends_with(MANIFEST));
    for path in &ours {
        fs::remove_file(path).map_err(|error| failed(path, error))?;
    }
    fs::remove_dir(hidden).map_err(|error| failed(hidden, error))
}

/// State of a folder that a killed writer has left under a hidden name.
enum LeftoverState {
    Whole(Manifest),
    /// It has no manifest yet, which is written last.
    Begun,
    /// The manifest was removed, after all other files of the writer.
    Removed,
}

impl LeftoverState {
    fn of(hidden: &Path) -> Self {
        match read_manifest(hidden) {
            Ok(manifest) => LeftoverState::Whole(manifest),
            Err(_) if hidden.extension().is_some_and(|suffix| suffix == PARTIAL) => LeftoverState::Begun,
            Err(_) => LeftoverState::Removed,
        }
    }
}

/// Whether a writer has written the file `path`.
fn was_written(path: &Path, stage: &LeftoverState) -> bool {
    let (Some(name), Ok(metadata)) =
        (path.file_name().and_then(|name| name.to_str()), path.symlink_metadata())
    else {
        return false;
    };
    if !metadata.is_file() {
        return false;
    }
    match stage {
        LeftoverState::Whole(_) if name == MANIFEST => true,
        LeftoverState::Whole(manifest) => {
            manifest.files.get(name).is_some_and(|entry| has_listed_content(path, entry, metadata.len()))
        }
        LeftoverState::Begun if name == MANIFEST => begins_with(path, BEFORE) || metadata.len() == 0,
        LeftoverState::Begun => name.ends_with(".safetensors") && (is_marked(path) || metadata.len() == 0),
        LeftoverState::Removed => false,
    }
}

fn has_listed_content(path: &Path, entry: &FileEntry, bytes: u64) -> bool {
    entry.bytes == bytes && (is_marked(path) || has_checksum(path, entry))
}

/// Whether the header of a safetensors file begins with a writer's mark. The header follows its length.
fn is_marked(path: &Path) -> bool {
    beginning(path, size_of::<u64>() + MARK.len()).is_some_and(|bytes| bytes.ends_with(MARK))
}

fn begins_with(path: &Path, mark: &[u8]) -> bool {
    beginning(path, mark.len()).is_some_and(|bytes| bytes == mark)
}

/// The first `length` bytes of a file, if it is that long.
fn beginning(path: &Path, length: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; length];
    File::open(path).and_then(|mut file| file.read_exact(&mut bytes)).ok()?;
    Some(bytes)
}

/// Moves `paths` to the folder `home`, creating it if necessary.
fn move_into(paths: &[PathBuf], home: &Path) -> Result<()> {
    if paths.is_empty() {
        return Ok(());
    }
    let home = if is_folder(home) { home.to_owned() } else { unused_name(home) };
    match fs::create_dir(&home) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(failed(&home, error)),
        _ => {}
    }
    for path in paths {
        let to = unused_name(&home.join(path.file_name().unwrap_or_default()));
        fs::rename(path, to).map_err(|error| failed(path, error))?;
    }
    flush_folder(&home)
}

#[cfg(test)]
mod tests;
