//! Keeps each checkpoint on several hosts.
//!
//! Hosts need not share a file system: then a checkpoint on the disk of host 0 is lost with it. So after rank 0 has
//! published a checkpoint, it sends it to the first ranks of other hosts, each of which publishes it in its own folder
//! by the same rules: written under a hidden name, verified, flushed, renamed, older ones removed (`transfer`, `publish`).
//!
//! **When it is sent.** Ranks take part at the same points of the program, so checkpoint n is sent when checkpoint n + 1
//! is about to be written, or at the end. Rank 0 has written it by then, so nobody waits for its disk. The training
//! waits for the network only: receivers flush and publish on a thread, while the training continues. The price: if host
//! 0 is lost, a run resumes from the last checkpoint but one.
//!
//! **A copy that fails is an error** on all ranks, as a checkpoint of rank 0 that fails: a run that goes on with fewer
//! copies than it was asked for would be noticed when it is too late. Earlier checkpoints are intact, and a restart
//! resumes from them.
//!
//! **Shared folders** hold one copy, however many hosts see them (`shared_folder`).
//!
//! **Resuming.** All hosts say what the newest intact checkpoint in their folder is. The newest of these counts; of equal
//! ones that of the lowest host. If rank 0 does not have it, it is sent it and publishes it. Then rank 0 reads it as if
//! it had always been there.

use std::ops::Range;
use std::path::{Path, PathBuf};

use super::agreement::agree;
use super::publish::publish_received;
use super::read::{Checkpoint, Survey, all_damaged, survey};
use super::transfer::{Part, Received, Route, transfer};
use super::{Manifest, Snapshot, Writer, files, folder, shared_folder};
use crate::comm::Communicator;
use crate::{Error, Result, World};

/// Writes checkpoints in the background, and keeps each on several hosts.
///
/// Every rank has one, and calls its collective methods at the same points. Folders are written by the first rank of
/// each host that keeps copies; rank 0 is one of them. As with a [`Writer`], nobody else may write to these folders.
///
/// ```
/// # fn main() -> mgpu::Result<()> {
/// use mgpu::checkpoint::{ReplicatedWriter, Snapshot};
/// # let folder = tempfile::tempdir().unwrap();
/// # let folder = folder.path();
/// # let mut layout = mgpu::Layout::new();
/// # layout.push("slope", [1]);
/// let mut world = mgpu::World::from_env()?;
/// // On two hosts, if there are two.
/// let mut writer = ReplicatedWriter::new(&mut world, folder, 2, 2)?;
/// if let Some(newest) = writer.find()? {
///     let checkpoint = writer.fetch(&newest)?.checkpoint; // on rank 0
/// }
/// for step in 1..=5 {
///     let snapshot = (world.rank() == 0).then(|| {
///         let mut snapshot = Snapshot::new(step);
///         snapshot.add("weights", &layout, vec![step as f32]);
///         snapshot
///     });
///     writer.save(snapshot)?;
/// }
/// writer.finish()?;
/// # assert_eq!(writer.find()?.unwrap().manifest.step, 5);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ReplicatedWriter {
    comm: Communicator,
    folder: PathBuf,
    hosts: Vec<Range<u32>>,
    /// The host of this rank.
    host: usize,
    /// This rank reads its host's folder: it is the first rank there, and no lower host sees the same folder.
    reads: bool,
    /// First ranks of the hosts that keep copies, rank 0 first.
    keepers: Vec<u32>,
    /// On these ranks.
    writer: Option<Writer>,
    keep: usize,
    /// The last checkpoint of rank 0 was not sent yet.
    is_unsent: bool,
    /// Damaged checkpoints in this rank's folder that are newer than its newest intact one.
    damaged: Vec<(PathBuf, Error)>,
}

/// The newest intact checkpoint that any host has: the same on all ranks.
#[derive(Debug, Clone)]
pub struct Newest {
    /// The host that has it, from 0.
    pub host: usize,
    /// Its folder on that host.
    pub path: PathBuf,
    /// Its manifest.
    pub manifest: Manifest,
}

/// The result of [`ReplicatedWriter::fetch`].
#[derive(Debug)]
pub struct Fetched {
    /// The checkpoint, on rank 0.
    pub checkpoint: Option<Checkpoint>,
    /// Damaged checkpoints in this rank's folder that were renamed, each with its error and its new path.
    pub set_aside: Vec<(Error, PathBuf)>,
}

