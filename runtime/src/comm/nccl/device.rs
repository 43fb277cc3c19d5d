//! The communicator for device memory: collectives in stream order.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use mgpu_kernels::cuda::{self, Device, Event, Stream, View};
use nccl_sys::{Library, UniqueId};

use super::call::NcclCall;
use super::family::Family;
use super::group::{Calls, Group};
use super::link::{Link, WaitContext};
use super::owner::Owner;
use super::registration::RegistrationPolicy;
use super::remote::Statement;
use crate::comm::rules::ProgressEntry;
use crate::comm::{ReduceOp, Rules};
use crate::membership::Membership;
use crate::progress::Operation;
use crate::{Error, Result};

/// How long work that is left in a stream after an abort may take.
const DRAIN_LIMIT: Duration = Duration::from_secs(2);

/// Collectives on device memory through NCCL. Created by
/// [`World::device_communicator`](crate::World::device_communicator).
///
/// Operations are enqueued on a [`Stream`] and execute in its order; a call returns when they are enqueued, not when
/// they are done. While the stream is being captured, they become part of the graph: all ranks must capture the same
/// operations, and must have run each of them once before, since NCCL sets up connections when it first needs them.
/// All ranks must enqueue operations in the same order.
///
/// [`wait`](Self::wait) tells the host that work is done. [`Stream::synchronize`] would wait forever if a peer has
/// died.
///
/// # Differences to the communicators for host buffers
/// - NCCL does not compare calls. Ranks that call different operations, or use different lengths, wait for each other
///   until the timeout; the error then names the ranks that seem to block the others.
/// - Sums have the order of NCCL's algorithm, in the element type. An all-reduce leaves the same bits on all ranks,
///   but not those of the cpu backend, and they may change with the number of ranks, the length or the version of
///   NCCL. Sums of integers wrap before an average divides them.
///
/// # Drop
/// Dropping it is collective: all ranks synchronise before NCCL destroys the communicator; with several
/// communicators of the world, in the same order. [Groups](Self::split) and the communicator that they were split from
/// can be dropped in any order: ranks wait half a second for each other at most, and for the rest at the drop of the
/// last one. After an error it has been aborted, and dropping it waits for nobody. Nor does
/// it wait for a peer that is in a collective which this rank has skipped because of the program's own error. Graphs
/// with captured operations must be dropped first.
///
/// In a world of one there is no NCCL, and every operation is the identity, unless `MGPU_NCCL=always` is set.
#[derive(Debug)]
pub struct DeviceCommunicator {
    /// `None` in a world of one without NCCL.
    link: Option<Link>,
    /// Dropped after the link, because NCCL uses it.
    device: Arc<Device>,
    last: Mutex<Last>,
}

/// The last operation that was enqueued.
#[derive(Debug, Default)]
struct Last {
    sequence: u32,
    /// Number of graphs launched.
    launches: u32,
    call: Option<NcclCall>,
}

mod sealed {
    use super::cuda;

    pub trait Sealed {
        fn is_done(&self) -> cuda::Result<bool>;
    }
}

/// What [`DeviceCommunicator::wait`] can wait for: all work on a [`Stream`], or the work before an [`Event`].
pub trait Waitable: sealed::Sealed {}

impl sealed::Sealed for Stream {
    fn is_done(&self) -> cuda::Result<bool> {
        Stream::is_done(self)
    }
}

impl sealed::Sealed for Event {
    fn is_done(&self) -> cuda::Result<bool> {
        Event::is_done(self)
    }
}

impl Waitable for Stream {}
impl Waitable for Event {}

impl DeviceCommunicator {
    /// The communicator of a world of one.
    pub(crate) fn alone(device: &Arc<Device>) -> Self {
        DeviceCommunicator { device: Arc::clone(device), link: None, last: Mutex::default() }
    }

