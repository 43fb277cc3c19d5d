//! What both ends of a new connection say first, as bytes of fixed size. Pure: no I/O.
//!
//! The rank that listens has published two random texts through the rendezvous: a *ticket*, which the other one shows,
//! and an *answer*, with which it proves that it is the rank that has published them. Both are used once for each
//! connection of a rank of one communicator, so somebody who connects to the port, or who listens at it later, is not taken for a rank.

use super::frame::Stamp;

/// Length of a ticket and of an answer.
pub(super) const TICKET_BYTES: usize = 32;
/// Size of an encoded [`Hello`].
pub(super) const HELLO_BYTES: usize = 80;
/// Size of the reply to a hello: the answer.
pub(super) const ANSWER_BYTES: usize = TICKET_BYTES;

/// The first bytes of a hello, with the version of the frames.
const MAGIC: [u8; 16] = *b"mgpu data v2\r\n\x1a\n";

pub(super) type Ticket = [u8; TICKET_BYTES];

/// Identifies a rank to another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) ticket: Ticket,
    /// A hash of the run's identifier.
    pub(super) run: u64,
    pub(super) stamp: Stamp,
    /// World ranks of sender and receiver.
    pub(super) from: u32,
    pub(super) to: u32,
    /// Index of the connection among those of these ranks, and their number.
    pub(super) stream: u32,
    pub(super) streams: u32,
}

impl Hello {
    pub(super) fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..16].copy_from_slice(&MAGIC);
        bytes[16..48].copy_from_slice(&self.ticket);
        bytes[48..56].copy_from_slice(&self.run.to_le_bytes());
        let Stamp { epoch, communicator } = self.stamp;
        let numbers = [epoch, communicator, self.from, self.to, self.stream, self.streams];
        for (number, at) in numbers.iter().zip(bytes[56..].chunks_exact_mut(4)) {
            at.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    /// Reverses [`encode`](Self::encode); `None` if the bytes are no hello.
    pub(super) fn decode(bytes: &[u8; HELLO_BYTES]) -> Option<Self> {
        let number = |at: usize| u32::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
        (bytes[..16] == MAGIC).then(|| Hello {
            ticket: std::array::from_fn(|index| bytes[16 + index]),
            run: u64::from_le_bytes(std::array::from_fn(|index| bytes[48 + index])),
            stamp: Stamp { epoch: number(56), communicator: number(60) },
            from: number(64),
            to: number(68),
            stream: number(72),
            streams: number(76),
        })
    }
}

/// Whether these first bytes of a connection may become a hello.
pub(super) fn may_be_hello(bytes: &[u8]) -> bool {
    let known = bytes.len().min(MAGIC.len());
    bytes[..known] == MAGIC[..known]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn hellos_survive_the_wire(ticket: [u8; 32], run: u64, epoch: u32, communicator: u32, from: u32, to: u32, stream: u32, streams: u32) {
            let hello = Hello { ticket, run, stamp: Stamp { epoch, communicator }, from, to, stream, streams };
            prop_assert_eq!(Hello::decode(&hello.encode()), Some(hello));
        }

        #[test]
        fn any_bytes_are_a_hello_or_not(bytes in prop::collection::vec(any::<u8>(), HELLO_BYTES), marked: bool) {
            let mut bytes = <[u8; HELLO_BYTES]>::try_from(bytes).unwrap();
            if marked {
                bytes[..16].copy_from_slice(&MAGIC);
            }
            if let Some(hello) = Hello::decode(&bytes) {
                prop_assert_eq!(hello.encode(), bytes);
            }
        }
    }

    #[test]
    fn other_programs_are_known_by_their_first_byte() {
        assert!(may_be_hello(b"") && may_be_hello(b"mgpu") && may_be_hello(&MAGIC));
        assert!(!may_be_hello(b"GET / HTTP/1.1\r\n") && !may_be_hello(b"mgpu data v1\r\n\x1a\n"));
    }
}
