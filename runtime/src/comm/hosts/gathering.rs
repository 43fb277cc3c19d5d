//! How the arrivals of ranks that share hosts travel: over the board of each house, and in bundles between hosts.
//!
//! A rank writes its arrival on the [`board`](super::board) of its house. The first rank of each run, its *leader*,
//! collects the arrivals of its run, sends them to leaders of other runs in one frame ([`bundle`](super::bundle),
//! [`dissemination`](super::dissemination)), and writes what it gets from them on the board. So messages grow with the
//! square of the hosts, or less, and not with that of the ranks. A run of one rank is its own leader, and has no board.
//!
//! All of a bundle have made the same call, because a leader compares before it sends. While a leader is late, the arrivals
//! of its run are not known elsewhere. So a rank that has waited for a while announces its call to all others: who has not
//! arrived is known then, as are calls that differ.
//!
//! A rank that has arrived may leave the collective, and even exit, before all others know of its arrival. Thus a wait
//! only fails because of ranks from which it gets something directly: the neighbours and the leader on the board, the
//! leaders that send to this one. What these have published or sent, they have before they leave.

use super::HostsTransport;
use super::arrivals::Arrival;
use super::bundle::{self, Entry};
use super::dissemination::{FEW_RUNS, carried, source, step};
use super::frame::{ARRIVAL_BYTES, FrameKind, Header, SMALL_BYTES};
use super::wait::Awaited;
use super::wire::BadFrame;
use super::{board, house::House};
use crate::Result;
use crate::comm::signature::{SIGNATURE_WORDS, Signature};

/// Most bytes that arrive for one rank with the arrivals of all others, unless there are many.
const PARTS_BYTES: usize = 256 << 10;

/// What of a house's board a wait watches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Watched {
    Nothing,
    /// That all have come to this barrier.
    Barrier(u32),
    /// That all have arrived at this collective.
    Arrivals(u32),
    /// That the leader knows all arrivals at this collective.
    Sheet(u32),
}

/// How far this rank is with the arrivals of the current collective.
#[derive(Debug, Default)]
pub(super) struct Gathering {
    /// They travel as this module says, and not from each rank to all others.
    is_bundled: bool,
    /// Where this rank's buffer is.
    location: u64,
    /// Number of bundles that this leader has sent.
    sent: usize,
    /// The sheet is written.
    is_published: bool,
    /// This rank has announced its call.
    is_announced: bool,
    /// Memory for a bundle.
    memory: Vec<u8>,
}

impl HostsTransport {
    /// Whether arrivals with the same contribution for all ranks travel over boards and in bundles.
    pub(super) fn bundles(&self) -> bool {
        !self.runs.are_single() || self.runs.count() > FEW_RUNS
    }

    /// The largest contribution for one rank that is sent with an arrival, in bytes: the same on all ranks. A receiver has
    /// memory for those of all others.
    pub(super) fn part_bytes(&self) -> usize {
        (PARTS_BYTES / self.members.size() as usize).clamp(SMALL_BYTES, ARRIVAL_BYTES)
    }

    /// The largest contribution for all ranks that is sent with an arrival, in bytes: the same on all ranks.
    pub(super) fn small_bytes(&self) -> usize {
        if self.runs.are_single() { SMALL_BYTES } else { board::most_bytes(self.members.size()) }
    }

    fn is_leader(&self) -> bool {
        self.runs.position_in_run() == 0
    }

    /// Arrives with a contribution for all ranks.
    pub(super) fn arrive(&mut self, call: &Signature, location: u64, payload: &[u8]) {
        let words = call.encode();
        if !self.bundles() {
            return self.arrive_directly(words, location, |_| payload);
        }
        let memory = std::mem::take(&mut self.gathering.memory);
        self.gathering = Gathering { is_bundled: true, location, memory, ..Gathering::default() };
        let payload = Some(payload.to_vec());
        let arrival = Arrival { sequence: self.sequence, call: words, location, payload };
        if let Some(House { board, memory, .. }) = &self.house {
            board.arrive(memory, &arrival);
            if !self.is_leader() && board.have_all_arrived(memory, self.sequence) {
                board.wake(memory, 0);
            }
        }
        if self.is_leader() {
            // It goes into bundles with the others.
            let own = &mut self.peers[self.members.rank() as usize].arrivals;
            own.note(arrival, self.sequence).expect("a rank knows where it is");
        }
    }