impl ReplicatedWriter {
    /// Prepares to keep the newest `keep` checkpoints (at least 1) in `folder` on each of `copies` hosts (at least 1),
    /// or on all if there are fewer: [`copies`](Self::copies) says on how many. Hosts that see the same folder count as
    /// one. The folder is created on every host. Collective.
    ///
    /// # Errors
    /// As [`Writer::new`], on any host, and errors of the communicator.
    pub fn new(world: &mut World, folder: &Path, keep: usize, copies: usize) -> Result<Self> {
        let (hosts, rank) = (world.hosts(), world.rank());
        let host = hosts.iter().position(|ranks| ranks.contains(&rank)).unwrap_or(0);
        let mut comm = world.host_memory_communicator()?;
        let is_first = hosts[host].start == rank;
        let made = if is_first { folder::make(folder) } else { Ok(()) };
        agree(&mut comm, folder, host, made)?;
        let owners = shared_folder::owners(&mut comm, &hosts, host, folder)?;
        let apart = (0..hosts.len()).filter(|host| owners[*host] == *host);
        let keepers: Vec<u32> = apart.map(|host| hosts[host].start).take(copies.max(1)).collect();
        let writer = keepers.contains(&rank).then(|| Writer::new(folder, keep)).transpose();
        let writer = agree(&mut comm, folder, host, writer)?;
        Ok(ReplicatedWriter {
            comm,
            folder: folder.to_owned(),
            reads: is_first && owners[host] == host,
            hosts,
            host,
            keepers,
            writer,
            keep: keep.max(1),
            is_unsent: false,
            damaged: Vec::new(),
        })
    }

    /// The number of hosts with different folders that keep each checkpoint.
    pub fn copies(&self) -> usize {
        self.keepers.len()
    }

    /// The host, from 0, and the path of a checkpoint that any host has, damaged or not: the newest one on the lowest
    /// host that has one. The same on all ranks. Collective.
    ///
    /// # Errors
    /// If a folder cannot be read, and errors of the communicator.
    pub fn latest(&mut self) -> Result<Option<(usize, PathBuf)>> {
        let own = if self.reads { folder::latest(&self.folder) } else { Ok(None) };
        let own = self.agree(own)?;
        let text = own.map_or(String::new(), |path| path.to_string_lossy().into_owned());
        let paths = self.comm.all_gather_bytes(text.as_bytes())?;
        let first = self.hosts.iter().map(|ranks| &paths[ranks.start as usize]).enumerate();
        let found = first.into_iter().find(|(_, path)| !path.is_empty());
        Ok(found.map(|(host, path)| (host, PathBuf::from(&*String::from_utf8_lossy(path)))))
    }

    /// Finds the newest checkpoint whose files are all intact on any host; `None` if no host has any. Changes nothing.
    /// Collective.
    ///
    /// # Errors
    /// As [`find`](super::find), on any host, and errors of the communicator. That all checkpoints of a host are damaged
    /// is an error only if no host has an intact one.
    pub fn find(&mut self) -> Result<Option<Newest>> {
        let own = if self.reads { survey(&self.folder) } else { Ok(Survey::default()) };
        let Survey { intact, damaged } = self.agree(own)?;
        self.damaged = damaged;
        let own = intact.as_ref().map(|checkpoint| checkpoint.manifest().step);
        // With a flag, since a step may be any number.
        let words = [u8::from(own.is_some())].into_iter().chain(own.unwrap_or(0).to_be_bytes());
        let all = self.comm.all_gather_slice(&words.collect::<Vec<u8>>())?;
        let of_host = |host: usize| &all[9 * self.hosts[host].start as usize..][..9];
        // The words compare as the steps do; of equal ones, take the lowest host.
        let newest = (0..self.hosts.len()).rev().max_by_key(|host| of_host(*host));
        match newest.filter(|host| of_host(*host)[0] == 1) {
            Some(host) => self.describe(host, intact.as_ref()).map(Some),
            None => {
                let any = (!self.damaged.is_empty()).then(|| all_damaged(&self.folder, &self.damaged));
                self.agree(any.map_or(Ok(()), Err)).map(|()| None)
            }
        }
    }

    /// Tells all ranks about the checkpoint that `host` has.
    fn describe(&mut self, host: usize, intact: Option<&Checkpoint>) -> Result<Newest> {
        let root = self.hosts[host].start;
        let own = intact.filter(|_| self.comm.rank() == root);
        let text = own.map(|own| files::read_manifest_text(own.path())).transpose();
        let text = self.agree(text)?.unwrap_or_default();
        let text = self.comm.broadcast_bytes(&text, root)?;
        let path = own.map_or(String::new(), |own| own.path().to_string_lossy().into_owned());
        let path = self.comm.broadcast_bytes(path.as_bytes(), root)?;
        let path = PathBuf::from(&*String::from_utf8_lossy(&path));
        let manifest = self.agree(files::parse_manifest(&path, &text))?;
        Ok(Newest { host, path, manifest })
    }

