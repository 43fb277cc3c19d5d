//! Waiting for several descriptors, within the loop and after it.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;

use crate::interrupt::{Signals, ends_the_run};
use crate::output::{Output, Stream};

/// The source that a descriptor belongs to.
#[derive(Debug, Clone, Copy)]
pub(super) enum Source {
    Signals,
    Guardian,
    /// A source of the job with this index.
    Job(usize, JobSource),
    Writable(Stream),
    Log,
}

/// A source of one job.
#[derive(Debug, Clone, Copy)]
pub(super) enum JobSource {
    Server,
    /// A rank; a leftover process once all ranks have ended.
    Exit(u32),
    Pipe(u32, Stream),
}

/// Waits until all output and logs are written, `timeout` has passed or a signal that ends the run arrives.
pub(crate) fn flush(output: &mut Output, signals: &Signals, timeout: Option<Duration>) {
    let deadline = timeout.map(|timeout| Instant::now() + timeout);
    output.close();
    while output.is_pending() && deadline.is_none_or(|deadline| Instant::now() < deadline) {
        if pass_on(output, signals, deadline).is_some() {
            break;
        }
    }
    // Problems found in the last iteration, such as a full disk, still have to be reported.
    output.tick(Instant::now());
    output.abandon_logs();
}

/// One iteration of the event loop without ranks: writes pending output, until `deadline`. Returns a signal that ends the
/// run, if one arrived; the end of the guardian counts as SIGKILL.
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

/// The sources of signals.
pub(super) fn signal_sources(signals: &Signals) -> impl Iterator<Item = (Source, BorrowedFd<'_>)> {
    let guardian = signals.guardian().map(|fd| (Source::Guardian, fd));
    signals.fds().map(|fd| (Source::Signals, fd)).chain(guardian)
}

/// The sources that the output waits for.
pub(super) fn output_sources(output: &Output) -> impl Iterator<Item = (Source, BorrowedFd<'_>)> {
    let writable = output.waiting().map(|(stream, fd)| (Source::Writable(stream), fd));
    writable.chain(output.log_bell().map(|fd| (Source::Log, fd)))
}

/// Waits until a source is ready or `deadline` has passed. Returns the ready sources.
pub(super) fn poll_sources(sources: &[(Source, BorrowedFd<'_>)], deadline: Option<Instant>) -> Vec<Source> {
    poll_sources_and(sources, Vec::new(), deadline).0
}

/// As [`poll_sources`], for `more` descriptors too. Returns also which of these are ready.
pub(super) fn poll_sources_and<'fd>(
    sources: &[(Source, BorrowedFd<'fd>)],
    more: Vec<PollFd<'fd>>,
    deadline: Option<Instant>,
) -> (Vec<Source>, Vec<bool>) {
    let wanted = |source: &Source| match source {
        Source::Writable(_) => PollFlags::POLLOUT,
        _ => PollFlags::POLLIN,
    };
    let mut fds: Vec<PollFd<'_>> =
        sources.iter().map(|(source, fd)| PollFd::new(*fd, wanted(source))).chain(more).collect();
    let time_left = deadline.map_or(PollTimeout::NONE, |deadline| {
        let left = deadline.saturating_duration_since(Instant::now());
        // Rounded up: waking a fraction of a millisecond early would only cost another iteration.
        PollTimeout::try_from(left.as_millis() + 1).unwrap_or(PollTimeout::MAX)
    });
    // After an interrupted poll nothing is ready; the next iteration of the loop waits again.
    let is_interrupted = poll(&mut fds, time_left).is_err();
    let is_ready = |fd: &PollFd<'_>| !is_interrupted && fd.revents().is_some_and(|events| !events.is_empty());
    let ready = fds.iter().zip(sources).filter(|(fd, _)| is_ready(fd)).map(|(_, (source, _))| *source);
    (ready.collect(), fds[sources.len()..].iter().map(is_ready).collect())
}
