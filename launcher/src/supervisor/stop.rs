//! A stop on request: the ranks save their work and end by themselves.
//!
//! Ranks that ask again and again whether they should stop (`World::stop_requested`) are asked through the rendezvous and
//! get no signal. They have the stop grace for it, which is longer than the grace time after a failure, because they save
//! their work in it. A rank that then exits with code 74 has not failed. Whatever happens after the request, the ranks are
//! not restarted.

use std::time::Instant;

use mgpu_control::protocol::EXIT_STOPPED;
use nix::sys::signal::Signal;

use super::{Action, Exit, Outcome, Stage, Supervisor};
use crate::exit_code;
use crate::interrupt::ends_the_run;

/// Who asks the ranks to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopCause {
    /// This process has got a signal.
    Signal(Signal),
    /// The time of `--stop-after` has passed.
    Time,
    /// One of the ranks.
    Rank,
}

impl StopCause {
    /// For messages: "SIGTERM".
    pub(crate) fn name(self) -> &'static str {
        match self {
            StopCause::Signal(signal) => signal.as_str(),
            StopCause::Time => "--stop-after",
            StopCause::Rank => "asked by a rank",
        }
    }

    /// The signal, if it is one that ends a run.
    fn ending_signal(self) -> Option<Signal> {
        match self {
            StopCause::Signal(signal) => Some(signal).filter(|signal| ends_the_run(*signal)),
            StopCause::Time | StopCause::Rank => None,
        }
    }
}

/// A stop on request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stop {
    cause: StopCause,
    /// The first signal that ends the run; a second one kills the ranks.
    signal: Option<Signal>,
    /// Some rank has exited with the code of a stop.
    has_stopped: bool,
}

impl Stop {
    /// The outcome if all ranks have ended by themselves: a stop, unless all of them had finished.
    pub(super) fn outcome(self) -> Option<Outcome> {
        // Whoever presses Ctrl-C or closes the terminal does not want a script to start the run again.
        let exit_code = match self.signal {
            Some(signal @ (Signal::SIGINT | Signal::SIGHUP)) => exit_code::signalled(signal as i32),
            _ => exit_code::STOPPED,
        };
        self.has_stopped.then(|| Outcome { exit_code, ..Outcome::stopped(self.cause) })
    }

    /// The outcome if the ranks did not stop in time, or the user did not want to wait.
    fn killed(self) -> Outcome {
        let outcome = Outcome::interruption(self.signal.unwrap_or(Signal::SIGKILL));
        match self.signal {
            Some(_) => outcome,
            None => Outcome {
                message: Some(format!("killed, since the ranks did not stop ({})", self.cause.name())),
                ..outcome
            },
        }
    }
}

impl Supervisor {
    /// Asks the ranks to stop by themselves. A second signal that ends the run kills them.
    pub(super) fn stop_asked(&mut self, cause: StopCause, now: Instant) -> Vec<Action> {
        let signal = cause.ending_signal();
        match (self.stage, &mut self.stop) {
            (Stage::Running, _) => {}
            (Stage::Stopping(_), Some(stop)) => {
                let Some(signal) = signal else { return Vec::new() };
                if stop.signal.replace(signal).is_some() {
                    return self.kill_stopping(now);
                }
                // Whoever sends it waits as long from now on.
                self.stage = Stage::Stopping(now + self.stop_grace);
                return Vec::new();
            }
            // The run fails or ends already, and whoever asks does not want it to be restarted. A rank of a failing run
            // may ask because of the failure.
            _ => {
                self.interrupted |= cause != StopCause::Rank;
                return signal.map_or_else(Vec::new, |signal| self.signalled(signal, now));
            }
        }
        self.interrupted = true;
        self.stop = Some(Stop { cause, signal, has_stopped: false });
        self.stage = Stage::Stopping(now + self.stop_grace);
        let seconds = self.stop_grace.as_secs_f64();
        let text = format!("stopping ({}): the ranks have {seconds} s to save their work", cause.name());
        // In case they are stopped by a signal.
        [vec![Action::Say(text), Action::AskToStop], self.to_all(Signal::SIGCONT)].concat()
    }

    /// Notes the end of a rank. True if it has done what it was asked to, also after the failure of another rank.
    pub(super) fn has_stopped(&mut self, exit: Exit) -> bool {
        match (self.stage, &mut self.stop) {
            (Stage::Stopping(_) | Stage::Failing(_), Some(stop))
                if exit == Exit::Code(i32::from(EXIT_STOPPED)) =>
            {
                stop.has_stopped = true;
                true
            }
            _ => false,
        }
    }

    /// Kills ranks that do not stop.
    pub(super) fn kill_stopping(&mut self, now: Instant) -> Vec<Action> {
        let Some(stop) = self.stop else { return Vec::new() };
        self.outcome.get_or_insert_with(|| stop.killed());
        [self.settle(), self.kill_all(now)].concat()
    }
}