    /// Connects communicator `number` of a world of `size` ranks.
    pub(crate) fn connect(
        membership: &Arc<Membership>,
        size: u32,
        number: u32,
        timeout: Duration,
        device: &Arc<Device>,
        nccl: Library,
        registration: RegistrationPolicy,
    ) -> Result<Self> {
        let owner = Arc::new(Owner::start(nccl, device)?);
        let family = Family::new(number);
        family.add(number, &owner);
        let key = format!("communicator-{number}");
        let link = Link {
            membership: Arc::clone(membership),
            members: membership.everyone(size),
            number,
            title: key.clone(),
            key,
            timeout,
            owner,
            rules: Arc::new(Rules::new(Some(Arc::clone(membership)), membership.rank())),
            family: Arc::new(family),
            statement: Statement::default(),
            registration,
        };
        link.rules.set_number(number);
        let advice = match link.has_remote_members() {
            true => {
                let notices = &membership.store().nccl_advice().notices;
                let found = notices.first().map(|notice| format!("{notice}; ")).unwrap_or_default();
                format!(
                    " ({found}NCCL_DEBUG=INFO shows which network interface it takes, NCCL_SOCKET_IFNAME names another one)"
                )
            }
            false => String::new(),
        };
        let context = WaitContext {
            operation: Operation::Connect,
            sequence: number,
            bytes: 0,
            text: format!("the initialisation of NCCL{advice}"),
            peers: link.peers(),
            messages: None,
        };
        link.during(&context, || {
            let id = link.share_id("id", &context)?;
            link.answer(&link.owner.init(id, size, link.members.rank()), &context)
        })?;
        Ok(Self::connected(device, link))
    }

    /// The communicator of a link that is connected.
    pub(super) fn connected(device: &Arc<Device>, link: Link) -> Self {
        DeviceCommunicator { device: Arc::clone(device), link: Some(link), last: Mutex::default() }
    }

    /// The GPU.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// This rank, in this communicator.
    pub fn rank(&self) -> u32 {
        self.link.as_ref().map_or(0, |link| link.members.rank())
    }

    /// Number of ranks.
    pub fn size(&self) -> u32 {
        self.link.as_ref().map_or(1, |link| link.members.size())
    }

    /// Whether operations go through NCCL: with several ranks, or with `MGPU_NCCL=always`.
    pub(crate) fn uses_nccl(&self) -> bool {
        self.link.is_some()
    }

    /// All-reduce: every rank's buffer becomes the reduction of all ranks' buffers.
    ///
    /// # Errors
    /// If the stream belongs to another GPU; if NCCL returns an error; if a peer fails, or does not take part within
    /// the world's timeout. All but the first poison the communicator. The other operations have the same errors.
    pub fn all_reduce(&self, stream: &Stream, buffer: View<'_>, op: ReduceOp) -> Result<()> {
        self.group(|group| group.all_reduce(stream, buffer, op))
    }

    /// All-reduce out of place: every rank's `to` becomes the reduction of all ranks' `from`. The two are the same or
    /// do not overlap.
    ///
    /// # Errors
    /// If they differ in type or length, or as [`all_reduce`](Self::all_reduce).
    pub fn all_reduce_into(&self, stream: &Stream, from: View<'_>, to: View<'_>, op: ReduceOp) -> Result<()> {
        self.group(|group| group.all_reduce_into(stream, from, to, op))
    }

    /// Reduce-scatter: `from` consists of n equal shards; `to` of rank r becomes the reduction of all ranks' shards
    /// r. `to` is that shard itself or does not overlap `from`.
    ///
    /// # Errors
    /// If lengths or types are incompatible, or as [`all_reduce`](Self::all_reduce).
    pub fn reduce_scatter(&self, stream: &Stream, from: View<'_>, to: View<'_>, op: ReduceOp) -> Result<()> {
        self.group(|group| group.reduce_scatter(stream, from, to, op))
    }

    /// All-gather: `to` consists of n equal shards; shard r of every rank becomes `from` of rank r. `from` is the
    /// rank's own shard of `to` or does not overlap it.
    ///
    /// # Errors
    /// If lengths or types are incompatible, or as [`all_reduce`](Self::all_reduce).
    pub fn all_gather(&self, stream: &Stream, from: View<'_>, to: View<'_>) -> Result<()> {
        self.group(|group| group.all_gather(stream, from, to))
    }

    /// Broadcast: every rank's buffer becomes a copy of that of rank `root`.
    ///
    /// # Errors
    /// If there is no rank `root`, or as [`all_reduce`](Self::all_reduce).
    pub fn broadcast(&self, stream: &Stream, buffer: View<'_>, root: u32) -> Result<()> {
        self.group(|group| group.broadcast(stream, buffer, root))
    }

