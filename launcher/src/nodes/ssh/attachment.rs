//! What an agent of `--hosts` reads from its standard input, after the line with the secret: the names of signals, one a
//! line. The end of it means that nobody reads this agent's output or can stop it any more: its connection or the
//! `mgpurun` that the user started is gone, so the job ends.
//!
//! First it writes a [line](GREETING), so that the starter knows whose exit code it will get: that of the job, or that of ssh or
//! a shell which could not start the agent.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getppid};

use crate::Interrupter;

/// The first line of an agent's standard error. The starter does not pass it on.
pub(super) const GREETING: &str = "mgpurun: started by --hosts\n";

/// Longest line.
const MAX_LINE: u64 = 32;

/// Follows the standard input of this process on a thread. The secret has been read.
///
/// # Errors
/// If the system refuses a descriptor or a thread.
pub(crate) fn follow(interrupter: Interrupter) -> io::Result<()> {
    let input = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    // If nobody reads it, the end of the standard input says so.
    let _ = io::stderr().write_all(GREETING.as_bytes());
    // It forwards signals, and tells a first one from a second.
    let guardian = getppid();
    let follow = move || {
        read_signals(BufReader::new(input), guardian);
        interrupter.interrupt();
    };
    std::thread::Builder::new().name("attachment".into()).spawn(follow).map(drop)
}

/// Sends the signals that `input` names to `guardian`, until it ends.
fn read_signals(mut input: impl BufRead, guardian: Pid) {
    let mut line = String::new();
    loop {
        line.clear();
        match input.by_ref().take(MAX_LINE).read_line(&mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        if let Ok(signal) = line.trim_end().parse::<Signal>() {
            // Fails if the guardian was killed, which ends the run in any case.
            let _ = kill(guardian, signal);
        }
    }
}
