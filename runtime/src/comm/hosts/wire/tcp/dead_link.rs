//! Whether the other host of a connection still answers.
//!
//! The kernel gives up an idle connection after four probes without an answer, but one with data on their way only after
//! a quarter of an hour (`tcp_retries2`), and its TCP_USER_TIMEOUT also ends connections whose receiver is alive and
//! reads nothing. What it knows of a connection (`TCP_INFO`) tells the two apart: a host that is there acknowledges data
//! that are sent again (*retransmits*), and answers whether it has room (*probes*). Data that cannot even leave this host,
//! because of a blackhole route or a firewall's rule, are followed by probes, too.
//!
//! The kernel doubles the time between two attempts. So after an outage of 3 s, which must do no harm, the next attempt
//! may be seconds away: a host is only given up if it has not answered one that was made after such an outage. The
//! frames that this rank goes on sending count as attempts, too, so the last one may always be recent: there must be no
//! answer for a while, either since the last attempt or since there were enough of them.

use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use nix::libc;

/// Longest time without an answer: as for the connections of the control plane.
const TIMEOUT: Duration = Duration::from_millis(4750);
/// An outage of this length does no harm.
const OUTAGE: Duration = Duration::from_secs(3);
/// Time for the answer to an attempt.
const ROUND_TRIP: Duration = Duration::from_millis(500);

/// What the kernel knows of a connection.
#[derive(Debug, Clone, Copy, Default)]
struct State {
    /// Number of times that the oldest data were sent again. None of them was answered.
    retransmits: u8,
    /// Number of probes that were not answered.
    probes: u8,
    /// How often the time between two attempts was doubled.
    doublings: u8,
    /// Time until data are sent again, which is doubled each time, or the one from which the pauses between probes follow.
    timeout: Duration,
    /// Time since the last attempt.
    since_attempt: Duration,
    /// Time since anything was acknowledged.
    since_answer: Duration,
}

impl State {
    /// `None` if the kernel does not say.
    fn of(stream: &TcpStream) -> Option<Self> {
        // SAFETY: the structure consists of integers, for which zeros are valid.
        let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
        let mut length = size_of_val(&info) as libc::socklen_t;
        // SAFETY: the descriptor is open; the kernel writes at most `length` bytes to a live structure of that size.
        let result = unsafe {
            let value = (&raw mut info).cast();
            libc::getsockopt(stream.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, value, &raw mut length)
        };
        (result == 0).then(|| State {
            retransmits: info.tcpi_retransmits,
            probes: info.tcpi_probes,
            doublings: info.tcpi_backoff.min(16),
            timeout: Duration::from_micros(info.tcpi_rto.into()),
            since_attempt: Duration::from_millis(info.tcpi_last_data_sent.into()),
            since_answer: Duration::from_millis(info.tcpi_last_ack_recv.into()),
        })
    }

    /// Time from the first of the attempts without an answer to the last one, at least.
    fn attempted_for(&self) -> Duration {
        match (self.retransmits, self.probes) {
            (0, 0) => Duration::ZERO,
            // Before the last of them: half, a quarter … of the next pause.
            (0, probes) => {
                let pauses = (probes - 1).min(self.doublings);
                self.timeout * ((1 << self.doublings) - (1 << (self.doublings - pauses)))
            }
            (_, _) => self.timeout - self.timeout / (1 << self.doublings),
        }
    }

    /// Whether the attempts were enough, if the last one has no answer either.
    fn is_suspect(&self) -> bool {
        self.since_answer >= TIMEOUT && self.attempted_for() >= OUTAGE
    }
}

/// What is known of a connection from one check to the next.
#[derive(Debug, Default)]
pub(super) struct Link {
    /// Since when the connection has been suspect without an answer.
    suspect_since: Option<Instant>,
}

impl Link {
    /// How long the other host has not answered, if that is too long.
    pub(super) fn silence(&mut self, stream: &TcpStream) -> Option<Duration> {
        let state = State::of(stream)?;
        self.is_dead(&state, Instant::now()).then_some(state.since_answer)
    }

