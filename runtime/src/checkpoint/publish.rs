//! How a checkpoint gets its final name, and how older ones are removed.
//!
//! In this order; each step is flushed to disk before the next one begins:
//! 1. Write all files into a folder with a hidden name, the manifest last; flush the folder.
//! 2. Rename the folder to its final name. If a checkpoint of the same step exists (a run that resumed from an older
//!    checkpoint repeats its steps), exchange the two names, so that one always exists. If the file system cannot
//!    exchange names, the old checkpoint is renamed to `step-N.replaced` first, which still counts as a checkpoint.
//! 3. Flush the parent folder.
//! 4. Rename excess checkpoints to hidden names, then delete them: an interrupted deletion leaves no incomplete
//!    checkpoint under a final name.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::folder::{Folder, NamedCheckpoint, REMOVED, REPLACED, hidden, holds_checkpoint, list};
use super::removal::{is_folder, is_ours, is_taken, remove_written, unused_name};
use super::snapshot::Snapshot;
use super::transfer::Received;
use super::{failed, files};
use crate::Result;

/// Writes `snapshot` as a checkpoint, and keeps only the newest `keep` of the checkpoints up to this step. Returns the
/// path of the new one.
pub(super) fn publish(folder: &Folder, snapshot: Snapshot, keep: usize) -> Result<PathBuf> {
    publish_with(folder, snapshot, keep, exchange)
}

/// `exchange` exchanges two names, and returns false if the file system cannot.
fn publish_with(
    folder: &Folder,
    snapshot: Snapshot,
    keep: usize,
    exchange: impl Fn(&Path, &Path) -> io::Result<bool>,
) -> Result<PathBuf> {
    let step = snapshot.step;
    let partial = begin(folder, step)?;
    if let Err(error) = files::write(&partial, snapshot) {
        // The disk may be full: free the space of the incomplete checkpoint.
        let _ = remove_written(&partial, &folder.target(step));
        return Err(error);
    }
    complete(folder, step, keep, exchange)
}

/// As [`publish`], for a checkpoint that came from another host.
pub(super) fn publish_received(folder: &Folder, received: Received, keep: usize) -> Result<PathBuf> {
    let step = received.step();
    received.flush()?;
    complete(folder, step, keep, exchange)
}

/// Creates the folder for the files of the checkpoint of `step`, with its hidden name.
pub(super) fn begin(folder: &Folder, step: u64) -> Result<PathBuf> {
    let partial = folder.partial(step);
    folder.check()?;
    remove_written(&partial, &folder.target(step))?;
    fs::create_dir(&partial).map_err(|error| failed(&partial, error))?;
    Ok(partial)
}

/// Gives the complete checkpoint of `step` its name and removes older ones.
fn complete(
    folder: &Folder,
    step: u64,
    keep: usize,
    exchange: impl Fn(&Path, &Path) -> io::Result<bool>,
) -> Result<PathBuf> {
    let (partial, target) = (folder.partial(step), folder.target(step));
    // The folder may have been replaced in the meantime.
    folder.check()?;
    move_aside(&target, step)?;
    if let Err(error) = put_in_place(folder, &partial, &target, exchange) {
        // Another checkpoint of this step exists, so this one can be removed.
        if target.exists() {
            let _ = remove_written(&partial, &target);
        }
        return Err(failed(&target, error));
    }
    folder.flush()?;
    // After an exchange, the hidden name refers to the old checkpoint.
    remove_written(&partial, &target)?;
    let ours = list(&folder.path)?.into_iter().filter(NamedCheckpoint::is_ours).collect();
    remove(folder, &expired(ours, step, keep))?;
    Ok(target)
}

/// If something other than a valid checkpoint of this step is in the way (a file, a link, or a folder with a damaged
/// checkpoint or one of another step), renames it to `other-step-…`.
fn move_aside(target: &Path, step: u64) -> Result<()> {
    let in_the_way =
        if is_folder(target) { holds_checkpoint(target) && !is_ours(target, step) } else { is_taken(target) };
    if in_the_way {
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        let aside = unused_name(&target.with_file_name(format!("other-{name}")));
        fs::rename(target, aside).map_err(|error| failed(target, error))?;
    }
    Ok(())
}

