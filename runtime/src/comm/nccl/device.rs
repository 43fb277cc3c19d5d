//! The communicator of a training step: operations on device memory, in the order of streams.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use mgpu_kernels::cuda::{self, Device, Event, Stream, View};
use nccl_sys::{Library, UniqueId};

use super::call::NcclCall;
use super::group::{Calls, Group};
use super::link::{Link, WaitContext};
use super::owner::Owner;
use crate::comm::{ReduceOp, Rules};
use crate::membership::Membership;
use crate::progress::Operation;
use crate::{Error, Result};

/// Collectives on device memory, through NCCL. Made by [`World::device_communicator`](crate::World::device_communicator).
///
/// Operations are put on a [`Stream`] and happen in its order; the call returns when they are on it, not when they are
/// done. While the stream is captured, they become part of the graph: all ranks capture alike, and have run every operation
/// once before, since NCCL sets up connections when it first needs them. The order in which a rank puts operations on
/// streams is part of the contract: it is the same on all ranks.
///
/// [`wait`](Self::wait) is how the host learns that work is done. [`Stream::synchronize`] waits for ever if a peer has died.
///
/// # What differs from the host's communicators
/// - NCCL compares nothing. Ranks that call different operations, or with different lengths, wait for each other until the
///   deadline; the error then names those that hold up the others, as far as can be seen from outside.
/// - Sums are made in the order of NCCL's algorithm, in the element type. An all-reduce leaves the same bits on all ranks,
///   but not those of the cpu backend, and with another number of ranks, another length or another NCCL they may be others.
///   Averages of integers are made of sums that wrap.
///
/// # The end
/// Dropping it is collective: all ranks come together before NCCL lets go, in the same order where there are several.
/// After an error it was aborted already, and nobody is waited for; nor is a peer that waits in a collective which this rank
/// lets go of the communicator without, because of an error of the program's own. Graphs that its operations were captured in are
/// dropped before it.
///
/// In a world of one there is no NCCL: every operation is the identity.
#[derive(Debug)]
pub struct DeviceCommunicator {
    /// `None` in a world of one.
    link: Option<Link>,
    /// Goes after the link: NCCL works on it.
    device: Arc<Device>,
    last: Mutex<Last>,
}

/// The last operation that was put on a stream.
#[derive(Debug, Default)]
struct Last {
    sequence: u32,
    call: Option<NcclCall>,
}

mod sealed {
    use super::cuda;

    pub trait Sealed {
        fn is_done(&self) -> cuda::Result<bool>;
    }
}

