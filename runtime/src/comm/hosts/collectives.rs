//! Collectives without a reduction.

use std::ops::Range;

use mgpu_kernels::copy::copy;

use super::HostsTransport;
use super::moves::{Moves, Relayed, carve};
use super::transfer::Transfer;
use super::wait::Awaited;
use crate::Result;
use crate::comm::Buffer;
use crate::comm::call::{Call, SegmentUpdate};
use crate::comm::exchange::Exchange;
use crate::comm::segments::update_blocks;
use crate::comm::signature::Signature;

/// Whether parts are sent with the arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Small {
    /// All ranks need the same ones.
    ForAll,
    /// Each rank needs others.
    ForEach,
    /// They are too large.
    No,
}

impl HostsTransport {
    /// Executes a call in which every part of the result is a part of one rank's buffer.
    pub(super) fn move_parts(&mut self, call: &mut Call<'_>, buffer: &mut Buffer) -> Result<()> {
        let signature = Signature::of(call, buffer).without_location();
        let (rank, ranks) = (self.members.rank(), self.members.size());
        let moves = Moves::of(call, (rank, ranks), buffer.len()).expect("neither a reduction nor a message");
        let same_for_all = matches!(
            call,
            Call::AllGather
                | Call::AllGatherV { .. }
                | Call::UpdateAllGather(_)
                | Call::Broadcast { .. }
                | Call::Barrier
        );
        let small = match (moves.longest * buffer.dtype().size(), same_for_all) {
            (bytes, true) if bytes <= self.small_bytes() => Small::ForAll,
            (bytes, false) if bytes <= self.part_bytes() => Small::ForEach,
            _ => Small::No,
        };
        let relayed = small == Small::No && same_for_all && !self.runs.are_single();
        match call {
            Call::UpdateAllGather(SegmentUpdate { segments, block, update }) => {
                *buffer = update_blocks(buffer.take(), segments, (ranks, rank), *block, *update, |_, _| ());
                match relayed {
                    true => self.relay(&signature, moves, buffer),
                    false => self.execute(&signature, &moves, None, small, buffer),
                }
            }
            _ if relayed => self.relay(&signature, moves, buffer),
            &mut Call::AllToAllV { from, .. } => {
                let exchange = Exchange::of(call, rank, ranks, buffer.len());
                let (own, at) = exchange.expect("a call that consists of messages").own;
                buffer.copy_from(at, from, own);
                self.execute(&signature, &moves, Some(from.as_bytes()), small, buffer)
            }
            // Every part is sent and replaced.
            Call::AllToAll => {
                let sent = buffer.as_bytes().to_vec();
                self.execute(&signature, &moves, Some(&sent), small, buffer)
            }
            _ => self.execute(&signature, &moves, None, small, buffer),
        }
    }

    /// Transfers the parts from `source`, or from the buffer itself. Small ones are sent with the arrival.
    fn execute(
        &mut self,
        call: &Signature,
        moves: &Moves,
        source: Option<&[u8]>,
        small: Small,
        buffer: &mut Buffer,
    ) -> Result<()> {
        let element = buffer.dtype().size();
        let in_bytes = |range: &std::ops::Range<usize>| range.start * element..range.end * element;
        let targets: Vec<_> = moves.receive.iter().map(|(_, range)| in_bytes(range)).collect();
        let mut carved = carve(buffer.as_bytes_mut(), &targets);
        let sources: Vec<(u32, &[u8])> = moves
            .send
            .iter()
            .map(|(to, range)| {
                let range = in_bytes(range);
                (*to, source.map_or_else(|| carved.read(&range), |source| &source[range.clone()]))
            })
            .collect();
        let targets = moves.receive.iter().map(|(from, _)| *from).zip(std::mem::take(&mut carved.written));
        if small != Small::No {
            let payloads = self.enter_with_parts(call, small, &sources)?;
            let mut rest: Vec<&[u8]> = payloads.iter().map(Vec::as_slice).collect();
            for (from, target) in targets {
                let payload = &mut rest[from as usize];
                let part = payload.split_off(..target.len()).ok_or_else(|| self.short_payload(from))?;
                target.copy_from_slice(part);
            }
            return Ok(());
        }
        self.enter(call, &[])?;
        let mut transfer = self.transfer(call);
        sources.into_iter().for_each(|(to, part)| transfer.send(to, part));
        targets.for_each(|(from, part)| transfer.receive(from, part));
        self.wait(Awaited::Transfer, call, &mut transfer)
    }

