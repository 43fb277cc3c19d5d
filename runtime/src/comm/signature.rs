//! Signatures: the properties of a call that must be the same on all ranks.
//!
//! Every rank compares its signature with those of its peers before it touches their memory, so that ranks with
//! different calls get an error that names both, instead of a wrong sum. On shared memory a digest of the signature
//! is published together with the arrival flag; under NCCL the whole signatures are gathered.

use std::fmt;

use super::call::{Call, SegmentUpdate};
use super::{Buffer, DType, ReduceOp};
use crate::progress::Operation;

/// How the payload is transferred. It is part of the signature, because all ranks must follow the same protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Path {
    /// No payload.
    None = 0,
    /// In the arrival line itself.
    Inline = 1,
    /// Through small slots.
    Eager = 2,
    /// In place, within an arena.
    Direct = 3,
    /// Through staging memory, chunk by chunk.
    Staged = 4,
    /// From rank to rank, around a ring.
    Ring = 5,
    /// In place, by the root alone.
    Root = 6,
}

impl Path {
    const ALL: [Path; 7] =
        [Path::None, Path::Inline, Path::Eager, Path::Direct, Path::Staged, Path::Ring, Path::Root];
    const NAMES: [&'static str; 7] = ["none", "inline", "eager", "direct", "staged", "ring", "by root"];
}

/// Words of an encoded signature.
pub(crate) const SIGNATURE_WORDS: usize = 4;

/// The properties of a call that must be the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Signature {
    pub(crate) operation: Operation,
    pub(crate) path: Path,
    pub(crate) dtype: DType,
    pub(crate) op: Option<ReduceOp>,
    /// Root, peer or digest, depending on the operation.
    pub(crate) detail: u32,
    /// Elements.
    pub(crate) len: usize,
    /// Number of the arena, from 1, and byte offset in it; zeros for private memory.
    pub(crate) location: (u64, usize),
}

/// Meaning of `Signature::detail`.
enum Detail {
    Nothing,
    Root,
    Receiver,
    Sender,
    Peer,
    /// A digest of the segments of the buffer.
    Segments,
    /// A digest of the number of elements per rank.
    Counts,
}

impl Detail {
    fn of(operation: Operation) -> Self {
        match operation {
            Operation::Broadcast | Operation::Reduce | Operation::Gather | Operation::Scatter => Detail::Root,
            Operation::Send => Detail::Receiver,
            Operation::Recv => Detail::Sender,
            Operation::SendRecv => Detail::Peer,
            Operation::UpdateAllGather => Detail::Segments,
            Operation::AllGatherV => Detail::Counts,
            _ => Detail::Nothing,
        }
    }
}

impl Signature {
    /// The signature of a call on `buffer`.
    #[inline(always)]
    pub(crate) fn of(call: &Call<'_>, buffer: &Buffer) -> Self {
        let digest = |numbers: &mut dyn Iterator<Item = usize>| {
            numbers.fold(0, |digest, number| mix(digest, number as u64)) as u32
        };
        let detail = match call {
            Call::UpdateAllGather(SegmentUpdate { segments, .. }) => {
                digest(&mut segments.iter().flat_map(|segment| [segment.start, segment.end]))
            }
            Call::AllGatherV { counts } => digest(&mut counts.iter().copied()),
            _ => call.root().or(call.peer()).unwrap_or_default(),
        };
        // Messages and transfers of different lengths are copied, so the location of their buffers does not matter.
        let is_in_place = call.is_collective() && !matches!(call, Call::AllToAllV { .. });
        let location = buffer.arena().filter(|_| is_in_place);
        Signature {
            detail,
            op: call.reduction(),
            len: if is_in_place || !call.is_collective() { buffer.len() } else { 0 },
            location: location.map_or((0, 0), |(arena, offset)| (arena.id, offset)),
            ..Self::plain(call.operation(), buffer.dtype(), 0)
        }
    }

    /// The signature of an operation with the given type and length, without any other properties.
    #[inline(always)]
    pub(crate) fn plain(operation: Operation, dtype: DType, len: usize) -> Self {
        Signature { operation, path: Path::None, dtype, op: None, detail: 0, len, location: (0, 0) }
    }

    /// The same, with the buffer at any location.
    pub(crate) fn without_location(self) -> Self {
        Signature { location: (0, 0), ..self }
    }

    /// The same, with this path.
    #[inline(always)]
    pub(crate) fn with_path(self, path: Path) -> Self {
        Signature { path, ..self }
    }