/// What [`DeviceCommunicator::wait`] waits for: all work on a [`Stream`], or that up to an [`Event`].
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
    /// That of a world of one.
    pub(crate) fn alone(device: &Arc<Device>) -> Self {
        DeviceCommunicator { device: Arc::clone(device), link: None, last: Mutex::default() }
    }

    /// Joins communicator `number` of a world of `size` ranks.
    pub(crate) fn connect(
        membership: &Arc<Membership>,
        size: u32,
        number: u32,
        timeout: Duration,
        device: &Arc<Device>,
        nccl: Library,
    ) -> Result<Self> {
        let link = Link {
            membership: Arc::clone(membership),
            rank: membership.rank(),
            size,
            number,
            name: format!("communicator-{number}"),
            timeout,
            owner: Owner::start(nccl, device)?,
            rules: Arc::new(Rules::new(Some(Arc::clone(membership)), membership.rank())),
        };
        let context = WaitContext {
            operation: Operation::Connect,
            sequence: number,
            bytes: 0,
            text: "the start of NCCL".into(),
            peers: link.peers(),
            messages: None,
        };
        link.during(&context, || {
            let id = share_id(&link, &context)?;
            link.answer(&link.owner.init(id, size, link.rank), &context)
        })?;
        Ok(DeviceCommunicator { device: Arc::clone(device), link: Some(link), last: Mutex::default() })
    }

    /// The GPU.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Rank of this process.
    pub fn rank(&self) -> u32 {
        self.link.as_ref().map_or(0, |link| link.rank)
    }

    /// Number of ranks.
    pub fn size(&self) -> u32 {
        self.link.as_ref().map_or(1, |link| link.size)
    }

    /// Every rank's buffer becomes the reduction of all ranks' buffers.
    ///
    /// # Errors
    /// If the stream is of another GPU; as NCCL reports them; if a peer fails, or does not take part before the world's
    /// timeout, while NCCL is waited for. All but the first make the communicator unusable. The same for the other
    /// operations.
    pub fn all_reduce(&self, stream: &Stream, buffer: View<'_>, op: ReduceOp) -> Result<()> {
        self.group(|group| group.all_reduce(stream, buffer, op))
    }

    /// Every rank's `to` becomes the reduction of all ranks' `from`. They are one or do not overlap.
    ///
    /// # Errors
    /// If they differ in type or length, or as [`all_reduce`](Self::all_reduce).
    pub fn all_reduce_into(&self, stream: &Stream, from: View<'_>, to: View<'_>, op: ReduceOp) -> Result<()> {
        self.group(|group| group.all_reduce_into(stream, from, to, op))
    }

    /// `from` consists of n equal shards; `to` of rank r becomes the reduction of all ranks' shards r. It may be that shard
    /// itself, else it does not overlap `from`.
    ///
    /// # Errors
    /// If the lengths or types do not go together, or as [`all_reduce`](Self::all_reduce).
    pub fn reduce_scatter(&self, stream: &Stream, from: View<'_>, to: View<'_>, op: ReduceOp) -> Result<()> {
        self.group(|group| group.reduce_scatter(stream, from, to, op))
    }

    /// `to` consists of n equal shards; shard r of every rank becomes `from` of rank r. `from` may be the rank's own shard of
    /// `to`, else it does not overlap it.
    ///
    /// # Errors
    /// If the lengths or types do not go together, or as [`all_reduce`](Self::all_reduce).
    pub fn all_gather(&self, stream: &Stream, from: View<'_>, to: View<'_>) -> Result<()> {
        self.group(|group| group.all_gather(stream, from, to))
    }

    /// Every rank's buffer becomes a copy of that of rank `root`.
    ///
    /// # Errors
    /// If there is no rank `root`, or as [`all_reduce`](Self::all_reduce).
    pub fn broadcast(&self, stream: &Stream, buffer: View<'_>, root: u32) -> Result<()> {
        self.group(|group| group.broadcast(stream, buffer, root))
    }

    /// The buffer of rank `root` becomes the reduction of all ranks' buffers; the others stay as they are.
    ///
    /// # Errors
    /// If there is no rank `root`, or as [`all_reduce`](Self::all_reduce).
    pub fn reduce(&self, stream: &Stream, buffer: View<'_>, op: ReduceOp, root: u32) -> Result<()> {
        self.group(|group| group.reduce(stream, buffer, op, root))
    }

    /// Sends the buffer to rank `to`, which calls [`recv`](Self::recv) with as many elements of the type. What follows on
    /// the stream waits until it does.
    ///
    /// # Errors
    /// If `to` is this rank or none, or as [`all_reduce`](Self::all_reduce).
    pub fn send(&self, stream: &Stream, buffer: View<'_>, to: u32) -> Result<()> {
        self.group(|group| group.send(stream, buffer, to))
    }

    /// Fills the buffer with what rank `from` sends.
    ///
    /// # Errors
    /// If `from` is this rank or none, or as [`all_reduce`](Self::all_reduce).
    pub fn recv(&self, stream: &Stream, buffer: View<'_>, from: u32) -> Result<()> {
        self.group(|group| group.recv(stream, buffer, from))
    }

    /// Puts all operations that `fill` collects on their streams together.
    ///
    /// # Errors
    /// That of `fill`, and nothing is put on any stream then; or as [`all_reduce`](Self::all_reduce).
    pub fn group<'a>(&'a self, fill: impl FnOnce(&mut Group<'a>) -> Result<()>) -> Result<()> {
        let group = self.collect(fill)?;
        group.copies.iter().try_for_each(|(from, to, stream)| stream.copy(*from, *to))?;
        self.submit(group.calls)
    }

    /// Checks whether a graph of operations may be launched, and counts it.
    ///
    /// # Errors
    /// If an error has made the communicator unusable.
    pub(crate) fn begin_launch(&self) -> Result<()> {
        let Some(link) = &self.link else { return Ok(()) };
        link.check()?;
        link.membership.collectives.count_collective(link.number);
        Ok(())
    }

    /// Notes that operations are being captured.
    pub(super) fn note_capture(&self) {
        if let Some(link) = &self.link {
            link.owner.note_capture();
        }
    }

    /// What `fill` collects, if it may still be carried out.
    pub(super) fn collect<'a>(
        &'a self,
        fill: impl FnOnce(&mut Group<'a>) -> Result<()>,
    ) -> Result<Group<'a>> {
        let mut group = Group::new(self);
        self.link.as_ref().map_or(Ok(()), Link::check)?;
        fill(&mut group)?;
        Ok(group)
    }

    /// Puts calls on their streams together.
    pub(super) fn submit(&self, calls: Calls) -> Result<()> {
        let Some(link) = self.link.as_ref().filter(|_| !calls.is_empty()) else { return Ok(()) };
        // Two threads that enqueue at once: the numbers are those of the order in which NCCL gets to see the operations.
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

    /// Returns once the GPU has done everything on a stream, or up to an event. `what` is what the caller waits for, in the
    /// words of an error: `the loss of step 7`.
    ///
    /// # Errors
    /// If a peer fails, NCCL reports an error, the GPU does, or it is not done before the world's timeout. The
    /// communicator is unusable then: its operations have been aborted, and what they were to write is not defined.
    pub fn wait(&self, work: &impl Waitable, what: &str) -> Result<()> {
        let Some(link) = &self.link else { return wait_alone(work) };
        link.check()?;
        let context = {
            let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
            let context = self.context(&last, last.call.as_slice());
            WaitContext {
                text: if what.is_empty() { context.text } else { format!("{what}, after {}", context.text) },
                ..context
            }
        };
        link.during(&context, || link.device(|| work.is_done(), &context))
    }

    /// As [`wait`](Self::wait), for work that needs no other rank, all collectives before it being over. No peer is held
    /// responsible if it does not end, and none waits for this rank in vain without a sign of it.
    ///
    /// # Errors
    /// As [`wait`](Self::wait); past the world's timeout, [`Error::Stuck`] with this rank.
    pub fn wait_local(&self, work: &impl Waitable, what: &str) -> Result<()> {
        let Some(link) = &self.link else { return wait_alone(work) };
        link.check()?;
        let operation = Operation::Barrier;
        let (text, peers) = (what.to_owned(), Vec::new());
        let context = WaitContext { operation, sequence: 0, bytes: 0, text, peers, messages: None };
        // Nothing is noted on the page: to the peers this rank is busy.
        link.device(|| work.is_done(), &context).map_err(|error| link.fail(error))
    }

    /// Returns once all work on `stream` is over, in whatever way: before memory is freed that collectives on it use.
    /// Freeing it waits for the GPU, and for ever if a peer does not come, unless the communicator was ended before.
    pub(crate) fn drain(&self, stream: &Stream) {
        let Some(link) = &self.link else { return };
        if std::thread::panicking() {
            if !matches!(stream.is_done(), Ok(true)) {
                link.force_abort("a panic");
            }
            return;
        }
        // An error has ended the communicator.
        let _ = self.wait(stream, "the end of its work");
    }

    /// What the last operations are to those who look.
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

    /// What connects it with the others; `None` in a world of one.
    pub(super) fn link(&self) -> Option<&Link> {
        self.link.as_ref()
    }
}

/// Waits where there is no other rank: until the GPU is done.
fn wait_alone(work: &impl Waitable) -> Result<()> {
    while !work.is_done()? {
        std::thread::park_timeout(Duration::from_micros(50));
    }
    Ok(())
}

/// The id of the communicator: made by rank 0, the same on all ranks.
fn share_id(link: &Link, context: &WaitContext) -> Result<UniqueId> {
    let (store, key) = (link.membership.store(), format!("{}/id", link.name));
    if link.rank == 0 {
        let id = link.answer(&link.owner.unique_id(), context)?;
        store.set(&key, id.as_bytes(), &[], link.size - 1)?;
        return Ok(id);
    }
    let (bytes, _) = store.get(&key, 0, link.timeout)?;
    let bytes = bytes.try_into().map_err(|bytes: Vec<u8>| Error::Protocol {
        peer: "rank 0".into(),
        problem: format!("an NCCL unique id of {} bytes, not {}", bytes.len(), UniqueId::LEN),
    })?;
    Ok(UniqueId::from_bytes(bytes))
}