    /// Reduce: the buffer of rank `root` becomes the reduction of all ranks' buffers; the others are unchanged.
    ///
    /// # Errors
    /// If there is no rank `root`, or as [`all_reduce`](Self::all_reduce).
    pub fn reduce(&self, stream: &Stream, buffer: View<'_>, op: ReduceOp, root: u32) -> Result<()> {
        self.group(|group| group.reduce(stream, buffer, op, root))
    }

    /// Sends the buffer to rank `to`, which must call [`recv`](Self::recv) with the same type and length. Later work
    /// on the stream waits for that.
    ///
    /// # Errors
    /// If `to` is this rank or does not exist, or as [`all_reduce`](Self::all_reduce).
    pub fn send(&self, stream: &Stream, buffer: View<'_>, to: u32) -> Result<()> {
        self.group(|group| group.send(stream, buffer, to))
    }

    /// Fills the buffer with what rank `from` sends.
    ///
    /// # Errors
    /// If `from` is this rank or does not exist, or as [`all_reduce`](Self::all_reduce).
    pub fn recv(&self, stream: &Stream, buffer: View<'_>, from: u32) -> Result<()> {
        self.group(|group| group.recv(stream, buffer, from))
    }

    /// Enqueues all operations that `fill` collects as one NCCL group.
    ///
    /// # Errors
    /// That of `fill`, in which case nothing is enqueued; or as [`all_reduce`](Self::all_reduce).
    pub fn group<'a>(&'a self, fill: impl FnOnce(&mut Group<'a>) -> Result<()>) -> Result<()> {
        let group = self.collect(fill)?;
        group.copies.iter().try_for_each(|(from, to, stream)| stream.copy(*from, *to))?;
        self.submit(group.calls)
    }

    /// Checks that a graph of operations may be launched, and counts the launch as a collective.
    ///
    /// # Errors
    /// If an earlier error has poisoned the communicator.
    pub(crate) fn begin_launch(&self) -> Result<()> {
        let Some(link) = &self.link else { return Ok(()) };
        link.check()?;
        link.membership.collectives.count_collective(link.number);
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.launches = last.launches.wrapping_add(1).max(1);
        let (operation, number) = (Operation::LaunchGraph, last.launches);
        link.rules.record_ended(ProgressEntry { operation, number, bytes: 0, tag: None, on_device: true });
        Ok(())
    }

    /// Records that operations are being captured, which changes the abort.
    pub(super) fn note_capture(&self) {
        if let Some(link) = &self.link {
            link.owner.note_capture();
        }
    }

