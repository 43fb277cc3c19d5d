//! How a rank's process ended, and how messages describe it.

use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};

use crate::exit_code;
use crate::interrupt::ends_the_run;

/// How a rank's process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Exit {
    /// It exited with this code.
    Code(i32),
    /// It was killed by this signal.
    Signal(i32),
}

impl Exit {
    pub(crate) fn code(self) -> u8 {
        match self {
            Exit::Code(code) => code as u8,
            Exit::Signal(signal) => exit_code::signalled(signal),
        }
    }

    /// As [`describe`](Self::describe), for a rank to which the launcher has sent signals: says so, because the end is
    /// not the rank's own failure.
    pub(crate) fn describe_signalled(self) -> String {
        match self {
            Exit::Signal(signal) if Signal::try_from(signal).is_ok_and(ends_the_run) => {
                format!("{}, which mgpurun sent", self.describe())
            }
            _ => self.describe(),
        }
    }

    /// A predicate: "exited with code 3".
    pub fn describe(self) -> String {
        match self {
            Exit::Code(code) => format!("exited with code {code}"),
            Exit::Signal(signal) => match Signal::try_from(signal) {
                Ok(name) => format!("was killed by {name}"),
                Err(_) => format!("was killed by signal {signal}"),
            },
        }
    }
}
