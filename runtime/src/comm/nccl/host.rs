//! The transport for host buffers: every program that works on the CPU's communicators works on NCCL's.
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
use super::call::NcclOp;
use super::group::Group;
use super::link::{Link, WaitContext};
use super::staging::{Chunk, Transfer, exchange_chunks};
use crate::comm::call::{Call, Request, SegmentUpdate};
use crate::comm::exchange::Exchange;
use crate::comm::rules::FailureHandler;
use crate::comm::segments::{gather_segments, update_blocks};
use crate::comm::signature::{SIGNATURE_WORDS, Signature, describe};
use crate::comm::{Buffer, Capabilities, Communicator, DType, Transport};
use crate::{Error, Result, memory};

/// Bytes of a stage.
const STAGE: usize = 4 << 20;
/// Bytes of a signature in the agreement.
const WORDS: usize = SIGNATURE_WORDS * size_of::<u64>();

/// The transport of one rank of several.
pub(super) struct HostTransport {
    /// The first to go: freeing the memory below waits for the GPU, which may wait for a peer until the communicator ends.
    device: Arc<DeviceCommunicator>,
    stages: [Stage; 2],
    /// Every rank's signature.
    calls: Memory,
    calls_on_host: Pinned,
    stream: Stream,
    done: Event,
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

/// A communicator over that of the device, which has more than one rank.
pub(crate) fn host_communicator(device: Arc<DeviceCommunicator>) -> Result<Communicator> {
    let transport = HostTransport::new(device)?;
    let (rank, size, rules) = {
        let link = transport.link();
        (link.rank, link.size, Arc::clone(&link.rules))
    };
    Ok(Communicator::new(transport, rank, size, rules))
}

impl HostTransport {
    fn new(device: Arc<DeviceCommunicator>) -> Result<Self> {
        let gpu = device.device();
        let words = WORDS * device.size() as usize;
        Ok(HostTransport {
            stages: [Stage::new(gpu)?, Stage::new(gpu)?],
            calls: Memory::zeroed(gpu, DType::U8, words)?,
            calls_on_host: Pinned::zeroed(gpu, words)?,
            stream: Stream::new(gpu)?,
            done: Event::new(gpu)?,
            messages: vec![0; device.size() as usize],
            device,
        })
    }

    fn link(&self) -> &Link {
        self.device.link().expect("a world of one has another communicator")
    }

