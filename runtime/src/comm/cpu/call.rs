//! What a rank has called.
//!
//! A digest of it travels beside the arrival flag. Every rank compares its own with those of its peers before it
//! touches their memory, so that two ranks that disagree get an error with both sides instead of a wrong sum.

use std::fmt;

use crate::comm::{Buffer, DType, ReduceOp};
use crate::progress::Operation;

/// How the payload travels; agreed like everything else, since all ranks must follow the same protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(in crate::comm) enum Path {
    /// Nothing to move.
    None = 0,
    /// In the arrival line itself.
    Inline = 1,
    /// Through small slots.
    Eager = 2,
    /// In place, within an arena.
    Direct = 3,
    /// Through staging memory, chunk by chunk.
    Staged = 4,
    /// From rank to rank.
    Ring = 5,
    /// In place, within an arena, as it is made.
    Made = 6,
}

impl Path {
    const NAMES: [&'static str; 7] = ["none", "inline", "eager", "direct", "staged", "ring", "made"];
}

/// Words of an encoded call.
pub(in crate::comm) const CALL_WORDS: usize = 4;

/// One operation's arguments, as far as all ranks must agree on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::comm) struct Call {
    pub(in crate::comm) kind: Operation,
    pub(in crate::comm) path: Path,
    pub(in crate::comm) dtype: DType,
    pub(in crate::comm) op: Option<ReduceOp>,
    /// The root; for a message, the rank at its other end.
    pub(in crate::comm) root: u32,
    /// Elements.
    pub(in crate::comm) len: usize,
    /// Number of the arena, from 1, and byte offset in it; zeros for private memory.
    pub(in crate::comm) place: (u64, usize),
}

impl Call {
    pub(in crate::comm) fn new(kind: Operation, buffer: &Buffer, op: Option<ReduceOp>, root: u32) -> Self {
        let place = buffer.arena().map_or((0, 0), |(arena, offset)| (arena.id, offset));
        Call { kind, path: Path::None, dtype: buffer.dtype(), op, root, len: buffer.len(), place }
    }

    /// One side of a message.
    pub(in crate::comm) fn message(kind: Operation, buffer: &Buffer, peer: u32) -> Self {
        Call { root: peer, ..Self::plain(kind, buffer.dtype(), buffer.len()) }
    }

    /// True unless only two ranks take part.
    pub(in crate::comm) fn is_collective(&self) -> bool {
        !matches!(self.kind, Operation::Send | Operation::Recv)
    }

    /// A call without payload.
    pub(in crate::comm) fn plain(kind: Operation, dtype: DType, len: usize) -> Self {
        Call { kind, path: Path::None, dtype, op: None, root: 0, len, place: (0, 0) }
    }

    /// What the peer of rank `rank` has to call: `send` and `recv` are the two sides of a message and each names the other
    /// rank; all other calls are equal.
    pub(in crate::comm) fn counterpart(self, rank: u32) -> Self {
        let kind = match self.kind {
            Operation::Send => Operation::Recv,
            Operation::Recv => Operation::Send,
            _ => return self,
        };
        Call { kind, root: rank, ..self }
    }

    pub(in crate::comm) fn via(self, path: Path) -> Self {
        Call { path, ..self }
    }

    pub(in crate::comm) fn encode(&self) -> [u64; CALL_WORDS] {
        let op = self.op.map_or(0, |op| op as u64 + 1);
        let head = self.kind as u64
            | (self.path as u64) << 8
            | (self.dtype as u64) << 16
            | op << 24
            | u64::from(self.root) << 32;
        [head, self.len as u64, self.place.0, self.place.1 as u64]
    }

    /// One word that tells encoded calls apart.
    pub(in crate::comm) fn digest(words: [u64; CALL_WORDS]) -> u64 {
        words.into_iter().fold(0, mix)
    }
}

/// One more word of a digest.
pub(in crate::comm) fn mix(digest: u64, word: u64) -> u64 {
    let mixed = (digest ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ mixed >> 32
}

/// Describes encoded arguments, which may come from a peer of any kind, for an error message.
pub(in crate::comm) fn describe(words: [u64; CALL_WORDS]) -> String {
    let [head, len, arena, offset] = words;
    let byte = |shift: u32| (head >> shift & 0xff) as usize;
    let Some(kind) = Operation::from_number(byte(0) as u8) else {
        return format!("something unknown ({head:#x})");
    };
    let name = kind.name();
    if kind == Operation::Barrier {
        return name.into();
    }
    let dtype = DType::ALL.get(byte(16)).map_or("?", |dtype| dtype.name());
    let mut text = format!("{name}({len} {dtype}");
    if let Some(op) = byte(24).checked_sub(1).and_then(|op| ReduceOp::ALL.get(op)) {
        text += &format!(", {op}");
    }
    match kind {
        Operation::Broadcast | Operation::Reduce => text += &format!(", root {}", head >> 32),
        Operation::Send => text += &format!(", to rank {}", head >> 32),
        Operation::Recv => text += &format!(", from rank {}", head >> 32),
        _ => {}
    }
    if byte(8) == Path::Made as usize {
        text += &format!(", segments {:08x}", head >> 32);
    }
    if let Some(path) = Path::NAMES.get(byte(8)).filter(|_| byte(8) != 0) {
        text += &format!(", {path}");
    }
    if arena != 0 {
        text += &format!(", arena {arena} at byte {offset}");
    }
    text + ")"
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&describe(self.encode()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions_tell_calls_apart() {
        let buffer = Buffer::zeroed::<f32>(1000);
        let call = Call::new(Operation::AllReduce, &buffer, Some(ReduceOp::Sum), 0).via(Path::Eager);
        assert_eq!(call.to_string(), "all_reduce(1000 f32, sum, eager)");
        let call = Call::new(Operation::Broadcast, &buffer, None, 3).via(Path::Staged);
        assert_eq!(call.to_string(), "broadcast(1000 f32, root 3, staged)");
        assert_eq!(describe([0xff, 0, 0, 0]), "something unknown (0xff)");
        let call = Call {
            place: (2, 4096),
            path: Path::Direct,
            ..Call::new(Operation::AllGather, &buffer, None, 0)
        };
        assert_eq!(call.to_string(), "all_gather(1000 f32, direct, arena 2 at byte 4096)");
        let call = Call::message(Operation::Recv, &buffer, 2);
        assert_eq!(call.to_string(), "recv(1000 f32, from rank 2)");
        for (index, kind) in Operation::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, index + 1);
        }
    }
}
