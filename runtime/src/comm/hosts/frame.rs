//! Frames: what a connection between two ranks carries, as bytes. Pure: no I/O.
//!
//! Every frame begins with a header of fixed size, which has the run's restart count, the communicator, the sequence
//! number and the sender's call. A receiver checks all of them before it uses a byte of the payload. Header and payload
//! have a checksum each: that of TCP has 16 bits, and is often left to the network adapters.

use crate::comm::signature::SIGNATURE_WORDS;

/// Size of a header.
pub(super) const HEADER_BYTES: usize = 68;
/// Largest payload of a [`FrameKind::Data`] frame. Other frames may be sent between two of them.
pub(super) const PIECE_BYTES: usize = 256 << 10;
/// Largest payload of a [`FrameKind::Arrival`] frame.
pub(super) const ARRIVAL_BYTES: usize = 128 << 10;
/// Largest payload of a [`FrameKind::Bundle`] frame.
pub(super) const BUNDLE_BYTES: usize = 128 << 10;
/// Largest payload of a frame of any other kind, and of one rank in a bundle.
pub(super) const SMALL_BYTES: usize = 16 << 10;

/// The first bytes of every header.
const MAGIC: [u8; 3] = *b"mgd";
/// Where the checksum of the header's other bytes is.
const CHECKSUM_AT: usize = HEADER_BYTES - 4;

/// What a frame says. `sequence` and `argument` are fields of its [`Header`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum FrameKind {
    /// The sender has arrived at collective `sequence`. The payload is its contribution, if that is small.
    Arrival = 1,
    /// A piece of a large payload, of collective or message `sequence`.
    Data = 2,
    /// A small message, number `sequence` of those from the sender to the receiver.
    Message = 3,
    /// The sender waits until large message `sequence` is accepted.
    Offer = 4,
    /// The receiver has taken message `sequence`, or is ready for its pieces.
    Accept = 5,
    /// Searches a cycle of ranks that wait for each other (see [`deadlock`](super::deadlock)).
    Probe = 6,
    /// Answers a probe of wait `sequence`: the sender waits for rank `argument`.
    Waiting = 7,
    /// The sender cannot use the communicator any more. The payload says whom it blames.
    Abort = 8,
    /// Ranks have arrived at collective `sequence`. The payload says which ones (see [`bundle`](super::bundle)).
    Bundle = 9,
    /// The sender has arrived at collective `sequence`; its contribution comes by another way.
    Announcement = 10,
}

impl FrameKind {
    fn from_number(number: u8) -> Option<Self> {
        use FrameKind::{Abort, Accept, Announcement, Arrival, Bundle, Data, Message, Offer, Probe, Waiting};
        [Arrival, Data, Message, Offer, Accept, Probe, Waiting, Abort, Bundle, Announcement]
            .into_iter()
            .find(|kind| *kind as u8 == number)
    }

    /// Largest payload of a frame of this kind.
    fn most_bytes(self) -> usize {
        match self {
            FrameKind::Data => PIECE_BYTES,
            FrameKind::Arrival => ARRIVAL_BYTES,
            FrameKind::Bundle => BUNDLE_BYTES,
            _ => SMALL_BYTES,
        }
    }
}

/// What all frames of a communicator have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Stamp {
    /// How often the ranks were restarted.
    pub(super) epoch: u32,
    /// Number of the communicator.
    pub(super) communicator: u32,
}

/// The header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) kind: FrameKind,
    pub(super) sequence: u32,
    pub(super) argument: u64,
    /// Bytes of the payload.
    pub(super) length: u32,
    /// Checksum of the payload.
    pub(super) checksum: u32,
    /// The sender's call: its encoded signature.
    pub(super) call: [u64; SIGNATURE_WORDS],
}

impl Header {
    pub(super) fn new(kind: FrameKind, sequence: u32, call: [u64; SIGNATURE_WORDS]) -> Self {
        Header { kind, sequence, argument: 0, length: 0, checksum: 0, call }
    }

    pub(super) fn with_argument(self, argument: u64) -> Self {
        Header { argument, ..self }
    }

    /// The header of this payload.
    pub(super) fn with_payload(self, payload: &[u8]) -> Self {
        Header { length: payload.len() as u32, checksum: checksum(payload), ..self }
    }

    /// Checks that `payload` is what was sent.
    ///
    /// # Errors
    /// If it was damaged.
    pub(super) fn check_payload(&self, payload: &[u8]) -> Result<(), String> {
        let found = checksum(payload);
        match found == self.checksum {
            true => Ok(()),
            false => Err(format!(
                "{} bytes of payload that were damaged on the way: their checksum is {found:08x}, and was {:08x} when \
                 they were sent",
                payload.len(),
                self.checksum
            )),
        }
    }

