//! What may be removed: files that a writer has written, and nothing else.
//!
//! People keep files of their own beside ours: notes, results of an evaluation, links. So nothing is removed recursively, and a
//! name alone decides nothing. A file goes if it is a regular file, has a name that a writer gives, and has a writer's content:
//! - in a whole checkpoint, a file that the manifest lists, of the size that it lists, which begins with the mark of a writer
//!   (or has the listed checksum: files had no mark at first), and the manifest itself;
//! - in a checkpoint that a killed writer has begun, which has no manifest yet, a safetensors file with that mark, or an
//!   empty one, and the beginning of a manifest.
//!
//! Everything else stays. A folder that still holds something gives it back under the name that the folder had before: notes
//! in `step-00000012` are still there when the checkpoint is gone. Names that are taken get a number.

use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use super::failed;
use super::files::{MARK, flush_folder, has_checksum, read_manifest};
use super::folder::PARTIAL;
use super::manifest::{BEFORE, FileEntry, MANIFEST, Manifest};
use crate::Result;

/// Whether `path` is a whole checkpoint of `step` that a writer has written: a folder, no link, with a valid manifest.
pub(super) fn is_ours(path: &Path, step: u64) -> bool {
    is_folder(path) && read_manifest(path).is_ok_and(|manifest| manifest.step == step)
}

/// Whether `path` is a folder and not a link to one.
pub(super) fn is_folder(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|metadata| metadata.is_dir())
}

/// Whether there is anything at `path`, if only a link that leads nowhere.
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

/// Frees the name `hidden`: removes what a writer has written in the folder there, and moves what else it holds to the
/// folder `home`. Something else than a folder gets another name.
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
    // The manifest last: it tells the next writer what is ours, if this one is killed here.
    ours.sort_by_key(|path| path.ends_with(MANIFEST));
    for path in &ours {
        fs::remove_file(path).map_err(|error| failed(path, error))?;
    }
    fs::remove_dir(hidden).map_err(|error| failed(hidden, error))
}

/// How far a writer had come with a folder that has a hidden name.
enum LeftoverState {
    Whole(Manifest),
    /// Its manifest would have come last.
    Begun,
    /// Its manifest was removed, after all other files of the writer.
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

/// Whether a safetensors file's header, which follows its length, begins with the mark of a writer.
fn is_marked(path: &Path) -> bool {
    beginning(path, size_of::<u64>() + MARK.len()).is_some_and(|bytes| bytes.ends_with(MARK))
}

fn begins_with(path: &Path, mark: &[u8]) -> bool {
    beginning(path, mark.len()).is_some_and(|bytes| bytes == mark)
}

/// The first bytes of a file, if it has so many.
fn beginning(path: &Path, length: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; length];
    File::open(path).and_then(|mut file| file.read_exact(&mut bytes)).ok()?;
    Some(bytes)
}

/// Moves `paths` to the folder `home`, which is made if there is none.
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
