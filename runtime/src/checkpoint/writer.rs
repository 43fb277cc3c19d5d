//! The thread that writes.
//!
//! One thread for each write, joined before the next one begins: there is nothing to queue, as a snapshot that waits would be
//! memory that grows, and nothing to wake up.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use super::failed;
use super::folder::Folder;
use super::publish::publish;
use super::removal::unused_name;
use super::snapshot::Snapshot;
use crate::process::{Origin, start_failure, survive_file_limit};
use crate::{Error, Result};

/// Writes checkpoints into a folder, beside the training.
///
/// It has the folder for itself: a second writer, here or in another process, is refused while this one lives. One rank has
/// it, best rank 0. Dropping it waits for the write that is under way, whose error is lost then: call
/// [`finish`](Self::finish).
///
/// ```
/// # fn main() -> mgpu::Result<()> {
/// use mgpu::checkpoint::{Checkpoint, Snapshot, Writer};
/// # let folder = tempfile::tempdir().unwrap();
/// # let folder = folder.path();
/// let mut layout = mgpu::Layout::new();
/// layout.push("slope", [1]);
/// let mut slope = [0.0];
///
/// let mut writer = Writer::new(folder, 2)?;
/// for step in 1..=5 {
///     slope[0] += 0.5;
///     let mut snapshot = Snapshot::new(step);
///     snapshot.add("weights", &layout, &slope[..]);
///     writer.save(snapshot)?; // Returns as soon as the one before is written.
/// }
/// let newest = writer.finish()?.expect("five were written");
/// assert_eq!(Checkpoint::open(newest)?.load("weights", &layout)?, [2.5]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Writer {
    origin: Origin,
    folder: Arc<Folder>,
    keep: usize,
    in_flight: Option<JoinHandle<Result<PathBuf>>>,
    written: Option<PathBuf>,
}

impl Writer {
    /// Gets ready to write into `folder`, which is made unless it is there, and to keep the newest `keep` checkpoints, at
    /// least one. What a killed writer has left half-done in it is removed. Files that no writer has written are never removed,
    /// wherever in the folder they lie.
    ///
    /// # Errors
    /// If the folder cannot be made, read or written, or another writer has it.
    pub fn new(folder: &Path, keep: usize) -> Result<Self> {
        let folder = Arc::new(Folder::open(folder)?);
        Ok(Writer { origin: Origin::here(), folder, keep: keep.max(1), in_flight: None, written: None })
    }

    /// Begins to write `snapshot`, once the write before it has come to its end. A checkpoint of the same step is replaced;
    /// those of later steps are left alone.
    ///
    /// # Errors
    /// Of the write before, which left all earlier checkpoints as they were; the new one is begun nevertheless. Its own errors
    /// come with the next call of `save` or [`finish`](Self::finish). Or if no thread can be started.
    pub fn save(&mut self, snapshot: Snapshot) -> Result<()> {
        self.check_process()?;
        let before = self.wait();
        let (folder, keep) = (Arc::clone(&self.folder), self.keep);
        let thread = std::thread::Builder::new().name("checkpoint".to_owned());
        let started = thread.spawn(move || {
            survive_file_limit();
            publish(&folder, snapshot, keep)
        });
        let started = started.map_err(|error| {
            Error::system("start the thread that writes a checkpoint", start_failure(&error))
        });
        self.in_flight = Some(started?);
        before
    }

    /// Waits for the write that is under way. Returns the path of the newest checkpoint written, if one was.
    ///
    /// # Errors
    /// Of that write, which left all earlier checkpoints as they were.
    pub fn finish(&mut self) -> Result<Option<PathBuf>> {
        self.check_process()?;
        self.wait()?;
        Ok(self.written.clone())
    }

    /// An error in a forked child, which has a copy of this and not the thread: it would write beside its parent, and wait for
    /// ever.
    fn check_process(&self) -> Result<()> {
        match self.origin.is_here() {
            true => Ok(()),
            false => Err(failed(&self.folder.path, "a forked child cannot use its parent's writer")),
        }
    }

    fn wait(&mut self) -> Result<()> {
        let Some(thread) = self.in_flight.take() else { return Ok(()) };
        match thread.join() {
            Ok(written) => self.written = Some(written?),
            Err(_) => return Err(failed(&self.folder.path, "the thread that writes panicked")),
        }
        Ok(())
    }

