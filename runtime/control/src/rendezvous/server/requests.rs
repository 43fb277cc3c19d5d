//! The requests of admitted ranks: the key/value store, barriers, and goodbyes.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use super::{Server, ServerEvent};
use crate::progress::{Ending, RankState};
use crate::rendezvous::message::{MAX_VALUE, Reply, Request, check_name, shortened};
use crate::rendezvous::waits::WaitFor;

impl Server {
    /// Handles a message of a peer. Its error, as a predicate, closes the connection.
    pub(super) fn handle(&mut self, index: usize, request: Request) -> Result<(), String> {
        let id = self.peers[index].id;
        let Some(rank) = self.peers[index].rank else { return self.hello(index, request) };
        if !self.peers[index].admitted || self.waits.has(id) {
            return Err("sent a request before its last one was answered".into());
        }
        match request {
            Request::Hello { .. } => return Err("said hello twice".into()),
            Request::Set { key, value, fds, readers } => {
                let fds = self.peers[index].connection.take_fds(fds)?;
                if value.len() > MAX_VALUE {
                    return Err(format!("a value of {} bytes; the maximum is {MAX_VALUE}", value.len()));
                }
                check_name(&key)?;
                match self.entries.set(rank, key.clone(), value, fds, readers) {
                    Ok(()) => self.answer(id, &Reply::Done, &[]),
                    Err(why) => self.answer(id, &Reply::Denied { why }, &[]),
                }
                self.wake_readers(&key);
                self.wake_remote_readers(&key);
            }
            Request::Get { key, from, timeout_ms } if self.is_remote(from) => {
                check_name(&key)?;
                self.get_from_other_node(id, rank, key, from, timeout_ms);
            }
            Request::Get { key, from, timeout_ms } => {
                check_name(&key)?;
                match self.check_get(rank, &key, from) {
                    Ok(()) => {
                        self.wait(id, WaitFor::Key { key: key.clone(), from }, timeout_ms);
                        self.wake_readers(&key);
                    }
                    Err(reply) => self.answer(id, &reply, &[]),
                }
            }
            Request::Barrier { name, ranks, timeout_ms } => {
                check_name(&name)?;
                match self.check_barrier(rank, ranks.as_deref()) {
                    Ok(()) if self.is_over_nodes(ranks.as_deref()) => {
                        self.enter_remote_barrier(id, rank, name, ranks, timeout_ms);
                    }
                    Ok(()) => {
                        let ranks = ranks.unwrap_or_else(|| (0..self.world_size()).collect());
                        let barrier = WaitFor::Barrier { name: name.clone(), rank, ranks: ranks.clone() };
                        self.wait(id, barrier, timeout_ms);
                        for peer in self.waits.take_barrier(&name, &ranks) {
                            self.answer(peer, &Reply::Done, &[]);
                        }
                    }
                    Err(reply) => self.answer(id, &reply, &[]),
                }
            }
            Request::Stop => {
                self.answer(id, &Reply::Done, &[]);
                if self.ask_to_stop() {
                    self.events.push(ServerEvent::StopAsked { rank });
                }
            }
            Request::Leave => {
                self.page.record_end(rank, Ending::Left);
                self.announce_goodbye(rank);
                self.answer(id, &Reply::Done, &[]);
                self.fail_waiters_for(rank);
                self.events.push(ServerEvent::Left { rank });
            }
        }
        Ok(())
    }

    /// Checks that `rank` may wait for a key of rank `from`; else the reply.
    fn check_get(&self, rank: u32, key: &str, from: u32) -> Result<(), Reply> {
        if from >= self.world_size() {
            let why = format!("rank {rank} waits for rank {from} in a world of {}", self.world_size());
            return Err(Reply::Denied { why });
        }
        if self.entries.contains(key) { Ok(()) } else { self.check_not_ended(|needed| needed == from) }
    }

    /// Checks that `rank` may wait in a barrier of `ranks` (`None`: of all); else the reply.
    fn check_barrier(&self, rank: u32, ranks: Option<&[u32]>) -> Result<(), Reply> {
        let Some(ranks) = ranks else { return self.check_not_ended(|_| true) };
        if !ranks.contains(&rank) || ranks.iter().any(|rank| *rank >= self.world_size()) {
            let why = format!("rank {rank} in a barrier of ranks {ranks:?} of {}", self.world_size());
            return Err(Reply::Denied { why: shortened(&why) });
        }
        self.check_not_ended(|needed| ranks.contains(&needed))
    }

    /// True if a barrier has participants on other nodes.
    fn is_over_nodes(&self, ranks: Option<&[u32]>) -> bool {
        match ranks {
            None => !self.layout.is_one_host(),
            Some(ranks) => ranks.iter().any(|rank| self.is_remote(*rank)),
        }
    }

    /// Checks that no needed rank has ended, and that no rank at all has failed; else the reply.
    pub(super) fn check_not_ended(&self, is_needed: impl Fn(u32) -> bool) -> Result<(), Reply> {
        let is_lost = |rank: &u32| match self.page.state(*rank) {
            RankState::Failed => true,
            RankState::Left => is_needed(*rank),
            _ => false,
        };
        // A rank of this node may have recorded its failure itself; those of other nodes were announced.
        let ended = self.layout.local_ranks().chain(self.remote_ended.iter().copied());
        match ended.filter(is_lost).min() {
            None => Ok(()),
            Some(peer) => Err(Reply::PeerGone { peer, how: self.page.end_description(peer) }),
        }
    }

    pub(super) fn wait(&mut self, peer: u64, what: WaitFor, timeout_ms: u64) {
        let timeout = Duration::from_millis(timeout_ms.min(1 << 40));
        self.waits.add(peer, what, Instant::now() + timeout);
    }

    /// Sends the value of `key` to the ranks that wait for it, until it has been read often enough.
    fn wake_readers(&mut self, key: &str) {
        while self.entries.contains(key)
            && let Some(reader) = self.waits.take_reader(key)
            && let Some((value, fds)) = self.entries.read(key)
        {
            let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
            self.answer(reader, &Reply::Value { value, fds: fds.len() as u32 }, &fds);
        }
    }
}
