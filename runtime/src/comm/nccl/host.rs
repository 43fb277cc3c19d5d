//! The communicator for host buffers: every program that works on the CPU's communicators works on NCCL's.
//!
//! An operation begins with an agreement: each rank's call, in a few words, is gathered by NCCL itself, with a size that
//! does not depend on the call. So ranks that disagree all learn it, and from whom, instead of waiting for each other. The
//! payload then goes through pinned memory and memory of the GPU, in chunks, two of them under way at a time.
//!
//! Messages are agreed upon by the two ranks that they concern. A message that meets a collective has nobody to agree with: the
//! rank in the collective finds that out by the notes on the progress page (`Link::unmet_message`).

use std::sync::Arc;
use std::time::Duration;

use bytemuck::{cast_slice, cast_slice_mut};
use mgpu_kernels::cuda::{Device, Event, Memory, Pinned, Stream};

use super::DeviceCommunicator;
use super::call::Kind;
use super::group::Group;
use super::link::{Doing, Link};
use super::staging::{Chunk, Route};
use crate::comm::cpu::call::{CALL_WORDS, Call, describe};
use crate::comm::{Algorithm, Buffer, DType, Pending, ReduceOp, Transport};
use crate::inject::Moment;
use crate::progress::Operation;
use crate::{Error, Result, memory};

/// Bytes of a stage.
const STAGE: usize = 4 << 20;
/// Bytes of a call in the agreement.
const WORDS: usize = CALL_WORDS * size_of::<u64>();

/// The communicator of one rank of several.
pub(crate) struct HostCommunicator {
    /// The first to go: freeing the memory below waits for the GPU, which may wait for a peer until the communicator ends.
    device: Arc<DeviceCommunicator>,
    stages: [Stage; 2],
    /// Every rank's call.
    calls: Memory,
    calls_on_host: Pinned,
    stream: Stream,
    done: Event,
    sequence: u32,
    /// Messages begun with each rank.
    messages: Vec<u32>,
}

/// A place that a chunk goes through.
struct Stage {
    host: Pinned,
    device: Memory,
    done: Event,
}

impl Stage {
    fn new(device: &Arc<Device>) -> Result<Self> {
        Ok(Stage {
            host: Pinned::zeroed(device, STAGE)?,
            device: Memory::zeroed(device, DType::U8, STAGE)?,
            done: Event::new(device)?,
        })
    }
}

fn invalid<T>(operation: &'static str, problem: String) -> Result<T> {
    Err(Error::InvalidArgument { operation, problem })
}

impl HostCommunicator {
    /// A communicator over that of the device, which has more than one rank.
    pub(crate) fn new(device: Arc<DeviceCommunicator>) -> Result<Self> {
        let gpu = device.device();
        let words = WORDS * device.size() as usize;
        Ok(HostCommunicator {
            stages: [Stage::new(gpu)?, Stage::new(gpu)?],
            calls: Memory::zeroed(gpu, DType::U8, words)?,
            calls_on_host: Pinned::zeroed(gpu, words)?,
            stream: Stream::new(gpu)?,
            done: Event::new(gpu)?,
            sequence: 0,
            messages: vec![0; device.size() as usize],
            device,
        })
    }

    fn link(&self) -> &Link {
        self.device.link().expect("a world of one has another communicator")
    }

    /// Runs an operation: agreement, then the payload.
    fn run(&mut self, kind: Kind, call: &Call, buffer: Option<&Buffer>) -> Result<()> {
        self.link().check()?;
        self.sequence = self.sequence.wrapping_add(1).max(1);
        if self.sequence == 1 {
            self.link().membership.come_to(Moment::Collective);
        }
        let peers = match kind {
            Kind::Send { to: peer } | Kind::Recv { from: peer } => {
                self.messages[peer as usize] += 1;
                vec![peer]
            }
            _ => {
                self.link().membership.standing.count_turn(self.link().number);
                self.link().peers()
            }
        };
        let doing = Doing {
            operation: call.kind,
            sequence: self.sequence,
            bytes: call.len * call.dtype.size(),
            text: call.to_string(),
            peers,
            messages: Some(self.messages.clone()),
        };
        let membership = Arc::clone(&self.link().membership);
        let rank = self.link().rank;
        membership.page().enter(rank, doing.operation, doing.sequence, doing.bytes);
        let outcome = self.agree(kind, call, &doing).and_then(|()| match buffer {
            Some(buffer) => self.carry(kind, buffer, &doing),
            None => Ok(()),
        });
        outcome.inspect(|()| membership.page().leave(rank)).map_err(|error| self.link().fail(error))
    }

    /// Puts one operation, or two that begin together, on the stream.
    fn enqueue<'a>(&'a self, doing: &Doing, fill: impl FnOnce(&mut Group<'a>)) -> Result<()> {
        let mut group = Group::new(&self.device);
        fill(&mut group);
        self.link().answer(&self.link().owner.enqueue(group.calls), doing)
    }