    /// What peers and errors are told of a request.
    fn context(&mut self, request: &Request<'_>, signature: &Signature) -> WaitContext {
        let call = &request.call;
        let peers = match call.peer() {
            Some(peer) => {
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

    /// Puts operations that begin together on the stream.
    fn enqueue<'a>(&'a self, context: &WaitContext, fill: impl FnOnce(&mut Group<'a>)) -> Result<()> {
        let mut group = Group::new(&self.device);
        fill(&mut group);
        self.link().answer(&self.link().owner.enqueue(group.calls), context)
    }

    /// Compares this rank's call with those of its peers.
    fn agree(&mut self, peer: Option<u32>, call: &Signature, context: &WaitContext) -> Result<()> {
        let own = self.link().rank as usize * WORDS;
        // SAFETY: the last agreement has been waited for, or has made the communicator unusable.
        let bytes = unsafe { self.calls_on_host.bytes_mut() };
        bytes[own..own + WORDS].copy_from_slice(cast_slice(&call.encode()));
        let slot = self.calls.slice(own..own + WORDS);
        self.stream.upload_part_later(&self.calls_on_host, own, slot)?;
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
        self.stream.download_later(self.calls.view(), &mut self.calls_on_host)?;
        self.stream.record(&self.done)?;
        self.link().device(|| self.done.is_done(), context)?;
        // SAFETY: the copy is over.
        let all = unsafe { self.calls_on_host.bytes() };
        for peer in &context.peers {
            let mut theirs = [0; SIGNATURE_WORDS];
            let at = *peer as usize * WORDS;
            cast_slice_mut(&mut theirs).copy_from_slice(&all[at..at + WORDS]);
            if theirs != call.counterpart(self.link().rank).encode() {
                let (rank, sequence) = (self.link().rank, context.sequence);
                let (ours, theirs) = (call.to_string(), describe(theirs));
                if call.is_collective() {
                    self.sync_mismatch(sequence);
                }
                return Err(Error::Mismatch { rank, peer: *peer, sequence, ours, theirs });
            }
        }
        Ok(())
    }

    /// All ranks learn of a disagreement, but not at once: an abort by one that knows already would take the news away from
    /// one that does not.
    fn sync_mismatch(&self, sequence: u32) {
        let link = self.link();
        let limit = link.timeout.min(Duration::from_secs(1));
        let _ = link.membership.store().barrier(&format!("{}/disagree-{sequence}", link.name), limit);
    }

    /// Moves the payload of one of NCCL's own operations through the stages.
    fn transfer(&mut self, kind: NcclOp, buffer: &Buffer, context: &WaitContext) -> Result<()> {
        let (rank, ranks) = (self.link().rank, self.link().size);
        let (len, element) = (buffer.len(), buffer.dtype().size());
        let transfer = Transfer { kind, rank, ranks, len, element, stage: STAGE };
        self.transfer_chunks(transfer.chunks(), buffer, buffer, context)
    }

    /// Moves messages between pairs of ranks through the stages.
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
            self.finish(turn, in_flight[turn].take(), to, context)?;
            self.begin(turn, &chunk, from, context)?;
            in_flight[turn] = Some(chunk);
            turn = 1 - turn;
        }
        for _ in 0..2 {
            self.finish(turn, in_flight[turn].take(), to, context)?;
            turn = 1 - turn;
        }
        Ok(())
    }

    /// Starts a chunk on its way through stage `which`, which is free.
    fn begin(&mut self, which: usize, chunk: &Chunk, buffer: &Buffer, context: &WaitContext) -> Result<()> {
        let Stage { host, device, .. } = &mut self.stages[which];
        for piece in &chunk.to_stage {
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
        self.enqueue(context, |group| {
            for call in &chunk.calls {
                let addresses = (stage + call.from as u64, stage + call.to as u64);
                group.push(call.kind, &self.stream, addresses, call.count, buffer.dtype());
            }
        })?;
        let Stage { host, device, done } = &mut self.stages[which];
        for piece in &chunk.from_stage {
            let part = device.slice(piece.stage..piece.stage + piece.bytes);
            self.stream.download_part_later(part, host, piece.stage)?;
        }
        Ok(self.stream.record(done)?)
    }

    /// Waits for the chunk in stage `which`, if there is one, and takes what it brings.
    fn finish(
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
            // SAFETY: the copies are over.
            let source = &unsafe { host.bytes() }[piece.stage..piece.stage + piece.bytes];
            // SAFETY: the piece lies within the buffer, which this operation has for itself.
            let target =
                unsafe { std::slice::from_raw_parts_mut(buffer.address().add(piece.host), piece.bytes) };
            target.copy_from_slice(source);
        }
        Ok(())
    }
}

/// The error or the abort of one of the two communicators is that of both.
impl FailureHandler for HostTransport {
    fn stop(&self) {
        self.link().stop();
    }

    fn abort(&self) {
        self.link().abort();
    }
}

impl Transport for HostTransport {
    fn backend(&self) -> &'static str {
        "nccl"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { shares_memory: false, sums_in_rank_order: false, device_buffers: true }
    }

    /// Memory of this rank alone: peers reach none of it.
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
        // Where the buffer lies is this rank's own affair: there is no arena.
        let signature = Signature::of(&request.call, &request.buffer).anywhere();
        let context = &self.context(request, &signature);
        let Request { call, buffer, .. } = request;
        self.agree(call.peer(), &signature, context)?;
        let (rank, ranks) = (self.link().rank, self.link().size);
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
                self.transfer(NcclOp::Broadcast { root }, buffer, context)?
            }
            (&mut Call::Reduce { op, root }, _) => {
                self.transfer(NcclOp::Reduce { op, root }, buffer, context)?
            }
            (&mut Call::Send { to }, _) => self.transfer(NcclOp::Send { to }, buffer, context)?,
            (&mut Call::Recv { from }, _) => self.transfer(NcclOp::Recv { from }, buffer, context)?,
            (Call::AllToAllV { from, .. }, Some(exchange)) => {
                let (own, at) = exchange.own.clone();
                buffer.copy_from(at, from, own);
                self.exchange(exchange, from, buffer, context)?;
            }
            (_, Some(exchange)) => self.exchange(exchange, buffer, buffer, context)?,
            (_, None) => unreachable!("all others consist of messages"),
        }
        Ok(())
    }
}
