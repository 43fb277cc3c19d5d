//! The key/value store and the barriers over several nodes, as one node's server sees them.

use crate::nodes::RelayMessage;
use crate::rendezvous::message::{MAX_VALUE, Reply, shortened};
use crate::rendezvous::rank_list;
use crate::rendezvous::remote_readers::RemoteReader;
use crate::rendezvous::server::Server;
use crate::rendezvous::waits::WaitFor;

impl Server {
    /// Asks the node of `from` for a value, unless it has arrived already.
    pub(in crate::rendezvous::server) fn get_from_other_node(
        &mut self,
        peer: u64,
        rank: u32,
        key: String,
        from: u32,
        timeout_ms: u64,
    ) {
        if let Some((value, _)) = self.late.read(&late_key(rank, &key)) {
            return self.answer(peer, &Reply::Value { value, fds: 0 }, &[]);
        }
        // Whether a rank that has left did set the value is known on its own node.
        if let Err(reply) = self.check_not_ended(|_| false) {
            return self.answer(peer, &reply, &[]);
        }
        self.next_get += 1;
        let number = self.next_get;
        self.outbox.push(RelayMessage::Get { reader: rank, number, key: key.clone(), from });
        self.wait(peer, WaitFor::RemoteKey { key, from, number }, timeout_ms);
    }

    /// Tells the hub that a rank waits in a barrier with participants on other nodes.
    pub(in crate::rendezvous::server) fn enter_remote_barrier(
        &mut self,
        peer: u64,
        rank: u32,
        name: String,
        mut ranks: Option<Vec<u32>>,
        timeout_ms: u64,
    ) {
        if let Some(ranks) = &mut ranks {
            ranks.sort_unstable();
            ranks.dedup();
        }
        match self.outbox.last_mut() {
            Some(RelayMessage::Arrived { barrier, ranks: others, arrived })
                if *barrier == name && *others == ranks =>
            {
                arrived.push(rank);
            }
            _ => self.outbox.push(RelayMessage::Arrived {
                barrier: name.clone(),
                ranks: ranks.clone(),
                arrived: vec![rank],
            }),
        }
        self.wait(peer, WaitFor::RemoteBarrier { name, rank, ranks }, timeout_ms);
    }

    /// Tells the other nodes that a rank of this one does not wait for them any more.
    pub(in crate::rendezvous::server) fn withdraw(&mut self, rank: u32, what: WaitFor) {
        match what {
            WaitFor::RemoteKey { key, from, number } => {
                self.outbox.push(RelayMessage::Cancelled { reader: rank, number, key, from });
            }
            WaitFor::RemoteBarrier { name, rank, .. } => {
                self.outbox.push(RelayMessage::Expired { barrier: name, reader: rank });
            }
            WaitFor::Key { .. } | WaitFor::Barrier { .. } => {}
        }
    }

    /// Answers a rank of another node, now or when the value is set.
    pub(super) fn serve_remote(&mut self, reader: RemoteReader) {
        if !self.entries.contains(&reader.key)
            && let Err(reply) = self.check_not_ended(|needed| needed == reader.from)
        {
            return self.answer_remote(reader, reply);
        }
        let key = reader.key.clone();
        self.remote_readers.add(reader);
        self.wake_remote_readers(&key);
    }

    /// Sends the value of `key` to the ranks of other nodes that wait for it, until it has been read often enough.
    /// Descriptors cannot leave their host.
    pub(in crate::rendezvous::server) fn wake_remote_readers(&mut self, key: &str) {
        while self.entries.contains(key)
            && let Some(reader) = self.remote_readers.take(key)
        {
            if self.entries.has_fds(key) {
                let why = format!(
                    "key `{key}` of rank {} (node {}) has descriptors, which rank {} (node {}) on another host cannot receive",
                    reader.from,
                    self.layout.node(),
                    reader.rank,
                    self.layout.node_of(reader.rank)
                );
                self.answer_remote(reader, Reply::Denied { why });
            } else if let Some((value, _)) = self.entries.read(key) {
                self.answer_remote(reader, Reply::Value { value, fds: 0 });
            }
        }
    }

    /// Answers the ranks of other nodes that wait for values of `rank`, which has ended without setting them. After a
    /// failure their own servers do that.
    pub(in crate::rendezvous::server) fn fail_remote_readers_of(
        &mut self,
        rank: u32,
        failed: bool,
        how: &str,
    ) {
        if failed {
            self.remote_readers.clear();
        }
        for reader in self.remote_readers.take_those_of(rank) {
            self.answer_remote(reader, Reply::PeerGone { peer: rank, how: how.to_owned() });
        }
    }

    fn answer_remote(&mut self, RemoteReader { rank: reader, number, key, .. }: RemoteReader, reply: Reply) {
        self.outbox.push(RelayMessage::Got { reader, number, key, reply });
    }

    /// Answers a rank of this node that waits for a value of another one.
    pub(super) fn answer_reader(
        &mut self,
        reader: u32,
        number: u64,
        key: &str,
        mut reply: Reply,
    ) -> Result<(), String> {
        match &mut reply {
            Reply::Value { value, fds: 0 } if value.len() <= MAX_VALUE => {}
            Reply::PeerGone { peer, how } => {
                self.check_rank(*peer)?;
                *how = shortened(how);
            }
            Reply::Denied { why } => *why = shortened(why),
            other => return Err(format!("the answer {other:?} to a read")),
        }
        let Some(peer) = self.peer_of(reader) else { return Ok(()) };
        let is_value = matches!(reply, Reply::Value { .. });
        let waiting = self.waits.remote_key(peer, key);
        match (waiting, reply) {
            (Some((awaited, from)), reply) if is_value || awaited == number => {
                self.waits.forget(peer);
                if awaited != number {
                    // An answer to an earlier wait for the same value: this wait is not needed.
                    self.withdraw(reader, WaitFor::RemoteKey { key: key.to_owned(), from, number: awaited });
                }
                self.answer(peer, &reply, &[]);
            }
            (_, Reply::Value { value, .. }) => {
                // Beyond the bounds on unread values it is lost, like the patience of the rank that gave up so often.
                let _ = self.late.set(reader, late_key(reader, key), value, Vec::new(), 1);
            }
            _ => {}
        }
        Ok(())
    }

    /// Answers a rank of this node that waits in a barrier in vain.
    pub(super) fn answer_in_barrier(
        &mut self,
        reader: u32,
        barrier: &str,
        mut reply: Reply,
    ) -> Result<(), String> {
        match &mut reply {
            Reply::TimedOut { missing } => {
                missing.iter().try_for_each(|rank| self.check_rank(*rank))?;
                rank_list::sort_if_long(missing);
            }
            Reply::Denied { why } => *why = shortened(why),
            other => return Err(format!("the answer {other:?} to a barrier")),
        }
        if let Some(peer) = self.peer_of(reader)
            && self.waits.take_unreleased(peer, barrier)
        {
            self.answer(peer, &reply, &[]);
        }
        Ok(())
    }
}

/// Name of a value that arrived after its reader had stopped waiting.
fn late_key(reader: u32, key: &str) -> String {
    format!("{reader} {key}")
}