    /// Compares this rank's call with those of its peers.
    fn agree(&mut self, kind: Kind, call: &Call, doing: &Doing) -> Result<()> {
        let own = self.link().rank as usize * WORDS;
        // SAFETY: the last agreement has been waited for, or has made the communicator unusable.
        let bytes = unsafe { self.calls_on_host.bytes_mut() };
        bytes[own..own + WORDS].copy_from_slice(cast_slice(&call.encode()));
        let slot = self.calls.slice(own..own + WORDS);
        self.stream.upload_part_later(&self.calls_on_host, own, slot)?;
        self.enqueue(doing, |group| match kind {
            Kind::Send { to: peer } | Kind::Recv { from: peer } => {
                let theirs = self.calls.slice(peer as usize * WORDS..(peer as usize + 1) * WORDS).address();
                let (send, recv) = (Kind::Send { to: peer }, Kind::Recv { from: peer });
                group.push(send, &self.stream, (slot.address(), 0), WORDS, DType::U8);
                group.push(recv, &self.stream, (0, theirs), WORDS, DType::U8);
            }
            _ => {
                let all = self.calls.view().address();
                group.push(Kind::AllGather, &self.stream, (slot.address(), all), WORDS, DType::U8);
            }
        })?;
        self.stream.download_later(self.calls.view(), &mut self.calls_on_host)?;
        self.stream.record(&self.done)?;
        self.link().device(|| self.done.is_done(), doing)?;
        // SAFETY: the copy is over.
        let all = unsafe { self.calls_on_host.bytes() };
        for peer in &doing.peers {
            let mut theirs = [0; CALL_WORDS];
            let at = *peer as usize * WORDS;
            cast_slice_mut(&mut theirs).copy_from_slice(&all[at..at + WORDS]);
            if theirs != call.counterpart(self.link().rank).encode() {
                let (rank, sequence) = (self.link().rank, doing.sequence);
                let (ours, theirs) = (call.to_string(), describe(theirs));
                self.let_all_know(kind);
                return Err(Error::Mismatch { rank, peer: *peer, sequence, ours, theirs });
            }
        }
        Ok(())
    }

    /// All ranks learn of a disagreement, but not at once: an abort by one that knows already would take the news away from
    /// one that does not.
    fn let_all_know(&self, kind: Kind) {
        if !matches!(kind, Kind::Send { .. } | Kind::Recv { .. }) {
            let (link, sequence) = (self.link(), self.sequence);
            let limit = link.timeout.min(Duration::from_secs(1));
            let _ = link.membership.store().barrier(&format!("{}/disagree-{sequence}", link.name), limit);
        }
    }

    /// Moves the payload through the stages.
    fn carry(&mut self, kind: Kind, buffer: &Buffer, doing: &Doing) -> Result<()> {
        let (rank, ranks) = (self.link().rank, self.link().size);
        let (len, element) = (buffer.len(), buffer.dtype().size());
        let route = Route { kind, rank, ranks, len, element, stage: STAGE };
        let mut under_way: [Option<Chunk>; 2] = [None, None];
        let mut turn = 0;
        for chunk in route.chunks() {
            self.finish(turn, under_way[turn].take(), buffer, doing)?;
            self.begin(turn, kind, &chunk, buffer, doing)?;
            under_way[turn] = Some(chunk);
            turn = 1 - turn;
        }
        for _ in 0..2 {
            self.finish(turn, under_way[turn].take(), buffer, doing)?;
            turn = 1 - turn;
        }
        Ok(())
    }

    /// Starts a chunk on its way through stage `which`, which is free.
    fn begin(
        &mut self,
        which: usize,
        kind: Kind,
        chunk: &Chunk,
        buffer: &Buffer,
        doing: &Doing,
    ) -> Result<()> {
        let Stage { host, device, .. } = &mut self.stages[which];
        for piece in &chunk.put {
            // SAFETY: the stage is free: its last chunk was waited for.
            let target = &mut unsafe { host.bytes_mut() }[piece.stage..piece.stage + piece.bytes];
            // SAFETY: the piece lies within the buffer, which this operation has for itself.
            let source = unsafe { std::slice::from_raw_parts(buffer.address().add(piece.host), piece.bytes) };
            target.copy_from_slice(source);
            self.stream.upload_part_later(
                host,
                piece.stage,
                device.slice(piece.stage..piece.stage + piece.bytes),
            )?;
        }
        let stage = self.stages[which].device.view().address();
        let (from, to) = (stage + chunk.from as u64, stage + chunk.to as u64);
        self.enqueue(doing, |group| group.push(kind, &self.stream, (from, to), chunk.count, buffer.dtype()))?;
        let Stage { host, device, done } = &mut self.stages[which];
        for piece in &chunk.take {
            let part = device.slice(piece.stage..piece.stage + piece.bytes);
            self.stream.download_part_later(part, host, piece.stage)?;
        }
        Ok(self.stream.record(done)?)
    }

