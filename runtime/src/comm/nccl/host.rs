//! The transport for host buffers on NCCL, so that programs for CPU communicators run unchanged.
//!
//! An operation begins with an agreement: NCCL gathers the signatures of all ranks' calls, which have a fixed size.
//! So all ranks detect a mismatch and know which rank differs, instead of waiting for each other. The payload is then
//! copied in chunks through pinned memory and GPU memory, with two chunks in flight.
//!
//! The two ranks of a message agree with each other. If one of them is in a collective instead, there is no
//! agreement: the rank in the collective detects that by the records on the progress page (`Link::unmet_message`).

use std::sync::Arc;
use std::time::Duration;

use bytemuck::{cast_slice, cast_slice_mut};
use mgpu_kernels::cuda::{Device, Event, Memory, Pinned, Stream};

use super::DeviceCommunicator;
use super::call::NcclOp;
use super::group::Group;
use super::link::{Link, WaitContext};
use super::staging::{Chunk, Transfer, exchange_chunks};
use crate::comm::call::{Call, Request, SegmentUpdate};
use crate::comm::exchange::Exchange;
use crate::comm::rules::{FailureHandler, Rules};
use crate::comm::segments::{gather_segments, update_blocks};
use crate::comm::signature::{SIGNATURE_WORDS, Signature, describe};
use crate::comm::split::SplitGroup;
use crate::comm::{Buffer, Capabilities, Communicator, DType, Transport};
use crate::{Error, Result, memory};

/// Size of a stage in bytes.
const STAGE: usize = 4 << 20;
/// Size of an encoded signature in bytes.
const WORDS: usize = SIGNATURE_WORDS * size_of::<u64>();

/// The transport of one rank, in a world of several.
pub(super) struct HostTransport {
    /// Dropped first: freeing the memory below waits for the GPU, which may wait for a peer until the communicator
    /// ends.
    device: Arc<DeviceCommunicator>,
    stages: [Stage; 2],
    /// Every rank's signature.
    calls: Memory,
    calls_on_host: Pinned,
    stream: Stream,
    done: Event,
    /// Number of messages begun with each rank of the world.
    messages: Vec<u32>,
}

/// Staging memory for one chunk.
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

/// A communicator for host buffers over the device's communicator, in a world of several ranks.
pub(crate) fn host_communicator(device: Arc<DeviceCommunicator>) -> Result<Communicator> {
    let transport = HostTransport::new(device)?;
    let (members, rules) = {
        let link = transport.link();
        (link.members.clone(), Arc::clone(&link.rules))
    };
    Ok(Communicator::new(transport, members, rules))
}

impl HostTransport {
    fn new(device: Arc<DeviceCommunicator>) -> Result<Self> {
        let gpu = device.device();
        let words = WORDS * device.size() as usize;
        let world_size = device.link().map_or(1, |link| link.membership.page().world_size());
        Ok(HostTransport {
            stages: [Stage::new(gpu)?, Stage::new(gpu)?],
            calls: Memory::zeroed(gpu, DType::U8, words)?,
            calls_on_host: Pinned::zeroed(gpu, words)?,
            stream: Stream::new(gpu)?,
            done: Event::new(gpu)?,
            messages: vec![0; world_size as usize],
            device,
        })
    }

    fn link(&self) -> &Link {
        self.device.link().expect("a world of one has another communicator")
    }

    /// Describes a request for the progress page and for errors.
    fn context(&mut self, request: &Request<'_>, signature: &Signature) -> WaitContext {
        let call = &request.call;
        let peers = match call.peer() {
            Some(peer) => {
                let peer = self.link().members.world_rank(peer);
                self.messages[peer as usize] += 1;
                vec![peer]
            }
            None => {
                self.link().membership.collectives.count_collective(self.link().number);
                self.link().peers()
            }
        };
        WaitContext {
            operation: call.operation(),
            sequence: request.number,
            bytes: request.call.bytes(&request.buffer),
            text: signature.to_string(),
            peers,
            messages: Some(self.messages.clone()),
        }
    }

    /// Enqueues operations as one group.
    fn enqueue<'a>(&'a self, context: &WaitContext, fill: impl FnOnce(&mut Group<'a>)) -> Result<()> {
        let mut group = Group::new(&self.device);
        fill(&mut group);
        self.link().answer(&self.link().owner.enqueue(group.calls), context)
    }