    /// Arrives with a contribution for each rank.
    pub(super) fn arrive_directly<'a>(
        &mut self,
        call: [u64; SIGNATURE_WORDS],
        location: u64,
        payload: impl Fn(u32) -> &'a [u8],
    ) {
        self.gathering.is_bundled = false;
        let header = Header::new(FrameKind::Arrival, self.sequence, call).with_argument(location);
        for peer in self.others() {
            self.wire.sender().queue(peer, header, payload(peer));
        }
    }

    /// What to watch on the board during a wait.
    pub(super) fn watched(&self, awaited: Awaited) -> Watched {
        match awaited {
            // A watch that is over would end every poll at once: what is left is to send what is queued.
            Awaited::House if self.has_unsent() && self.others().all(|peer| self.has_come_home(peer)) => {
                Watched::Nothing
            }
            Awaited::House => Watched::Barrier(self.barriers),
            Awaited::Arrivals if !self.gathering.is_bundled => Watched::Nothing,
            Awaited::Arrivals if !self.is_leader() => match self.has_all_arrivals() {
                true => Watched::Nothing,
                false => Watched::Sheet(self.sequence),
            },
            Awaited::Arrivals if !self.is_complete(self.runs.own()) => Watched::Arrivals(self.sequence),
            _ => Watched::Nothing,
        }
    }

    /// Whether all arrivals of these ranks at the current collective are known, with their contributions.
    fn is_complete(&self, mut ranks: std::ops::Range<u32>) -> bool {
        ranks.all(|rank| self.peers[rank as usize].arrivals.is_complete(self.sequence))
    }

    /// Whether the arrivals of all others are known, with their contributions.
    pub(super) fn has_all_arrivals(&self) -> bool {
        self.others().all(|peer| self.peers[peer as usize].arrivals.is_complete(self.sequence))
    }

    /// Does this rank's part in the gathering, as far as it can be done now.
    pub(super) fn gather(&mut self, awaited: Awaited, call: &Signature) -> Result<()> {
        if awaited != Awaited::Arrivals || !self.gathering.is_bundled {
            return Ok(());
        }
        if self.is_leader() { self.lead(call) } else { self.follow(call) }
    }

    fn lead(&mut self, call: &Signature) -> Result<()> {
        self.read_neighbours(call)?;
        let (own, runs) = (self.runs.position(), self.runs.count());
        while let Some(step) = step(self.gathering.sent, own, runs) {
            if !carried(step, own, runs).all(|run| self.is_complete(self.runs.run(run))) {
                return Ok(());
            }
            for run in carried(step, own, runs) {
                self.check_lengths(self.runs.run(run), call)?;
            }
            self.gathering.sent += 1;
            let to = self.runs.run(step.to).start;
            let header = Header::new(FrameKind::Bundle, self.sequence, call.encode());
            let mut memory = std::mem::take(&mut self.gathering.memory);
            let entries = carried(step, own, runs).flat_map(|run| self.entries(self.runs.run(run)));
            bundle::encode(entries, &mut memory, |payload| self.wire.sender().queue(to, header, payload));
            self.gathering.memory = memory;
        }
        if self.gathering.is_published || !self.is_complete(0..self.members.size()) {
            return Ok(());
        }
        self.check_lengths(0..self.members.size(), call)?;
        self.gathering.is_published = true;
        if let Some(House { board, memory, ranks, .. }) = &self.house {
            let others = self.entries(0..ranks.start).chain(self.entries(ranks.end..self.members.size()));
            board.publish(memory, self.sequence, others);
            board.wake_all(memory);
        }
        Ok(())
    }

    /// The arrivals of ranks, which are complete.
    fn entries(&self, ranks: std::ops::Range<u32>) -> impl Iterator<Item = Entry<'_>> {
        ranks.filter_map(|rank| {
            let arrival = self.peers[rank as usize].arrivals.at(self.sequence)?;
            Some(Entry { rank, location: arrival.location, payload: arrival.payload.as_deref()? })
        })
    }

    fn follow(&mut self, call: &Signature) -> Result<()> {
        let Some(House { board, memory, ranks, .. }) = &self.house else { return Ok(()) };
        if !board.is_published(memory, self.sequence) {
            return Ok(());
        }
        let ranks = ranks.clone();
        self.read_neighbours(call)?;
        for rank in (0..ranks.start).chain(ranks.end..self.members.size()) {
            let House { board, memory, .. } = self.house.as_ref().expect("it has a board");
            let noted = board.published(memory, self.sequence, rank).and_then(|(location, payload)| {
                // The leader has compared calls, and this rank that of the leader.
                let (sequence, call) = (self.sequence, call.encode());
                if self.peers[rank as usize].arrivals.is_complete(sequence) {
                    return Ok(());
                }
                self.note_arrival(rank, Arrival { sequence, call, location, payload: Some(payload) })
            });
            noted.map_err(|problem| self.bad_frame(BadFrame { from: ranks.start, problem }, call))?;
        }
        Ok(())
    }

    /// Reads what is new on the board of the arrivals of this rank's house.
    pub(super) fn read_neighbours(&mut self, call: &Signature) -> Result<()> {
        let Some(ranks) = self.house.as_ref().map(|house| house.ranks.clone()) else { return Ok(()) };
        let mut any = false;
        let own = self.members.rank();
        for rank in ranks.clone().filter(|rank| *rank != own) {
            if self.peers[rank as usize].arrivals.is_complete(self.sequence) {
                continue;
            }
            let House { board, memory, .. } = self.house.as_ref().expect("it has a board");
            let read = board.arrival(memory, (rank - ranks.start) as usize, self.sequence);
            let noted = read.and_then(|arrival| {
                any |= arrival.is_some();
                arrival.map_or(Ok(()), |arrival| self.note_arrival(rank, arrival))
            });
            noted.map_err(|problem| self.bad_frame(BadFrame { from: rank, problem }, call))?;
        }
        if any { self.check_calls(call) } else { Ok(()) }
    }

    /// The ranks from which a wait for arrivals gets something that is missing; `None` if that are the absent ones.
    pub(super) fn sources(&self, awaited: Awaited) -> Option<Vec<u32>> {
        if awaited != Awaited::Arrivals || !self.gathering.is_bundled {
            return None;
        }
        let own = self.runs.own();
        let is_missing = |rank: &u32| !self.peers[*rank as usize].arrivals.is_complete(self.sequence);
        let neighbours = own.clone().filter(|rank| *rank != self.members.rank());
        let mut sources: Vec<u32> = neighbours.filter(is_missing).collect();
        for run in (0..self.runs.count()).filter(|run| *run != self.runs.position()) {
            if !self.is_complete(self.runs.run(run)) {
                let from = source(run, self.runs.position(), self.runs.count());
                sources.push(if self.is_leader() { self.runs.run(from).start } else { own.start });
            }
        }
        sources.sort_unstable();
        sources.dedup();
        Some(sources)
    }

    /// Tells all other ranks this rank's call, once. Returns whether it has done so now.
    pub(super) fn announce(&mut self, call: &Signature) -> bool {
        let is_in_arrival = self.waiting.is_some_and(|wait| wait.awaited == Awaited::Arrivals);
        let is_due = is_in_arrival && self.gathering.is_bundled;
        if !is_due || std::mem::replace(&mut self.gathering.is_announced, true) {
            return false;
        }
        let header = Header::new(FrameKind::Announcement, self.sequence, call.encode())
            .with_argument(self.gathering.location);
        for peer in self.others() {
            self.wire.sender().queue(peer, header, &[]);
        }
        true
    }

    /// Handles arrivals of several ranks, from the leader `from`.
    ///
    /// # Errors
    /// If they are invalid, or not for this rank.
    pub(super) fn receive_bundle(
        &mut self,
        from: u32,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), String> {
        if !self.bundles() || !self.is_leader() {
            return Err("a bundle for a rank that leads no run".into());
        }
        for entry in bundle::decode(payload) {
            let Entry { rank, location, payload } = entry?;
            if !self.gets_from(rank, from) {
                return Err(format!("an arrival of rank {rank}"));
            }
            if payload.len() > self.small_bytes() {
                return Err(self.long_contribution(rank, payload.len()));
            }
            let (sequence, call, payload) = (header.sequence, header.call, Some(payload.to_vec()));
            self.note_arrival(rank, Arrival { sequence, call, location, payload })?;
        }
        Ok(())
    }

    /// Whether this leader gets the arrival of `rank` in bundles of `from`.
    fn gets_from(&self, rank: u32, from: u32) -> bool {
        if rank >= self.members.size() {
            return false;
        }
        let (run, own) = (self.runs.index_of(rank), self.runs.position());
        run != own && self.runs.run(source(run, own, self.runs.count())).start == from
    }

    fn long_contribution(&self, rank: u32, bytes: usize) -> String {
        format!("a contribution of {bytes} bytes of rank {rank}; the maximum is {}", self.small_bytes())
    }

    /// Checks that the contributions of ranks have room in a bundle and on a sheet: a rank may have sent its own directly,
    /// where they may be larger.
    fn check_lengths(&self, ranks: std::ops::Range<u32>, call: &Signature) -> Result<()> {
        let (own, most) = (self.members.rank(), self.small_bytes());
        match self.entries(ranks).find(|entry| entry.rank != own && entry.payload.len() > most) {
            None => Ok(()),
            Some(Entry { rank, payload, .. }) => {
                let problem = self.long_contribution(rank, payload.len());
                Err(self.bad_frame(BadFrame { from: rank, problem }, call))
            }
        }
    }
}
