//! What is known of a peer's arrivals. Pure.
//!
//! Every collective is a meeting of all ranks. So a peer is at most one collective ahead, and two places are enough: the
//! arrival at collective `s` is in place `s mod 2`. The same arrival may become known twice, first without its payload:
//! a rank that has waited for a while *announces* its call to all others, and its payload comes with a bundle.

use crate::comm::signature::SIGNATURE_WORDS;

/// A rank's part in a collective.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Arrival {
    pub(super) sequence: u32,
    pub(super) call: [u64; SIGNATURE_WORDS],
    /// Identifies its buffer to the ranks of its host; 0 for private memory.
    pub(super) location: u64,
    /// Its contribution, empty if that is not small. `None` if only its call is known.
    pub(super) payload: Option<Vec<u8>>,
}

/// The arrivals of one rank at the current collective and, if it is ahead, at the next one.
#[derive(Debug, Default)]
pub(super) struct Arrivals([Option<Arrival>; 2]);

impl Arrivals {
    /// Its arrival at collective `sequence`, as far as it is known.
    pub(super) fn at(&self, sequence: u32) -> Option<&Arrival> {
        self.0[(sequence % 2) as usize].as_ref().filter(|arrival| arrival.sequence == sequence)
    }

    /// Whether its arrival at collective `sequence` is known with its payload.
    pub(super) fn is_complete(&self, sequence: u32) -> bool {
        self.at(sequence).is_some_and(|arrival| arrival.payload.is_some())
    }

    /// Its arrival at collective `sequence`, which is forgotten.
    pub(super) fn take(&mut self, sequence: u32) -> Option<Arrival> {
        self.0[(sequence % 2) as usize].take_if(|arrival| arrival.sequence == sequence)
    }

    /// Notes an arrival. `first` is the collective that this rank has not left.
    ///
    /// # Errors
    /// If it is at a collective where the peer cannot be, or contradicts what is known.
    pub(super) fn note(&mut self, arrival: Arrival, first: u32) -> Result<(), String> {
        let Arrival { sequence, .. } = arrival;
        let ahead = sequence.wrapping_sub(first) as i32;
        if ahead < 0 && arrival.payload.is_none() {
            // The rest has come sooner than the announcement, by another way.
            return Ok(());
        }
        if !(0..2).contains(&ahead) {
            return Err(format!("collective {sequence} where collective {first} is expected"));
        }
        let place = &mut self.0[(sequence % 2) as usize];
        match place {
            Some(known) if known.sequence == sequence => {
                if (known.call, known.location) != (arrival.call, arrival.location) {
                    return Err(format!("two different calls of collective {sequence}"));
                }
                match (&known.payload, arrival.payload) {
                    (Some(_), Some(_)) => return Err(format!("collective {sequence} twice")),
                    (None, payload) => known.payload = payload,
                    (Some(_), None) => {}
                }
            }
            _ => *place = Some(arrival),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrival(sequence: u32, payload: Option<&[u8]>) -> Arrival {
        Arrival { sequence, call: [1; 4], location: 7, payload: payload.map(<[u8]>::to_vec) }
    }

    #[test]
    fn an_announcement_is_completed_once() {
        for first in [5, u32::MAX] {
            let mut arrivals = Arrivals::default();
            arrivals.note(arrival(first, None), first).unwrap();
            assert!(arrivals.at(first).is_some() && !arrivals.is_complete(first));
            arrivals.note(arrival(first, Some(b"abc")), first).unwrap();
            arrivals.note(arrival(first, None), first).unwrap();
            assert!(arrivals.is_complete(first));
            let error = arrivals.note(arrival(first, Some(b"abc")), first).unwrap_err();
            assert!(error.ends_with("twice"), "{error}");
            assert_eq!(arrivals.take(first).unwrap().payload.as_deref(), Some(&b"abc"[..]));
            assert_eq!(arrivals.take(first), None);
            // What comes late was known.
            arrivals.note(arrival(first, None), first.wrapping_add(1)).unwrap();
            assert_eq!(arrivals.at(first), None);
        }
    }

    #[test]
    fn a_peer_may_be_one_collective_ahead() {
        let mut arrivals = Arrivals::default();
        arrivals.note(arrival(6, Some(b"")), 5).unwrap();
        arrivals.note(arrival(5, Some(b"")), 5).unwrap();
        assert!(arrivals.is_complete(5) && arrivals.is_complete(6));
        for wrong in [arrival(7, None), arrival(4, Some(b""))] {
            let error = arrivals.note(wrong, 5).unwrap_err();
            assert!(error.ends_with("where collective 5 is expected"), "{error}");
        }
        let other = Arrival { call: [2; 4], ..arrival(5, None) };
        assert!(arrivals.note(other, 5).unwrap_err().contains("two different calls"));
    }
}