    /// Collects the operations of `fill`, if the communicator is usable.
    pub(super) fn collect<'a>(
        &'a self,
        fill: impl FnOnce(&mut Group<'a>) -> Result<()>,
    ) -> Result<Group<'a>> {
        let mut group = Group::new(self);
        self.link.as_ref().map_or(Ok(()), Link::check)?;
        fill(&mut group)?;
        Ok(group)
    }

    /// Enqueues calls as one group.
    pub(super) fn submit(&self, calls: Calls) -> Result<()> {
        let Some(link) = self.link.as_ref().filter(|_| !calls.is_empty()) else { return Ok(()) };
        // Holding the lock, so that with several threads the sequence numbers have NCCL's order.
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.sequence = last.sequence.wrapping_add(1).max(1);
        last.call = calls.last().copied();
        let context = WaitContext { peers: link.peers(), ..self.context(&last, &calls) };
        link.operation(&context, || {
            if calls.iter().any(NcclCall::is_collective) {
                link.membership.collectives.count_collective(link.number);
            }
            let answer = link.owner.enqueue(calls);
            drop(last);
            link.answer(&answer, &context)
        })
    }

    /// Waits until the GPU has done all work on a stream, or before an event. `what` describes it for errors: `the
    /// loss of step 7`.
    ///
    /// # Errors
    /// If a peer fails, if NCCL or the GPU reports an error, or if the work is not done within the world's timeout.
    /// This poisons the communicator: its operations are aborted, and their results are undefined.
    pub fn wait(&self, work: &impl Waitable, what: &str) -> Result<()> {
        let Some(link) = &self.link else { return wait_alone(work) };
        link.check()?;
        let context = {
            let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
            let context = self.context(&last, last.call.as_slice());
            WaitContext {
                text: match (what, last.call) {
                    ("", _) => context.text,
                    (_, None) => what.to_owned(),
                    _ => format!("{what}, after {}", context.text),
                },
                ..context
            }
        };
        link.during(&context, || link.device(|| work.is_done(), &context))
    }

    /// As [`wait`](Self::wait), for work that does not depend on other ranks, after all collectives have ended. If it
    /// does not end, no peer is blamed, and peers that wait for this rank see that it is busy.
    ///
    /// # Errors
    /// As [`wait`](Self::wait); after the world's timeout [`Error::Stuck`], which blames this rank.
    pub fn wait_local(&self, work: &impl Waitable, what: &str) -> Result<()> {
        let Some(link) = &self.link else { return wait_alone(work) };
        link.check()?;
        let operation = Operation::Barrier;
        let (text, peers) = (what.to_owned(), Vec::new());
        let context = WaitContext { operation, sequence: 0, bytes: 0, text, peers, messages: None };
        // The progress page is not changed: to the peers this rank is busy.
        link.device(|| work.is_done(), &context).map_err(|error| link.fail(error))
    }

    /// Drains `stream`: returns once all its work has ended, successfully or not. To be called before memory is freed that
    /// its collectives use: freeing it would wait for the GPU, and forever if a peer does not arrive, unless the
    /// communicator was aborted first.
    pub fn drain(&self, stream: &Stream) {
        let Some(link) = &self.link else { return };
        if std::thread::panicking() {
            if !matches!(stream.is_done(), Ok(true)) {
                link.force_abort("a panic");
            }
            return;
        }
        if self.wait(stream, "draining a stream").is_ok() {
            return;
        }
        // The communicator is aborted. What else is in the stream waits for nobody.
        let began = Instant::now();
        let is_busy = || !self.device.is_abandoned() && matches!(stream.is_done(), Ok(false));
        while is_busy() && began.elapsed() < DRAIN_LIMIT {
            std::thread::park_timeout(Duration::from_micros(50));
        }
    }

    /// Describes the last operations for errors and the progress page.
    fn context(&self, last: &Last, calls: &[NcclCall]) -> WaitContext {
        let text = match calls {
            [] => "no operation".to_owned(),
            [call] => call.to_string(),
            [first, rest @ ..] => format!("{first} and {} more", rest.len()),
        };
        WaitContext {
            operation: calls.first().map_or(Operation::Barrier, NcclCall::operation),
            sequence: last.sequence,
            bytes: calls.iter().map(NcclCall::bytes).sum(),
            text,
            peers: self.link.as_ref().map(Link::peers).unwrap_or_default(),
            messages: None,
        }
    }

    /// The connection to the other ranks; `None` in a world of one without NCCL.
    pub(super) fn link(&self) -> Option<&Link> {
        self.link.as_ref()
    }
}

/// Waits for the GPU in a world of one.
fn wait_alone(work: &impl Waitable) -> Result<()> {
    while !work.is_done()? {
        std::thread::park_timeout(Duration::from_micros(50));
    }
    Ok(())
}

impl Link {
    /// The NCCL unique id of the communicator: created by its rank 0, the same on all ranks. `name` names it at the
    /// rendezvous, and is used once.
    pub(super) fn share_id(&self, name: &str, context: &WaitContext) -> Result<UniqueId> {
        let (store, key) = (self.membership.store(), format!("{}/{name}", self.key));
        if self.members.rank() == 0 {
            let id = self.answer(&self.owner.unique_id(), context)?;
            if self.members.size() > 1 {
                store.set(&key, id.as_bytes(), &[], self.members.size() - 1)?;
            }
            return Ok(id);
        }
        let (bytes, _) = store.get(&key, self.members.world_rank(0), self.timeout)?;
        let bytes = bytes.try_into().map_err(|bytes: Vec<u8>| Error::Protocol {
            peer: "rank 0".into(),
            problem: format!("an NCCL unique id of {} bytes, not {}", bytes.len(), UniqueId::LEN),
        })?;
        Ok(UniqueId::from_bytes(bytes))
    }
}