    /// Compares this rank's call with those of its peers.
    fn agree(&mut self, peer: Option<u32>, call: &Signature, context: &WaitContext) -> Result<()> {
        let rank = self.link().members.rank();
        let own = rank as usize * WORDS;
        // SAFETY: the previous agreement has ended, or has poisoned the communicator.
        let bytes = unsafe { self.calls_on_host.bytes_mut() };
        bytes[own..own + WORDS].copy_from_slice(cast_slice(&call.encode()));
        let slot = self.calls.slice(own..own + WORDS);
        self.stream.enqueue_upload_part(&self.calls_on_host, own, slot)?;
        self.enqueue(context, |group| match peer {
            Some(peer) => {
                let theirs = self.calls.slice(peer as usize * WORDS..(peer as usize + 1) * WORDS).address();
                let (send, recv) = (NcclOp::Send { to: peer }, NcclOp::Recv { from: peer });
                group.push(send, &self.stream, (slot.address(), 0), WORDS, DType::U8);
                group.push(recv, &self.stream, (0, theirs), WORDS, DType::U8);
            }
            None => {
                let all = self.calls.view().address();
                group.push(NcclOp::AllGather, &self.stream, (slot.address(), all), WORDS, DType::U8);
            }
        })?;
        self.stream.enqueue_download(self.calls.view(), &mut self.calls_on_host)?;
        self.stream.record(&self.done)?;
        self.link().device(|| self.done.is_done(), context)?;
        // SAFETY: the copy has ended.
        let all = unsafe { self.calls_on_host.bytes() };
        let compared = peer.map_or(0..self.link().members.size(), |peer| peer..peer + 1);
        for peer in compared.filter(|peer| *peer != rank) {
            let mut theirs = [0; SIGNATURE_WORDS];
            let at = peer as usize * WORDS;
            cast_slice_mut(&mut theirs).copy_from_slice(&all[at..at + WORDS]);
            if theirs != call.counterpart(rank).encode() {
                let (link, sequence) = (self.link(), context.sequence);
                if call.is_collective() {
                    self.sync_mismatch(sequence);
                }
                let peer = link.members.world_rank(peer);
                return Err(link.mismatch(peer, sequence, call.to_string(), describe(theirs)));
            }
        }
        Ok(())
    }

    /// Waits until all ranks have seen a mismatch: an abort by the first one could prevent the others from reading
    /// the signatures.
    fn sync_mismatch(&self, sequence: u32) {
        let link = self.link();
        let limit = link.timeout.min(Duration::from_secs(1));
        let name = format!("{}/disagree-{sequence}", link.key);
        let _ = link.membership.store().barrier_of(&name, link.members.world_ranks(), limit);
    }

    /// Transfers the payload of an operation that NCCL has.
    fn transfer(&mut self, kind: NcclOp, buffer: &Buffer, context: &WaitContext) -> Result<()> {
        let (rank, ranks) = (self.device.rank(), self.device.size());
        let (len, element) = (buffer.len(), buffer.dtype().size());
        let transfer = Transfer { kind, rank, ranks, len, element, stage: STAGE };
        self.transfer_chunks(transfer.chunks(), buffer, buffer, context)
    }

    /// Transfers messages between pairs of ranks.
    fn exchange(
        &mut self,
        exchange: &Exchange,
        from: &Buffer,
        to: &Buffer,
        context: &WaitContext,
    ) -> Result<()> {
        self.transfer_chunks(exchange_chunks(exchange, to.dtype().size(), STAGE), from, to, context)
    }

    fn transfer_chunks(
        &mut self,
        chunks: impl Iterator<Item = Chunk>,
        from: &Buffer,
        to: &Buffer,
        context: &WaitContext,
    ) -> Result<()> {
        let mut in_flight: [Option<Chunk>; 2] = [None, None];
        let mut turn = 0;
        for chunk in chunks {
            self.finish_chunk(turn, in_flight[turn].take(), to, context)?;
            self.begin_chunk(turn, &chunk, from, context)?;
            in_flight[turn] = Some(chunk);
            turn = 1 - turn;
        }
        for _ in 0..2 {
            self.finish_chunk(turn, in_flight[turn].take(), to, context)?;
            turn = 1 - turn;
        }
        Ok(())
    }

    /// Starts the transfer of a chunk through stage `which`, which must be free.
    fn begin_chunk(
        &mut self,
        which: usize,
        chunk: &Chunk,
        buffer: &Buffer,
        context: &WaitContext,
    ) -> Result<()> {
        let Stage { host, device, .. } = &mut self.stages[which];
        for piece in &chunk.to_stage {
            // SAFETY: the stage is free: its last chunk has ended.
            let target = &mut unsafe { host.bytes_mut() }[piece.stage..piece.stage + piece.bytes];
            // SAFETY: the piece is within the buffer, which this operation owns.
            let source = unsafe { std::slice::from_raw_parts(buffer.address().add(piece.host), piece.bytes) };
            target.copy_from_slice(source);
            self.stream.enqueue_upload_part(
                host,
                piece.stage,
                device.slice(piece.stage..piece.stage + piece.bytes),
            )?;
        }
        let stage = self.stages[which].device.view().address();
        self.enqueue(context, |group| {
            for call in &chunk.calls {
                let addresses = (stage + call.from as u64, stage + call.to as u64);
                group.push(call.kind, &self.stream, addresses, call.count, buffer.dtype());
            }
        })?;
        let Stage { host, device, done } = &mut self.stages[which];
        for piece in &chunk.from_stage {
            let part = device.slice(piece.stage..piece.stage + piece.bytes);
            self.stream.enqueue_download_part(part, host, piece.stage)?;
        }
        Ok(self.stream.record(done)?)
    }

