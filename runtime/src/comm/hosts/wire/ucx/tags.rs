//! Tags of UCX messages: who has sent a message, and what it is. Pure.
//!
//! | bits | meaning |
//! |---|---|
//! | 47 | the *ticket* of the pair sender → receiver, so that no other process is taken for a rank |
//! | 1 | 0 for a frame, 1 for posted payload |
//! | 16 | the number of the piece of payload among those from sender to receiver |
//!
//! The receiver draws a secret for each communicator and publishes it at the rendezvous, beside its address. Tickets are
//! hashes of the secret and the sender's rank.

use xxhash_rust::xxh3::xxh3_64;

/// Length of a secret.
pub(super) const SECRET_BYTES: usize = 32;

/// The bit that tells payload from frames.
pub(super) const PAYLOAD: u64 = 1 << 16;
/// All bits of the number of a piece.
const NUMBER: u64 = PAYLOAD - 1;

pub(super) type Secret = [u8; SECRET_BYTES];

/// The tag of frames to the owner of `secret` from rank `from` of its communicator.
pub(super) fn ticket(secret: &Secret, from: u32) -> u64 {
    let mut bytes = [0; SECRET_BYTES + 4];
    bytes[..SECRET_BYTES].copy_from_slice(secret);
    bytes[SECRET_BYTES..].copy_from_slice(&from.to_le_bytes());
    xxh3_64(&bytes) & !(PAYLOAD | NUMBER)
}

/// The tag of piece `number` of payload.
pub(super) fn piece(ticket: u64, number: u64) -> u64 {
    ticket | PAYLOAD | (number & NUMBER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_differ_by_pair_kind_and_number() {
        let secrets = [[1; SECRET_BYTES], [2; SECRET_BYTES]];
        let mut all: Vec<u64> = Vec::new();
        for secret in &secrets {
            for from in 0..64 {
                let ticket = ticket(secret, from);
                assert_eq!(ticket & PAYLOAD, 0);
                all.push(ticket);
                all.extend([0, 1, 65_535].map(|number| piece(ticket, number)));
                assert_eq!(piece(ticket, 1 << 16), piece(ticket, 0));
            }
        }
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }
}