    /// Transfers parts that all ranks need: each enters a host once, and is copied there to the buffers of its ranks, if
    /// they share memory.
    fn relay(&mut self, call: &Signature, moves: Moves, buffer: &Buffer) -> Result<()> {
        let location = self.location(buffer);
        self.enter_at(call, location, &[])?;
        let in_place: Vec<bool> = (0..self.runs.count()).map(|run| self.is_in_place(run, location)).collect();
        let buffers = self.buffers_of_run(buffer).unwrap_or_default();
        let Relayed { moves, copies } = moves.relayed(&self.runs, &in_place);
        let (element, own) = (buffer.dtype().size(), buffer.address());
        let part = |range: &Range<usize>| (own.wrapping_add(range.start * element), range.len() * element);
        let mut transfer = self.transfer(call);
        for (to, range) in &moves.send {
            let (begin, bytes) = part(range);
            // SAFETY: nobody writes to the parts that are sent before the operation is over.
            transfer.send(*to, unsafe { std::slice::from_raw_parts(begin, bytes) });
        }
        for (from, range) in &moves.receive {
            let (begin, bytes) = part(range);
            // SAFETY: parts of different ranks are disjoint, and only this rank writes to those that it receives.
            transfer.receive(*from, unsafe { std::slice::from_raw_parts_mut(begin, bytes) });
        }
        let copy_to_others = |range: &Range<usize>| {
            let (begin, bytes) = part(range);
            for buffer in buffers.iter().filter(|buffer| **buffer != own) {
                let target = buffer.wrapping_add(range.start * element);
                // SAFETY: all ranks of the run have arrived with buffers of this length; only this rank writes to this part
                // of them before the operation is over; buffers of different ranks do not overlap.
                unsafe { copy(begin.cast_const(), target, bytes) };
            }
        };
        self.advance(call, &mut transfer)?;
        copies.iter().for_each(copy_to_others);
        self.wait(Awaited::Transfer, call, &mut transfer)?;
        moves.receive.iter().for_each(|(_, range)| copy_to_others(range));
        self.house_barrier(call)
    }

    /// Arrives with all parts for each rank.
    fn enter_with_parts(
        &mut self,
        call: &Signature,
        small: Small,
        parts: &[(u32, &[u8])],
    ) -> Result<Vec<Vec<u8>>> {
        let of = |rank: u32| parts.iter().filter(move |(to, _)| *to == rank).map(|(_, part)| *part);
        if small == Small::ForAll {
            let joined: Vec<&[u8]> = self.others().next().into_iter().flat_map(of).collect();
            return self.enter(call, &joined.concat());
        }
        // Most calls have one part for each rank, which needs no copy.
        let joined: Vec<Vec<u8>> = (0..self.members.size())
            .map(|rank| if of(rank).count() > 1 { of(rank).collect::<Vec<_>>().concat() } else { Vec::new() })
            .collect();
        self.enter_for_each(call, |rank| {
            let joined = &joined[rank as usize];
            if joined.is_empty() { of(rank).find(|part| !part.is_empty()).unwrap_or(&[]) } else { joined }
        })
    }

    /// A transfer of the current collective.
    pub(super) fn transfer<'a>(&self, call: &Signature) -> Transfer<'a> {
        let words = call.encode();
        Transfer::new(self.members.size(), self.sequence, words, words)
    }
}