fn put_in_place(
    folder: &Folder,
    partial: &Path,
    target: &Path,
    exchange: impl Fn(&Path, &Path) -> io::Result<bool>,
) -> io::Result<()> {
    if target.exists() {
        if exchange(partial, target)? {
            return Ok(());
        }
        let replaced = target.with_extension(REPLACED);
        if is_taken(&replaced) {
            // A previous run was killed here. The target is newer, and complete.
            remove(folder, &[(replaced.clone(), target.to_owned())]).map_err(io::Error::other)?;
        }
        fs::rename(target, &replaced)?;
    }
    fs::rename(partial, target)
}

/// Exchanges two names. `false` if the file system cannot.
#[cfg(target_env = "gnu")]
fn exchange(one: &Path, other: &Path) -> io::Result<bool> {
    use nix::errno::Errno;
    use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
    match renameat2(AT_FDCWD, one, AT_FDCWD, other, RenameFlags::RENAME_EXCHANGE) {
        Ok(()) => Ok(true),
        Err(Errno::EINVAL | Errno::ENOSYS | Errno::EOPNOTSUPP) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Behaves like a file system without exchange: the bindings lack the call.
#[cfg(not(target_env = "gnu"))]
fn exchange(_: &Path, _: &Path) -> io::Result<bool> {
    Ok(false)
}

/// The checkpoints to remove once that of `step` exists: those that were replaced, and all but the newest `keep` up
/// to `step`. Later ones may belong to another run. Each comes with its name before it was replaced.
fn expired(ours: Vec<NamedCheckpoint>, step: u64, keep: usize) -> Vec<(PathBuf, PathBuf)> {
    let current: Vec<u64> = ours.iter().filter(|named| named.current).map(|named| named.step).collect();
    let (replaced, mut kept): (Vec<NamedCheckpoint>, Vec<NamedCheckpoint>) = ours
        .into_iter()
        .filter(|named| named.step <= step)
        .partition(|named| !named.current && current.contains(&named.step));
    kept.truncate(kept.len().saturating_sub(keep));
    let gone = replaced.into_iter().chain(kept);
    gone.map(|NamedCheckpoint { path, .. }| (path.clone(), path.with_extension(""))).collect()
}

/// Removes checkpoints: first their names, then their files. Other files in them are moved back to the second path.
fn remove(folder: &Folder, checkpoints: &[(PathBuf, PathBuf)]) -> Result<()> {
    if checkpoints.is_empty() {
        return Ok(());
    }
    for (path, home) in checkpoints {
        let removed = hidden(path, REMOVED);
        remove_written(&removed, home)?;
        fs::rename(path, removed).map_err(|error| failed(path, error))?;
    }
    folder.flush()?;
    checkpoints.iter().try_for_each(|(path, home)| remove_written(&hidden(path, REMOVED), home))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Layout;
    use crate::checkpoint::{Checkpoint, find};

    fn layout() -> Layout {
        let mut layout = Layout::new();
        layout.push("0.weight", [2, 3]);
        layout
    }

    fn snapshot(step: u64, value: f32) -> Snapshot {
        let mut snapshot = Snapshot::new(step);
        snapshot.add("weights", &layout(), vec![value; 6]);
        snapshot
    }

    fn value(path: &Path) -> f32 {
        Checkpoint::open(path).unwrap().load("weights", &layout()).unwrap()[0]
    }

    fn names(folder: &Folder) -> Vec<String> {
        let entries = fs::read_dir(&folder.path).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn the_newest_are_kept_and_later_steps_are_left_alone() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = Folder::open(temporary.path()).unwrap();
        for step in [5, 20, 100] {
            publish(&folder, snapshot(step, 0.0), 2).unwrap();
        }
        assert_eq!(names(&folder), ["step-00000020", "step-00000100"]);
        // As a run that starts anew in the folder of another one.
        for step in [1, 2, 3] {
            publish(&folder, snapshot(step, 0.0), 1).unwrap();
        }
        assert_eq!(names(&folder), ["step-00000003", "step-00000020", "step-00000100"]);
    }

    #[test]
    fn a_checkpoint_of_the_same_step_is_replaced_with_and_without_exchange() {
        for able in [true, false] {
            let temporary = tempfile::tempdir().unwrap();
            let folder = Folder::open(temporary.path()).unwrap();
            let swap = |one: &Path, other: &Path| if able { exchange(one, other) } else { Ok(false) };
            for round in 1..=3 {
                let path = publish_with(&folder, snapshot(7, round as f32), 1, swap).unwrap();
                assert_eq!((value(&path), names(&folder)), (round as f32, vec!["step-00000007".to_owned()]));
            }
        }
    }

    #[test]
    fn an_interrupted_replacement_loses_nothing() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = Folder::open(temporary.path()).unwrap();
        let target = publish(&folder, snapshot(7, 1.0), 1).unwrap();
        // Between the two renames.
        fs::rename(&target, target.with_extension(REPLACED)).unwrap();
        assert_eq!(value(find(&folder.path).unwrap().unwrap().checkpoint.path()), 1.0);
        publish_with(&folder, snapshot(7, 2.0), 1, |_, _| Ok(false)).unwrap();
        assert_eq!((value(&target), names(&folder).len()), (2.0, 1));
        // After them.
        publish(&folder, snapshot(8, 3.0), 2).unwrap();
        fs::rename(folder.target(8), target.with_extension(REPLACED)).unwrap();
        assert_eq!(value(find(&folder.path).unwrap().unwrap().checkpoint.path()), 2.0);
        publish_with(&folder, snapshot(7, 4.0), 1, |_, _| Ok(false)).unwrap();
        assert_eq!((value(&target), names(&folder).len()), (4.0, 1));
    }

    #[test]
    fn a_failed_write_leaves_the_folder_unchanged() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = Folder::open(temporary.path()).unwrap();
        publish(&folder, snapshot(1, 1.0), 2).unwrap();
        let mut twice = snapshot(2, 2.0);
        twice.add("weights", &layout(), vec![0.0; 6]);
        let mut elsewhere = snapshot(2, 2.0);
        elsewhere.add("../weights", &layout(), vec![0.0; 6]);
        let mut short = snapshot(2, 2.0);
        short.add_deferred("short", &layout(), || vec![0.0; 5]);
        let mut infinite = snapshot(2, 2.0);
        infinite.add("exp_avg", &layout(), vec![0.0, 1.0, f32::NEG_INFINITY, f32::NAN, 0.0, 0.0]);
        let json = serde_json::to_string(&layout()).unwrap().replace("0.weight", "__metadata__");
        let mut metadata = snapshot(2, 2.0);
        metadata.add("exp_avg", &serde_json::from_str(&json).unwrap(), vec![0.0; 6]);
        for (bad, problem) in [
            (
                infinite,
                "exp_avg.safetensors: tensor `0.weight` is not finite, -inf at element 2: the training has diverged, and this \
                 checkpoint is not written; try a lower learning rate",
            ),
            (metadata, "a tensor is called `__metadata__`, which is not a tensor in a safetensors file"),
            (
                twice,
                "weights.safetensors: the name of an arena must be a file name, and no other arena may have it",
            ),
            (elsewhere, "the name of an arena must be a file name, and no other arena may have it"),
            (short, "short.safetensors: 5 values for tensors of 6"),
        ] {
            let error = publish(&folder, bad, 2).unwrap_err().to_string();
            assert!(error.ends_with(problem), "{error}");
            assert_eq!(names(&folder), ["step-00000001"]);
        }
    }
}