    /// Waits for the chunk in stage `which`, if there is one, and copies its results to the buffer.
    fn finish_chunk(
        &self,
        which: usize,
        chunk: Option<Chunk>,
        buffer: &Buffer,
        context: &WaitContext,
    ) -> Result<()> {
        let Some(chunk) = chunk else { return Ok(()) };
        let Stage { host, done, .. } = &self.stages[which];
        self.link().device(|| done.is_done(), context)?;
        for piece in &chunk.from_stage {
            // SAFETY: the copies have ended.
            let source = &unsafe { host.bytes() }[piece.stage..piece.stage + piece.bytes];
            // SAFETY: the piece is within the buffer, which this operation owns.
            let target =
                unsafe { std::slice::from_raw_parts_mut(buffer.address().add(piece.host), piece.bytes) };
            target.copy_from_slice(source);
        }
        Ok(())
    }
}

/// The two communicators fail and abort together.
impl FailureHandler for HostTransport {
    fn stop(&self) {
        self.link().stop();
    }

    fn abort(&self) {
        self.link().abort();
    }
}

impl Transport for HostTransport {
    fn connect_group(&mut self, group: &SplitGroup, rules: Rules) -> Result<Communicator> {
        host_communicator(Arc::new(self.device.connect_group(group, rules)?))
    }

    fn connect_no_group(&mut self) -> Result<()> {
        self.device.connect_no_group()
    }

    fn backend(&self) -> &'static str {
        "nccl"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            shares_memory: false,
            sums_in_rank_order: false,
            device_buffers: true,
            shares_cores: false,
            crosses_network: false,
        }
    }

    /// Memory of this rank only; peers cannot access it.
    fn allocate(&mut self, dtype: DType, len: usize) -> Result<Buffer> {
        let ranks = self.device.size();
        if let Some(problem) = memory::shortage((len * dtype.size()).saturating_mul(ranks as usize)) {
            let problem = format!("{problem}, for each of {ranks} ranks");
            return Err(Error::InvalidArgument { operation: "allocate", problem });
        }
        Ok(Buffer::zeroed_of(dtype, len))
    }

    /// Agreement, then the payload.
    fn submit(&mut self, request: &mut Request<'_>) -> Result<()> {
        // The signature ignores the buffer's location: there are no arenas.
        let signature = Signature::of(&request.call, &request.buffer).without_location();
        let context = &self.context(request, &signature);
        let Request { call, buffer, .. } = request;
        self.agree(call.peer(), &signature, context)?;
        let (rank, ranks) = (self.device.rank(), self.device.size());
        let exchange = Exchange::of(call, rank, ranks, buffer.len());
        match (call, &exchange) {
            (Call::Barrier, _) => {}
            (&mut Call::AllReduce(op), _) => self.transfer(NcclOp::AllReduce(op), buffer, context)?,
            (&mut Call::ReduceScatter(op), _) => self.transfer(NcclOp::ReduceScatter(op), buffer, context)?,
            (Call::AllGather, _) => self.transfer(NcclOp::AllGather, buffer, context)?,
            (Call::UpdateAllGather(SegmentUpdate { segments, block, update }), _) => {
                let updated =
                    update_blocks(buffer.take(), segments, (ranks, rank), *block, *update, |_, _| ());
                *buffer = gather_segments(updated, segments, |segment| {
                    self.transfer(NcclOp::AllGather, &segment, context).map(|()| segment)
                })?;
            }
            (&mut Call::Broadcast { root }, _) => {
                self.transfer(NcclOp::Broadcast { root }, buffer, context)?;
            }
            (&mut Call::Reduce { op, root, .. }, _) => {
                self.transfer(NcclOp::Reduce { op, root }, buffer, context)?;
            }
            (&mut Call::Send { to }, _) => self.transfer(NcclOp::Send { to }, buffer, context)?,
            (&mut Call::Recv { from }, _) => self.transfer(NcclOp::Recv { from }, buffer, context)?,
            (Call::AllToAllV { from, .. }, Some(exchange)) => {
                let (own, at) = exchange.own.clone();
                buffer.copy_from(at, from, own);
                self.exchange(exchange, from, buffer, context)?;
            }
            (Call::SendRecv { from, .. }, Some(exchange)) => {
                self.exchange(exchange, from, buffer, context)?;
            }
            (_, Some(exchange)) => self.exchange(exchange, buffer, buffer, context)?,
            (_, None) => unreachable!("all others consist of messages"),
        }
        Ok(())
    }
}