    /// Bytes of the payload.
    pub(crate) fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }

    /// Bytes of the payload of an encoded signature; `None` if it is invalid.
    pub(crate) fn bytes_of(words: [u64; SIGNATURE_WORDS]) -> Option<usize> {
        let dtype = DType::ALL.get(byte(words[0], 16))?;
        usize::try_from(words[1]).ok()?.checked_mul(dtype.size())
    }

    /// False for messages, in which only two ranks take part.
    pub(crate) fn is_collective(&self) -> bool {
        !matches!(self.operation, Operation::Send | Operation::Recv | Operation::SendRecv)
    }

    /// The signature that the peers of rank `rank` must have: for messages the other side, for all other calls the same.
    pub(crate) fn counterpart(self, rank: u32) -> Self {
        let operation = match self.operation {
            Operation::Send => Operation::Recv,
            Operation::Recv => Operation::Send,
            Operation::SendRecv => Operation::SendRecv,
            _ => return self,
        };
        Signature { operation, detail: rank, ..self }
    }

    #[inline]
    pub(crate) fn encode(&self) -> [u64; SIGNATURE_WORDS] {
        let op = self.op.map_or(0, |op| op as u64 + 1);
        let head = self.operation as u64
            | (self.path as u64) << 8
            | (self.dtype as u64) << 16
            | op << 24
            | u64::from(self.detail) << 32;
        [head, self.len as u64, self.location.0, self.location.1 as u64]
    }

    /// The signature that [`encode`](Self::encode) has made these words of.
    ///
    /// # Panics
    /// If the words are not those of a signature.
    pub(crate) fn decode([head, len, arena, offset]: [u64; SIGNATURE_WORDS]) -> Self {
        Signature {
            operation: Operation::from_number(byte(head, 0) as u8).expect("an operation"),
            path: Path::ALL[byte(head, 8)],
            dtype: DType::ALL[byte(head, 16)],
            op: byte(head, 24).checked_sub(1).map(|op| ReduceOp::ALL[op]),
            detail: (head >> 32) as u32,
            len: len as usize,
            location: (arena, offset as usize),
        }
    }

    /// A hash of an encoded signature.
    pub(crate) fn digest(words: [u64; SIGNATURE_WORDS]) -> u64 {
        words.into_iter().fold(0, mix)
    }
}

/// The byte at bit `shift` of the first word of an encoded signature.
fn byte(head: u64, shift: u32) -> usize {
    (head >> shift & 0xff) as usize
}

/// Adds a word to a hash.
fn mix(digest: u64, word: u64) -> u64 {
    let mixed = (digest ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ mixed >> 32
}

/// Text of an encoded signature for error messages. It may come from a peer with another version or with corrupted
/// memory.
pub(crate) fn describe(words: [u64; SIGNATURE_WORDS]) -> String {
    let [head, len, arena, offset] = words;
    let byte = |shift| byte(head, shift);
    let Some(operation) = Operation::from_number(byte(0) as u8) else {
        return format!("unknown operation ({head:#x})");
    };
    let name = operation.name();
    if operation == Operation::Barrier {
        return name.into();
    }
    let dtype = DType::ALL.get(byte(16)).map_or("?", |dtype| dtype.name());
    let mut text = format!("{name}({len} {dtype}");
    if let Some(op) = byte(24).checked_sub(1).and_then(|op| ReduceOp::ALL.get(op)) {
        text += &format!(", {op}");
    }
    let detail = head >> 32;
    text += &match Detail::of(operation) {
        Detail::Nothing => String::new(),
        Detail::Root => format!(", root {detail}"),
        Detail::Receiver => format!(", to rank {detail}"),
        Detail::Sender => format!(", from rank {detail}"),
        Detail::Peer => format!(", with rank {detail}"),
        Detail::Segments => format!(", segments {detail:08x}"),
        Detail::Counts => format!(", counts {detail:08x}"),
    };
    if let Some(path) = Path::NAMES.get(byte(8)).filter(|_| byte(8) != 0) {
        text += &format!(", {path}");
    }
    if arena != 0 {
        text += &format!(", arena {arena} at byte {offset}");
    }
    text + ")"
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&describe(self.encode()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions_distinguish_calls() {
        let buffer = Buffer::zeroed::<f32>(1000);
        let of = |call: Call<'_>| Signature::of(&call, &buffer);
        let signature = of(Call::AllReduce(ReduceOp::Sum)).with_path(Path::Eager);
        assert_eq!(signature.to_string(), "all_reduce(1000 f32, sum, eager)");
        let signature = of(Call::Broadcast { root: 3 }).with_path(Path::Staged);
        assert_eq!(signature.to_string(), "broadcast(1000 f32, root 3, staged)");
        assert_eq!(Signature::bytes_of(signature.encode()), Some(4000));
        assert_eq!(Signature::bytes_of([0xff << 16, 1, 0, 0]), None);
        for signature in
            [signature, of(Call::Barrier), of(Call::AllReduce(ReduceOp::Max)).with_path(Path::Root)]
        {
            let signature = Signature { location: (7, 64), ..signature };
            assert_eq!(Signature::decode(signature.encode()), signature);
        }
        assert_eq!(describe([0xff, 0, 0, 0]), "unknown operation (0xff)");
        let signature = Signature { location: (2, 4096), path: Path::Direct, ..of(Call::AllGather) };
        assert_eq!(signature.to_string(), "all_gather(1000 f32, direct, arena 2 at byte 4096)");
        assert_eq!(of(Call::Recv { from: 2 }).to_string(), "recv(1000 f32, from rank 2)");
        assert_eq!(of(Call::Recv { from: 2 }).counterpart(1).to_string(), "send(1000 f32, to rank 1)");
        let both = of(Call::SendRecv { from: &buffer, peer: 2 });
        assert_eq!(both.to_string(), "send_recv(1000 f32, with rank 2)");
        assert_eq!(both.counterpart(1).to_string(), "send_recv(1000 f32, with rank 1)");
        assert_eq!(of(Call::Gather { root: 1 }).to_string(), "gather(1000 f32, root 1)");
        let counts = |counts: &[usize]| of(Call::AllGatherV { counts }).to_string();
        assert!(counts(&[400, 600]).starts_with("all_gather_v(1000 f32, counts "));
        assert_ne!(counts(&[400, 600]), counts(&[600, 400]));
        for (index, operation) in Operation::ALL.into_iter().enumerate() {
            assert_eq!(operation as usize, index + 1);
        }
    }
}
