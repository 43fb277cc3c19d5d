//! Whether the other host still acknowledges what it is sent.
//!
//! The kernel's own time-outs do not tell in all cases. If a packet cannot even leave this host, because of a blackhole
//! route or a firewall's rule, the kernel treats it like data for which the receiver has no room. Every packet of the
//! other host then starts its time-out again, also one that acknowledges nothing: so a connection whose packets are lost
//! in one direction only outlives both time-outs, one after the other. Here only acknowledgements count.
//!
//! [`Unacknowledged`] is pure: it follows one position of the stream, that of the oldest bytes that may still be on their
//! way, and when they were written. The host of a stopped process acknowledges what it is sent, as long as its buffers
//! have room.

use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use nix::libc;

use super::tcp;

/// Longest time until bytes are acknowledged. A little more than the kernel's: a connection that the kernel has given up
/// ends silently, but one that is closed tells the other host so if packets still arrive there, which would take it for
/// the end of this process.
const TIMEOUT: Duration = Duration::from_millis(tcp::USER_TIMEOUT as u64 + 250);

/// What was written to a connection and may not have arrived.
#[derive(Debug, Default)]
pub(super) struct Unacknowledged {
    /// Bytes written so far.
    written: u64,
    /// Number of bytes that were acknowledged.
    acknowledged: u64,
    /// Since when no further byte was acknowledged. `None` if all of them are.
    since: Option<Instant>,
}

impl Unacknowledged {
    /// Notes that bytes were written.
    pub(super) fn wrote(&mut self, bytes: usize, now: Instant) {
        if bytes > 0 {
            self.written += bytes as u64;
            self.since.get_or_insert(now);
        }
    }

    /// True if it is unknown whether everything is acknowledged.
    pub(super) fn is_pending(&self) -> bool {
        self.since.is_some()
    }

    /// When the other host is given up if [`note`](Self::note) does not say by then that bytes have arrived.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.since.map(|since| since + TIMEOUT)
    }

    /// Notes how many bytes are not acknowledged `now`.
    pub(super) fn note(&mut self, unacknowledged: usize, now: Instant) {
        let acknowledged = self.written.saturating_sub(unacknowledged as u64);
        if acknowledged > self.acknowledged {
            self.acknowledged = acknowledged;
            self.since = (acknowledged < self.written).then_some(now);
        }
    }
}

/// Bytes that were written and that the other host has not acknowledged; 0 if the kernel does not say.
pub(super) fn bytes(stream: &TcpStream) -> usize {
    let mut count: libc::c_int = 0;
    // SAFETY: the descriptor is open, and SIOCOUTQ (the same number as TIOCOUTQ) writes one int to a live variable.
    let result = unsafe { libc::ioctl(stream.as_raw_fd(), libc::TIOCOUTQ, &raw mut count) };
    if result == 0 { usize::try_from(count).unwrap_or(0) } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn heartbeats_that_are_acknowledged_leave_no_deadline() {
        let (mut sent, mut now) = (Unacknowledged::default(), Instant::now());
        for _ in 0..100 {
            sent.note(0, now);
            assert_eq!(sent.deadline(), None);
            sent.wrote(10, now);
            assert_eq!(sent.deadline(), Some(now + TIMEOUT));
            now += SECOND;
        }
    }

    #[test]
    fn the_first_heartbeat_that_is_lost_starts_the_time() {
        let (mut sent, mut now) = (Unacknowledged::default(), Instant::now());
        // Acknowledged, but nobody asks before the next one.
        sent.wrote(10, now);
        let lost = now + SECOND;
        for beats in 0..4 {
            now += SECOND;
            sent.note(10 * beats, now);
            sent.wrote(10, now);
            assert_eq!(sent.deadline(), Some(lost + TIMEOUT));
        }
        // An outage that ends in time is forgotten.
        sent.note(0, now);
        assert_eq!(sent.deadline(), None);
    }

    #[test]
    fn slow_progress_is_progress() {
        let (mut sent, mut now) = (Unacknowledged::default(), Instant::now());
        sent.wrote(1000, now);
        // A thousand bytes are always on their way.
        for _ in 0..100 {
            now += 4 * SECOND;
            sent.wrote(1000, now);
            assert!(sent.deadline().unwrap() > now);
            sent.note(1000, now);
            assert_eq!(sent.deadline(), Some(now + TIMEOUT));
        }
    }
}
