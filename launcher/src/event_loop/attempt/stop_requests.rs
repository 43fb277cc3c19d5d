//! Requests to stop: signals and the time of `--stop-after`, for ranks that stop by themselves and for others.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::Attempt;
use crate::interrupt::ends_the_run;
use crate::supervisor::{Event, StopCause};

/// How long after their start ranks have time for their first stop check, before SIGUSR1 is forwarded to them: it would
/// end a program that is about to ask whether it should stop.
pub(super) const TIME_TO_FIRST_CHECK: Duration = Duration::from_secs(5);
/// Interval at which their first stop check is polled while SIGUSR1 is held.
const HELD_STOP_POLL_INTERVAL: Duration = Duration::from_millis(20);

impl Attempt<'_> {
    /// The event of a signal to this process. Ranks that stop by themselves are asked to instead of being sent it. SIGUSR1
    /// for ranks that have just been started is held.
    pub(super) fn event_of(&mut self, signal: Signal) -> Option<Event> {
        if ends_the_run(signal) {
            self.held_stop = None;
        }
        let asks = ends_the_run(signal) && signal != Signal::SIGKILL || signal == Signal::SIGUSR1;
        if asks && self.can_stop() {
            return Some(Event::StopAsked(StopCause::Signal(signal)));
        }
        if signal == Signal::SIGUSR1 && !self.runs_ranks() {
            return None;
        }
        if signal == Signal::SIGUSR1 && Instant::now() < self.hold_until {
            self.held_stop = Some(Instant::now() + HELD_STOP_POLL_INTERVAL);
            return None;
        }
        Some(Event::Signalled(signal))
    }

    /// Holds SIGUSR1, which has arrived before the start of the ranks.
    pub(in super::super) fn hold_stop(&mut self) {
        self.held_stop = Some(Instant::now());
    }

    /// True if SIGUSR1 is held, and neither the ranks nor the supervisor knows of it.
    pub(in super::super) fn holds_stop(&self) -> bool {
        self.held_stop.is_some()
    }

    /// The event of a SIGUSR1 that is held, once the ranks stop by themselves or have had the time for it.
    pub(super) fn release_held_stop(&mut self) -> Option<Event> {
        let now = Instant::now();
        self.held_stop.filter(|at| *at <= now)?;
        let event = match self.can_stop() {
            true => Event::StopAsked(StopCause::Signal(Signal::SIGUSR1)),
            false if now >= self.hold_until => Event::Signalled(Signal::SIGUSR1),
            false => {
                self.held_stop = Some(now + HELD_STOP_POLL_INTERVAL);
                return None;
            }
        };
        self.held_stop = None;
        Some(event)
    }

    /// True if a rank of this host is still running.
    pub(in super::super) fn runs_ranks(&self) -> bool {
        self.ranks.iter().any(|rank| rank.ended.is_none())
    }

    /// True if all ranks of this host that still run stop by themselves when they are asked to. False if none runs.
    pub(in super::super) fn can_stop(&self) -> bool {
        self.server.can_stop(|rank| self.process_of(rank).is_none_or(|process| process.ended.is_some()))
    }
}