    fn is_dead(&mut self, state: &State, now: Instant) -> bool {
        if !state.is_suspect() {
            self.suspect_since = None;
            return false;
        }
        // There may have been an answer between two checks.
        let answered = now.checked_sub(state.since_answer);
        let since = self
            .suspect_since
            .filter(|since| answered.is_none_or(|answered| answered < *since))
            .unwrap_or(now);
        self.suspect_since = Some(since);
        state.since_attempt >= ROUND_TRIP || now - since >= ROUND_TRIP
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpListener;

    use super::*;

    const fn milliseconds(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    /// What the kernel says `now` after data were sent that nobody acknowledges, after `idle` time without any answer. The
    /// first pause is `pause`. Data leave this host or do not.
    fn unanswered(pause: Duration, idle: Duration, leave: bool, now: Duration) -> State {
        let (mut attempt, mut attempts) = (Duration::ZERO, 0u8);
        while attempt + pause * (1 << attempts) <= now {
            attempt += pause * (1 << attempts);
            attempts += 1;
        }
        State {
            retransmits: if leave { attempts } else { 0 },
            probes: if leave { 0 } else { attempts },
            doublings: attempts,
            timeout: if leave { pause * (1 << attempts) } else { pause },
            since_attempt: now - attempt,
            since_answer: idle + now,
        }
    }

    #[test]
    fn an_outage_of_three_seconds_does_no_harm_and_a_longer_one_is_noticed() {
        for pause in [201, 204, 250, 330, 400, 500, 800].map(milliseconds) {
            for (idle, leave) in [(0, true), (900, true), (3_600_000, true), (0, false), (900, false)] {
                // The first attempt after the outage is answered.
                let mut attempt = pause;
                while attempt < OUTAGE {
                    attempt = attempt * 2 + pause;
                }
                let answered = attempt + milliseconds(300);
                let last = if leave { answered } else { attempt * 2 + pause + milliseconds(300) };
                // This rank makes no further attempts, or one every 200 ms.
                for (recent, earliest) in
                    [(Duration::MAX, TIMEOUT), (milliseconds(200), TIMEOUT + ROUND_TRIP)]
                {
                    let (mut link, begin, mut now) = (Link::default(), Instant::now(), Duration::ZERO);
                    let state = |now: Duration| {
                        let state = unanswered(pause, milliseconds(idle), leave, now);
                        State { since_attempt: state.since_attempt.min(recent), ..state }
                    };
                    while !link.is_dead(&state(now), begin + now) {
                        now += milliseconds(10);
                    }
                    assert!(now > answered, "{pause:?} {idle}: given up after {now:?}");
                    let latest = (last + ROUND_TRIP).max(earliest);
                    assert!(now <= latest, "{pause:?} {idle} {recent:?}: only after {now:?}");
                }
            }
        }
    }

    #[test]
    fn a_host_that_has_answered_between_two_checks_is_asked_again() {
        let suspect = |idle| {
            let state = unanswered(milliseconds(200), milliseconds(idle), true, milliseconds(6400));
            State { since_attempt: Duration::ZERO, ..state }
        };
        let (mut link, begin) = (Link::default(), Instant::now());
        assert!(!link.is_dead(&suspect(0), begin));
        let later = begin + milliseconds(20_000);
        assert!(!link.is_dead(&suspect(0), later));
        assert!(link.is_dead(&suspect(600), later + milliseconds(600)));
    }

    #[test]
    fn a_receiver_without_room_that_answers_is_alive() {
        // Asked every minute, and just now.
        for (probes, since_attempt) in [(0, milliseconds(60_000)), (1, milliseconds(600))] {
            let timeout = milliseconds(200);
            let state = State {
                probes,
                doublings: 8,
                timeout,
                since_attempt,
                since_answer: milliseconds(60_000),
                retransmits: 0,
            };
            assert!(!state.is_suspect(), "{state:?}");
        }
    }

    #[test]
    fn a_receiver_that_reads_nothing_is_alive() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let _far = listener.accept().unwrap();
        near.set_nonblocking(true).unwrap();
        while near.write(&[0; 1 << 16]).is_ok() {}
        let state = State::of(&near).expect("the kernel knows its connections");
        assert!(!state.is_suspect(), "{state:?}");
    }
}