    /// Makes the checkpoint `newest` that [`find`](Self::find) has returned available to rank 0. If another host has it,
    /// it is sent to rank 0, which publishes it in its own folder. Hosts that keep copies rename their newer checkpoints
    /// that are damaged, as [`Writer::set_aside`]. Collective.
    ///
    /// # Errors
    /// If a file cannot be read or written, on any host, and errors of the communicator.
    pub fn fetch(&mut self, newest: &Newest) -> Result<Fetched> {
        // If a rank has refused the checkpoint, it does not come here, and nothing is changed.
        self.agree(Ok(()))?;
        let set_aside = self.set_damaged_aside();
        let set_aside = self.agree(set_aside)?;
        let sender = self.hosts[newest.host].start;
        // As it is called on the sender.
        let path = self.folder.join(newest.path.file_name().unwrap_or_default());
        let path = if sender == 0 {
            path
        } else {
            let received = self.transfer(Route { from: sender, to: &[0] }, &path)?;
            let published = match (received, &self.writer) {
                (Some(received), Some(writer)) => publish_received(writer.folder(), received, self.keep),
                _ => Ok(PathBuf::new()),
            };
            self.agree(published)?
        };
        let checkpoint = (self.comm.rank() == 0).then(|| Checkpoint::open(path)).transpose();
        Ok(Fetched { checkpoint: self.agree(checkpoint)?, set_aside })
    }

    fn set_damaged_aside(&mut self) -> Result<Vec<(Error, PathBuf)>> {
        let Some(writer) = &self.writer else { return Ok(Vec::new()) };
        self.damaged.drain(..).map(|(path, error)| Ok((error, writer.set_aside(&path)?))).collect()
    }

    /// Waits until the previous checkpoint is written, starts to write `snapshot`, which rank 0 passes, and sends the
    /// previous checkpoint to the hosts that keep copies. Collective.
    ///
    /// # Errors
    /// The error of the previous checkpoint or of a copy, with its host, on all ranks; earlier checkpoints are intact.
    /// The new write is started nevertheless. Or errors of the communicator.
    pub fn save(&mut self, snapshot: Option<Snapshot>) -> Result<()> {
        let before = self.send_previous();
        if let (Some(writer), Some(snapshot), 0) = (&mut self.writer, snapshot, self.comm.rank()) {
            writer.save(snapshot)?;
        }
        self.is_unsent = true;
        before
    }

    /// Waits until the last checkpoint is written on all hosts that keep copies. Returns on these hosts' first ranks the
    /// path of the newest checkpoint that this writer has written, if any. Collective.
    ///
    /// # Errors
    /// As [`save`](Self::save).
    pub fn finish(&mut self) -> Result<Option<PathBuf>> {
        self.send_previous()?;
        let written = self.finish_local();
        self.agree(written)
    }

    /// Waits for the writes of this rank alone: for a rank that ends with an error. Without it, dropping the writer waits.
    ///
    /// # Errors
    /// The error of the write.
    pub fn finish_local(&mut self) -> Result<Option<PathBuf>> {
        self.writer.as_mut().map_or(Ok(None), Writer::finish)
    }

    /// Sends rank 0's last checkpoint, if it was not sent yet, once it and all earlier copies are written.
    fn send_previous(&mut self) -> Result<()> {
        if !std::mem::take(&mut self.is_unsent) {
            return Ok(());
        }
        let written = self.finish_local();
        let written = self.agree(written)?;
        let (keepers, path) = (self.keepers.clone(), written.unwrap_or_default());
        if let [from, to @ ..] = &keepers[..]
            && !to.is_empty()
        {
            let received = self.transfer(Route { from: *from, to }, &path)?;
            if let (Some(writer), Some(received)) = (&mut self.writer, received) {
                // Its error is agreed upon before the next transfer.
                writer.save_received(received)?;
            }
        }
        Ok(())
    }

    /// Sends the checkpoint that is at `path` on the sender.
    fn transfer(&mut self, route: Route<'_>, path: &Path) -> Result<Option<Received>> {
        let rank = self.comm.rank();
        let part = match &self.writer {
            _ if rank == route.from => Part::Sender(path),
            Some(writer) if route.to.contains(&rank) => Part::Receiver(writer.folder()),
            _ => Part::Onlooker,
        };
        transfer(&mut self.comm, (&self.folder, self.host), route, part)
    }

    fn agree<T>(&mut self, own: Result<T>) -> Result<T> {
        agree(&mut self.comm, &self.folder, self.host, own)
    }
}
