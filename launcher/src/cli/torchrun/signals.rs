//! The list of `--signals-to-handle`.

use std::str::FromStr;

use nix::sys::signal::Signal;

/// Signals that a launcher cannot take: the kernel's own, those of its children, and those of its own faults.
const NOT_FORWARDED: [Signal; 7] = [
    Signal::SIGKILL,
    Signal::SIGSTOP,
    Signal::SIGCHLD,
    Signal::SIGSEGV,
    Signal::SIGBUS,
    Signal::SIGILL,
    Signal::SIGFPE,
];

/// Signals that have a meaning for mgpurun, listed or not.
const HANDLED: [Signal; 6] =
    [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGUSR1, Signal::SIGUSR2];

/// Names of signals, separated by commas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SignalList(Vec<Signal>);

impl SignalList {
    /// Those that only this list makes mgpurun forward.
    pub(super) fn into_forwarded(self) -> Vec<Signal> {
        self.0.into_iter().filter(|signal| !HANDLED.contains(signal)).collect()
    }
}

impl FromStr for SignalList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let signal = |name: &str| match name.trim().parse::<Signal>() {
            Ok(signal) if NOT_FORWARDED.contains(&signal) => Err(format!("{signal} cannot be forwarded")),
            Ok(signal) => Ok(signal),
            Err(_) => Err(format!("`{name}` is not the name of a signal, such as SIGXCPU")),
        };
        text.split(',').map(signal).collect::<Result<_, _>>().map(SignalList)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_beyond_those_of_mgpurun_are_forwarded() {
        let forwarded = |text: &str| text.parse::<SignalList>().map(SignalList::into_forwarded);
        assert_eq!(forwarded("SIGTERM,SIGINT,SIGHUP,SIGQUIT"), Ok(vec![]));
        assert_eq!(forwarded("SIGTERM, SIGXCPU,SIGUSR1"), Ok(vec![Signal::SIGXCPU]));
        for (text, why) in [
            ("", "`` is not"),
            ("SIGTERM,", "`` is not"),
            ("USR1", "`USR1` is not"),
            ("SIGKILL", "SIGKILL cannot"),
            ("SIGSEGV", "SIGSEGV cannot"),
        ] {
            assert!(forwarded(text).unwrap_err().starts_with(why), "{text}");
        }
    }
}
