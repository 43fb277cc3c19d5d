//! Waiting for several things at once, within the loop and after it.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;

use crate::interrupt::{Signals, ends_the_run};
use crate::output::{Output, Stream};

/// What a ready descriptor belongs to.
#[derive(Debug, Clone, Copy)]
pub(super) enum Source {
    Signals,
    Guardian,
    Server,
    Exit(u32),
    Pipe(u32, Stream),
    Writable(Stream),
    Log,
}

/// Lets `pause` pass, while what was written goes out. The signal that wants the run to end, if one comes meanwhile.
pub(crate) fn wait_out(pause: Duration, signals: &Signals, output: &mut Output) -> Option<Signal> {
    let deadline = Instant::now() + pause;
    while Instant::now() < deadline {
        let signal = pass_on(output, signals, Some(deadline));
        if signal.is_some() {
            return signal;
        }
    }
    None
}

/// Waits until the readers of our output and the logs have taken everything, `timeout` has passed or a signal says
/// to give up.
pub(crate) fn flush(output: &mut Output, signals: &Signals, timeout: Option<Duration>) {
    let deadline = timeout.map(|timeout| Instant::now() + timeout);
    output.close();
    while output.is_pending() && deadline.is_none_or(|deadline| Instant::now() < deadline) {
        if pass_on(output, signals, deadline).is_some() {
            break;
        }
    }
    // What was found out in the last turn, such as a full disk, is still to be said.
    output.tick(Instant::now());
    output.abandon_logs();
}

/// A turn of the event loop without ranks: passes output on when there is room, until `deadline`. The signal that wants
/// the run to end, if one came; the end of the guardian counts as SIGKILL.
fn pass_on(output: &mut Output, signals: &Signals, deadline: Option<Instant>) -> Option<Signal> {
    let mut end = None;
    let mut sources: Vec<_> = signal_sources(signals).collect();
    sources.extend(output_sources(output));
    for source in poll_sources(&sources, deadline.into_iter().chain(output.next_deadline()).min()) {
        match source {
            Source::Writable(stream) => output.resume(stream),
            Source::Signals => end = end.or(signals.take().into_iter().find(|signal| ends_the_run(*signal))),
            Source::Guardian => end = end.or(Some(Signal::SIGKILL)),
            _ => {}
        }
    }
    output.tick(Instant::now());
    end
}

/// What a user can make happen.
pub(super) fn signal_sources(signals: &Signals) -> impl Iterator<Item = (Source, BorrowedFd<'_>)> {
    let guardian = signals.guardian().map(|fd| (Source::Guardian, fd));
    signals.fds().map(|fd| (Source::Signals, fd)).chain(guardian)
}

/// What the output waits for.
pub(super) fn output_sources(output: &Output) -> impl Iterator<Item = (Source, BorrowedFd<'_>)> {
    let writable = output.waiting().map(|(stream, fd)| (Source::Writable(stream), fd));
    writable.chain(output.log_bell().map(|fd| (Source::Log, fd)))
}

/// The sources that are ready, after a sleep until one is or `deadline` has passed.
pub(super) fn poll_sources(sources: &[(Source, BorrowedFd<'_>)], deadline: Option<Instant>) -> Vec<Source> {
    let wanted = |source: &Source| match source {
        Source::Writable(_) => PollFlags::POLLOUT,
        _ => PollFlags::POLLIN,
    };
    let mut fds: Vec<PollFd<'_>> =
        sources.iter().map(|(source, fd)| PollFd::new(*fd, wanted(source))).collect();
    let time_left = deadline.map_or(PollTimeout::NONE, |deadline| {
        let left = deadline.saturating_duration_since(Instant::now());
        // Rounded up: waking a fraction of a millisecond early would only mean another turn.
        PollTimeout::try_from(left.as_millis() + 1).unwrap_or(PollTimeout::MAX)
    });
    // An interrupted poll leaves nothing ready: the next turn of the loop waits again.
    if poll(&mut fds, time_left).is_err() {
        return Vec::new();
    }
    let is_ready = |fd: &PollFd<'_>| fd.revents().is_some_and(|events| !events.is_empty());
    fds.iter().zip(sources).filter(|(fd, _)| is_ready(fd)).map(|(_, (source, _))| *source).collect()
}