    /// The bytes before those of the payload.
    pub(super) fn encode(&self, stamp: Stamp) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..3].copy_from_slice(&MAGIC);
        bytes[3] = self.kind as u8;
        bytes[4..8].copy_from_slice(&stamp.epoch.to_le_bytes());
        bytes[8..12].copy_from_slice(&stamp.communicator.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.argument.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.length.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.checksum.to_le_bytes());
        for (word, at) in self.call.iter().zip(bytes[32..].chunks_exact_mut(8)) {
            at.copy_from_slice(&word.to_le_bytes());
        }
        let own = checksum(&bytes[..CHECKSUM_AT]);
        bytes[CHECKSUM_AT..].copy_from_slice(&own.to_le_bytes());
        bytes
    }

    /// Reverses [`encode`](Self::encode).
    ///
    /// # Errors
    /// What is wrong with the bytes, that they were damaged, or that they belong to another communicator or another
    /// start of the ranks.
    pub(super) fn decode(bytes: &[u8; HEADER_BYTES], stamp: Stamp) -> Result<Self, String> {
        let short = |at: usize| u32::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
        let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
        let kind = FrameKind::from_number(bytes[3]).filter(|_| bytes[..3] == MAGIC);
        let Some(kind) = kind else {
            return Err(format!("its bytes are not a frame: they begin with {:02x?}", &bytes[..4]));
        };
        let (found, sent) = (checksum(&bytes[..CHECKSUM_AT]), short(CHECKSUM_AT));
        if found != sent {
            return Err(format!(
                "a header that was damaged on the way: its checksum is {found:08x}, and was {sent:08x} when it was sent"
            ));
        }
        let found = Stamp { epoch: short(4), communicator: short(8) };
        if found != stamp {
            return Err(format!(
                "a frame of communicator {} after restart {}, where communicator {} after restart {} is expected",
                found.communicator, found.epoch, stamp.communicator, stamp.epoch
            ));
        }
        let length = short(24);
        let most = kind.most_bytes();
        if length as usize > most {
            return Err(format!("a frame of {length} bytes; the maximum is {most}"));
        }
        let call = std::array::from_fn(|index| long(32 + 8 * index));
        Ok(Header { kind, sequence: short(12), argument: long(16), length, checksum: short(28), call })
    }
}

/// The checksum of a header or a payload.
fn checksum(bytes: &[u8]) -> u32 {
    mgpu_kernels::checksum::checksum(0, bytes) as u32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STAMP: Stamp = Stamp { epoch: 3, communicator: 7 };

    proptest! {
        #[test]
        fn headers_survive_the_wire(kind in 1u8..=10, sequence: u32, argument: u64, length in 0..=SMALL_BYTES as u32, checksum: u32, call: [u64; 4]) {
            let kind = FrameKind::from_number(kind).unwrap();
            let header = Header { kind, sequence, argument, length, checksum, call };
            prop_assert_eq!(Header::decode(&header.encode(STAMP), STAMP), Ok(header));
        }

        #[test]
        fn damaged_frames_are_rejected(at in 0..HEADER_BYTES, flip in 1u8.., payload in prop::collection::vec(any::<u8>(), 1..300)) {
            let header = Header::new(FrameKind::Data, 5, [1, 2, 3, 4]).with_payload(&payload);
            let mut bytes = header.encode(STAMP);
            bytes[at] ^= flip;
            prop_assert!(Header::decode(&bytes, STAMP).is_err());
            prop_assert_eq!(header.check_payload(&payload), Ok(()));
            let mut damaged = payload.clone();
            damaged[at % payload.len()] ^= flip;
            prop_assert!(header.check_payload(&damaged).unwrap_err().contains("damaged on the way"));
        }

        /// Whatever arrives is a header that encodes to the same bytes, or an error.
        #[test]
        fn any_bytes_are_decoded_or_rejected(bytes in prop::collection::vec(any::<u8>(), HEADER_BYTES), forged: bool, kind in 0u8..13) {
            let mut bytes = <[u8; HEADER_BYTES]>::try_from(bytes).unwrap();
            if forged {
                bytes[..3].copy_from_slice(&MAGIC);
                bytes[3] = kind;
                bytes[4..12].copy_from_slice(&[3, 0, 0, 0, 7, 0, 0, 0]);
                bytes[26..28].fill(0);
                let own = checksum(&bytes[..CHECKSUM_AT]);
                bytes[CHECKSUM_AT..].copy_from_slice(&own.to_le_bytes());
            }
            if let Ok(header) = Header::decode(&bytes, STAMP) {
                prop_assert_eq!(header.encode(STAMP), bytes);
                prop_assert!(header.length as usize <= PIECE_BYTES);
            }
        }
    }

    #[test]
    fn frames_of_another_start_are_rejected() {
        let bytes = Header::new(FrameKind::Arrival, 1, [0; 4]).encode(STAMP);
        let error = Header::decode(&bytes, Stamp { epoch: 4, ..STAMP }).unwrap_err();
        assert!(error.contains("after restart 3, where communicator 7 after restart 4"), "{error}");
    }
}