    /// Waits for the chunk in stage `which`, if there is one, and takes what it brings.
    fn finish(&self, which: usize, chunk: Option<Chunk>, buffer: &Buffer, doing: &Doing) -> Result<()> {
        let Some(chunk) = chunk else { return Ok(()) };
        let Stage { host, done, .. } = &self.stages[which];
        self.link().device(|| done.is_done(), doing)?;
        for piece in &chunk.take {
            // SAFETY: the copies are over.
            let source = &unsafe { host.bytes() }[piece.stage..piece.stage + piece.bytes];
            // SAFETY: the piece lies within the buffer, which this operation has for itself.
            let target =
                unsafe { std::slice::from_raw_parts_mut(buffer.address().add(piece.host), piece.bytes) };
            target.copy_from_slice(source);
        }
        Ok(())
    }

    fn collective(
        &mut self,
        kind: Kind,
        operation: Operation,
        buffer: Buffer,
        op: Option<ReduceOp>,
        root: u32,
    ) -> Result<Pending> {
        // Where the buffer lies is this rank's own affair: there is no arena.
        let call = Call { root, op, ..Call::plain(operation, buffer.dtype(), buffer.len()) };
        self.run(kind, &call, Some(&buffer))?;
        Ok(Pending::complete(buffer))
    }

    fn check_rank(&self, operation: &'static str, rank: u32) -> Result<()> {
        if rank < self.device.size() {
            return Ok(());
        }
        invalid(operation, format!("there is no rank {rank} in a world of {}", self.device.size()))
    }

    fn check_peer(&self, operation: &'static str, rank: u32) -> Result<()> {
        self.check_rank(operation, rank)?;
        if rank != self.device.rank() {
            return Ok(());
        }
        invalid(operation, format!("rank {rank} cannot be its own peer"))
    }
}

impl Transport for HostCommunicator {
    fn rank(&self) -> u32 {
        self.device.rank()
    }

    fn size(&self) -> u32 {
        self.device.size()
    }

    fn backend(&self) -> &'static str {
        "nccl"
    }

    fn blame(&mut self, error: &Error) {
        self.link().membership.blame(error);
    }

    /// NCCL chooses by itself.
    fn set_algorithm(&mut self, _: Algorithm) {}

    /// Memory of this rank alone: peers reach none of it.
    fn allocate(&mut self, dtype: DType, len: usize) -> Result<Buffer> {
        self.link().check()?;
        let bytes = crate::comm::bytes_of(dtype, len)?;
        if let Some(problem) = memory::shortage(bytes.saturating_mul(self.device.size() as usize)) {
            return invalid("allocate", format!("{problem}, for each of {} ranks", self.device.size()));
        }
        Ok(Buffer::zeroed_of(dtype, len))
    }

    fn all_reduce(&mut self, buffer: Buffer, op: ReduceOp) -> Result<Pending> {
        self.collective(Kind::AllReduce(op), Operation::AllReduce, buffer, Some(op), 0)
    }

    fn reduce_scatter(&mut self, buffer: Buffer, op: ReduceOp) -> Result<Pending> {
        self.collective(Kind::ReduceScatter(op), Operation::ReduceScatter, buffer, Some(op), 0)
    }

    fn all_gather(&mut self, buffer: Buffer) -> Result<Pending> {
        self.collective(Kind::AllGather, Operation::AllGather, buffer, None, 0)
    }

    fn broadcast(&mut self, buffer: Buffer, root: u32) -> Result<Pending> {
        self.check_rank("broadcast", root)?;
        self.collective(Kind::Broadcast { root }, Operation::Broadcast, buffer, None, root)
    }

    fn reduce(&mut self, buffer: Buffer, op: ReduceOp, root: u32) -> Result<Pending> {
        self.check_rank("reduce", root)?;
        self.collective(Kind::Reduce { op, root }, Operation::Reduce, buffer, Some(op), root)
    }

    fn send(&mut self, buffer: Buffer, to: u32) -> Result<Pending> {
        self.check_peer("send", to)?;
        self.collective(Kind::Send { to }, Operation::Send, buffer, None, to)
    }

    fn recv(&mut self, buffer: Buffer, from: u32) -> Result<Pending> {
        self.check_peer("recv", from)?;
        self.collective(Kind::Recv { from }, Operation::Recv, buffer, None, from)
    }

    fn barrier(&mut self) -> Result<()> {
        let call = Call::plain(Operation::Barrier, DType::U8, 0);
        // Nobody has agreed before all have come.
        self.run(Kind::AllGather, &call, None)
    }
}