    /// Renames a damaged checkpoint of this folder to `damaged-step-…`, so that it is kept, no longer found, and in nobody's
    /// way. Returns its new path.
    ///
    /// # Errors
    /// If it cannot be renamed.
    pub fn set_aside(&self, path: &Path) -> Result<PathBuf> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let aside = unused_name(&self.folder.path.join(format!("damaged-{name}")));
        fs::rename(path, &aside).map_err(|error| failed(path, error))?;
        self.folder.flush()?;
        Ok(aside)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if self.check_process().is_ok() {
            let _ = self.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::Layout;
    use crate::checkpoint::{find, latest};

    fn layout() -> Layout {
        let mut layout = Layout::new();
        layout.push("slope", [1]);
        layout
    }

    fn snapshot(step: u64) -> Snapshot {
        let mut snapshot = Snapshot::new(step);
        snapshot.add("weights", &layout(), vec![step as f32]);
        snapshot
    }

    #[test]
    fn a_save_returns_before_it_is_written_and_the_next_one_waits() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = Writer::new(folder.path(), 5).unwrap();
        let (go, wait) = mpsc::channel();
        let mut slow = Snapshot::new(1);
        slow.add_deferred("weights", &layout(), move || vec![wait.recv().unwrap()]);
        writer.save(slow).unwrap();
        // Back, although its values do not exist yet.
        assert_eq!(latest(folder.path()).unwrap(), None);
        go.send(9.0).unwrap();
        writer.save(snapshot(2)).unwrap();
        assert!(folder.path().join("step-00000001").exists(), "the first is whole before the second begins");
        assert_eq!(writer.finish().unwrap(), Some(folder.path().join("step-00000002")));
        assert_eq!(writer.finish().unwrap(), Some(folder.path().join("step-00000002")), "nothing since");
    }

    #[test]
    fn an_error_is_told_once_by_the_next_call_and_the_next_one_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = Writer::new(folder.path(), 5).unwrap();
        let bad = |step| {
            let mut snapshot = Snapshot::new(step);
            snapshot.add_deferred("weights", &layout(), Vec::new);
            snapshot
        };
        writer.save(bad(1)).unwrap();
        let error = writer.save(snapshot(2)).unwrap_err().to_string();
        assert!(error.contains(".step-00000001.partial/weights.safetensors: 0 values"), "{error}");
        assert_eq!(writer.finish().unwrap(), Some(folder.path().join("step-00000002")));
        writer.save(bad(3)).unwrap();
        writer.finish().unwrap_err();
        let mut panics = Snapshot::new(4);
        panics.add_deferred("weights", &layout(), || panic!("on purpose"));
        writer.save(panics).unwrap();
        assert!(writer.finish().unwrap_err().to_string().contains("panicked"));
        assert_eq!(find(folder.path()).unwrap().unwrap().checkpoint.manifest().step, 2);
    }

    #[test]
    fn a_writer_that_is_dropped_has_written() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = Writer::new(folder.path(), 1).unwrap();
        writer.save(snapshot(1)).unwrap();
        drop(writer);
        assert_eq!(latest(folder.path()).unwrap(), Some(folder.path().join("step-00000001")));
    }

    #[test]
    fn in_a_folder_that_was_made_again_only_its_own_writer_writes() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("checkpoints");
        let mut first = Writer::new(&folder, 1).unwrap();
        std::fs::remove_dir(&folder).unwrap();
        let mut second = Writer::new(&folder, 1).unwrap();
        second.save(snapshot(1)).unwrap();
        second.finish().unwrap();
        first.save(snapshot(2)).unwrap();
        let error = first.finish().unwrap_err().to_string();
        assert!(error.contains("the folder was replaced by another one of this name"), "{error}");
        let names = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(names.collect::<Vec<_>>(), ["step-00000001"]);
    }

    #[test]
    fn a_damaged_one_is_set_aside_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = Writer::new(folder.path(), 1).unwrap();
        for (round, name) in ["damaged-step-00000001", "damaged-step-00000001-2"].iter().enumerate() {
            writer.save(snapshot(1)).unwrap();
            let path = writer.finish().unwrap().unwrap();
            assert_eq!(writer.set_aside(&path).unwrap(), folder.path().join(name), "round {round}");
        }
        assert_eq!(latest(folder.path()).unwrap(), None);
    }
}
