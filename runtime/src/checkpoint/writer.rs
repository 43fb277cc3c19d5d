//! Writes checkpoints on a background thread.
//!
//! Each write has a thread of its own, which is joined before the next write begins. There is no queue: waiting
//! snapshots would accumulate memory.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use super::failed;
use super::folder::Folder;
use super::publish::{publish, publish_received};
use super::removal::unused_name;
use super::snapshot::Snapshot;
use super::transfer::Received;
use crate::process::{ForkDetector, block_sigxfsz, start_failure};
use crate::{Error, Result};

/// Writes checkpoints into a folder in the background.
///
/// A writer has exclusive access to its folder: while it lives, a second writer is rejected, in this or another
/// process. Only one rank should have one, usually rank 0. Dropping it waits for the write in flight and discards its
/// error: call [`finish`](Self::finish) first.
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
    origin: ForkDetector,
    folder: Arc<Folder>,
    keep: usize,
    in_flight: Option<JoinHandle<Result<PathBuf>>>,
    written: Option<PathBuf>,
}

impl Writer {
    /// Prepares to write into `folder`, which is created if it does not exist, and to keep the newest `keep`
    /// checkpoints (at least 1). Removes incomplete checkpoints of killed writers. Files that no writer has written
    /// are never removed.
    ///
    /// # Errors
    /// If the folder cannot be created, read or written, or another writer uses it.
    pub fn new(folder: &Path, keep: usize) -> Result<Self> {
        let folder = Arc::new(Folder::open(folder)?);
        Ok(Writer {
            origin: ForkDetector::for_this_process(),
            folder,
            keep: keep.max(1),
            in_flight: None,
            written: None,
        })
    }

    /// Starts writing `snapshot`, after waiting for the previous write. A checkpoint of the same step is replaced;
    /// those of later steps are kept.
    ///
    /// # Errors
    /// The error of the previous write, which left all earlier checkpoints intact; the new write is started
    /// nevertheless. Its own error is returned by the next call of `save` or [`finish`](Self::finish). Or if no
    /// thread can be started.
    pub fn save(&mut self, snapshot: Snapshot) -> Result<()> {
        self.check_process()?;
        self.start(|folder, keep| publish(folder, snapshot, keep))
    }

    /// As [`save`](Self::save), for a checkpoint that came from another host.
    pub(super) fn save_received(&mut self, received: Received) -> Result<()> {
        self.check_process()?;
        self.start(|folder, keep| publish_received(folder, received, keep))
    }

    /// The folder, for a checkpoint that comes from another host.
    pub(super) fn folder(&self) -> &Folder {
        &self.folder
    }

    /// Starts a write after the previous one, whose error it returns.
    fn start(
        &mut self,
        write: impl FnOnce(&Folder, usize) -> Result<PathBuf> + Send + 'static,
    ) -> Result<()> {
        let before = self.wait();
        let (folder, keep) = (Arc::clone(&self.folder), self.keep);
        let thread = std::thread::Builder::new().name("checkpoint".to_owned());
        let started = thread.spawn(move || {
            block_sigxfsz();
            write(&folder, keep)
        });
        let started = started.map_err(|error| {
            Error::system("start the thread that writes a checkpoint", start_failure(&error))
        });
        self.in_flight = Some(started?);
        before
    }

    /// Waits for the write in flight. Returns the path of the newest checkpoint written by this writer, if any.
    ///
    /// # Errors
    /// The error of that write, which left all earlier checkpoints intact.
    pub fn finish(&mut self) -> Result<Option<PathBuf>> {
        self.check_process()?;
        self.wait()?;
        Ok(self.written.clone())
    }

    /// Returns an error in a forked child: it has a copy of the writer but not its thread, would write at the same
    /// time as its parent, and would wait forever.
    fn check_process(&self) -> Result<()> {
        match self.origin.is_original_process() {
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

    /// Renames a damaged checkpoint of this folder to `damaged-step-…`: it is kept, but no longer found. Returns the
    /// new path.
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
    fn save_returns_before_the_write_ends_and_the_next_save_waits() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = Writer::new(folder.path(), 5).unwrap();
        let (go, wait) = mpsc::channel();
        let mut slow = Snapshot::new(1);
        slow.add_deferred("weights", &layout(), move || vec![wait.recv().unwrap()]);
        writer.save(slow).unwrap();
        // `save` has returned, although the values do not exist yet.
        assert_eq!(latest(folder.path()).unwrap(), None);
        go.send(9.0).unwrap();
        writer.save(snapshot(2)).unwrap();
        assert!(folder.path().join("step-00000001").exists(), "the first is whole before the second begins");
        assert_eq!(writer.finish().unwrap(), Some(folder.path().join("step-00000002")));
        assert_eq!(writer.finish().unwrap(), Some(folder.path().join("step-00000002")), "nothing since");
    }

    #[test]
    fn a_write_error_is_returned_once_by_the_next_call() {
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
    fn dropping_a_writer_waits_for_its_write() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = Writer::new(folder.path(), 1).unwrap();
        writer.save(snapshot(1)).unwrap();
        drop(writer);
        assert_eq!(latest(folder.path()).unwrap(), Some(folder.path().join("step-00000001")));
    }

    #[test]
    fn only_the_writer_of_a_recreated_folder_writes_to_it() {
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
    fn damaged_checkpoints_are_set_aside_and_kept() {
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
