//! Fault injection: tests how a job behaves when a rank fails.
//!
//! `mgpurun --inject rank=3,step=100,fault=sigkill` passes the text to the rank in `MGPU_INJECT`. The runtime triggers
//! the fault when the rank reaches the injection point. This is the only place where the runtime ends its host process,
//! and only because the user asked for it. By default a fault is triggered after the first start of the ranks only, so
//! a restarted job can continue; `restart=1` selects the start after the first restart.

use std::fmt;
use std::process::Command;
use std::str::FromStr;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// The point at which a fault is triggered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InjectionPoint {
    /// Before the rank joins the run.
    Start,
    /// After the rank has connected to the launcher and before it says hello.
    Join,
    /// At its first collective.
    Collective,
    /// When it begins this step (from 1).
    Step(u64),
    /// When it begins to write a checkpoint.
    Checkpoint,
    /// When it is about to leave the run.
    Finalise,
}

/// The kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// SIGABRT, as from a failed assertion in C.
    Abort,
    /// The process exits with this code.
    Exit(u8),
    /// SIGKILL, as from the kernel's OOM killer.
    Sigkill,
    /// SIGSTOP: the process exists but does not run.
    Sigstop,
    /// The thread sleeps forever.
    Hang,
    /// SIGSEGV.
    Segv,
    /// An allocation fails: the process limits its own address space and fills it.
    Oom,
    /// A panic.
    Panic,
    /// Leaves a child in its own session, with the usual signals ignored, and continues.
    LeakChild,
}

/// One fault of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Injection {
    /// The rank.
    pub rank: u32,
    /// When.
    pub point: InjectionPoint,
    /// What.
    pub fault: Fault,
    /// The number of restarts before the start in which it is triggered, from 0.
    pub restart: u32,
}

/// A fault that this rank has to trigger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScheduledInjection {
    /// Its index in the list of all ranks' faults.
    pub number: usize,
    /// The fault itself.
    pub injection: Injection,
}

const POINTS: [(&str, InjectionPoint); 5] = [
    ("start", InjectionPoint::Start),
    ("join", InjectionPoint::Join),
    ("collective", InjectionPoint::Collective),
    ("checkpoint", InjectionPoint::Checkpoint),
    ("finalise", InjectionPoint::Finalise),
];

const FAULTS: [(&str, Fault); 9] = [
    ("abort", Fault::Abort),
    ("exit0", Fault::Exit(0)),
    ("sigkill", Fault::Sigkill),
    ("sigstop", Fault::Sigstop),
    ("hang", Fault::Hang),
    ("segv", Fault::Segv),
    ("oom", Fault::Oom),
    ("panic", Fault::Panic),
    ("leak-child", Fault::LeakChild),
];

fn names<T>(known: &[(&'static str, T)]) -> String {
    known.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
}

fn named<T: Copy>(known: &[(&'static str, T)], wanted: &str) -> Option<T> {
    known.iter().find(|(name, _)| *name == wanted).map(|(_, value)| *value)
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(code) = text.strip_prefix("exit:") {
            return code
                .parse()
                .map(Fault::Exit)
                .map_err(|_| format!("`{code}` is not an exit code (0 to 255)"));
        }
        named(&FAULTS, text)
            .ok_or_else(|| format!("`{text}` is not a fault; choose one of {} or exit:N", names(&FAULTS)))
    }
}

impl FromStr for Injection {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (mut rank, mut point, mut fault, mut restart) = (None, None, None, 0);
        for part in text.split(',') {
            let (key, value) = part.split_once('=').ok_or_else(|| format!("`{part}` is not KEY=VALUE"))?;
            let number = || value.parse::<u32>().map_err(|_| format!("{key} `{value}` is not a number"));
            match key.trim() {
                "rank" => rank = Some(number()?),
                "step" => point = Some(InjectionPoint::Step(u64::from(number()?.max(1)))),
                "phase" => {
                    let problem =
                        || format!("`{value}` is not a phase; choose one of {}, or step=N", names(&POINTS));
                    point = Some(named(&POINTS, value).ok_or_else(problem)?);
                }
                "fault" => fault = Some(value.parse()?),
                "restart" => restart = number()?,
                other => {
                    return Err(format!(
                        "unknown key `{other}`; the keys are rank, step, phase, fault and restart"
                    ));
                }
            }
        }
        let missing = |what: &str| format!("no {what}; write for example rank=1,step=100,fault=sigkill");
        Ok(Injection {
            rank: rank.ok_or_else(|| missing("rank"))?,
            point: point.ok_or_else(|| missing("step or phase"))?,
            fault: fault.ok_or_else(|| missing("fault"))?,
            restart,
        })
    }
}

impl fmt::Display for InjectionPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InjectionPoint::Step(step) => write!(f, "step={step}"),
            other => {
                let name = POINTS.iter().find(|(_, point)| point == other).map_or("", |(name, _)| name);
                write!(f, "phase={name}")
            }
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match FAULTS.iter().find(|(_, fault)| fault == self) {
            Some((name, _)) => f.write_str(name),
            None => match self {
                Fault::Exit(code) => write!(f, "exit:{code}"),
                other => write!(f, "{other:?}"),
            },
        }
    }
}

/// The text that [`FromStr`] parses.
impl fmt::Display for Injection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank={},{},fault={}", self.rank, self.point, self.fault)?;
        if self.restart > 0 {
            write!(f, ",restart={}", self.restart)?;
        }
        Ok(())
    }
}

impl Fault {
    /// Triggers the fault in this process. Returns only if the process can continue (SIGSTOP, after SIGCONT, and
    /// [`LeakChild`](Self::LeakChild)).
    pub fn trigger(self) {
        match self {
            Fault::Abort => std::process::abort(),
            Fault::Exit(code) => std::process::exit(code.into()),
            Fault::Sigkill => end_by(Signal::SIGKILL),
            Fault::Segv => end_by(Signal::SIGSEGV),
            Fault::Hang => hang(),
            Fault::Oom => exhaust_memory(),
            Fault::Panic => panic!("a fault was injected: this rank panics"),
            // Not sent again after a SIGCONT.
            Fault::Sigstop => _ = kill(Pid::this(), Signal::SIGSTOP),
            Fault::LeakChild => leak_child(),
        }
    }
}

/// Sends the signal until it works: the standard library's SIGSEGV handler returns from the first signal that no memory
/// access caused, after restoring the default action for the next one.
fn end_by(signal: Signal) -> ! {
    loop {
        let _ = kill(Pid::this(), signal);
    }
}

fn hang() -> ! {
    loop {
        std::thread::park();
    }
}

/// Address space that is left to fill, in bytes.
const ROOM: u64 = 256 << 20;

/// Allocates until an allocation fails. A limit on this process's address space protects the memory of others.
fn exhaust_memory() -> ! {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = statm.split(' ').next().and_then(|pages| pages.parse().ok()).unwrap_or(0);
    let (_, hard) = getrlimit(Resource::RLIMIT_AS).unwrap_or((0, u64::MAX));
    let limited =
        setrlimit(Resource::RLIMIT_AS, (pages * crate::shm::page_size() as u64 + ROOM).min(hard), hard);
    assert!(limited.is_ok(), "a fault was injected: memory could not be limited ({limited:?})");
    let mut taken: Vec<Vec<u8>> = Vec::new();
    loop {
        taken.push(vec![1; 16 << 20]);
    }
}

/// A shell in its own session starts a sleeping process and exits, which makes that process an orphan.
fn leak_child() {
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' HUP INT TERM; sleep 100000 & exit 0"]);
    crate::process::detach(&mut command);
    let status = command.status();
    assert!(
        status.as_ref().is_ok_and(|status| status.success()),
        "a fault was injected: no child ({status:?})"
    );
}

/// Joins injections to one text for the environment.
pub fn join(injections: &[Injection]) -> String {
    injections.iter().map(Injection::to_string).collect::<Vec<_>>().join(";")
}

/// Parses the text that [`join`] returned.
pub fn split(text: &str) -> Result<Vec<Injection>, String> {
    text.split(';').filter(|part| !part.is_empty()).map(str::parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn injections_round_trip_through_text() {
        for text in [
            "rank=3,step=100,fault=abort",
            "rank=0,phase=start,fault=exit:7",
            "rank=1,phase=finalise,fault=exit0",
            "rank=1,phase=collective,fault=leak-child,restart=2",
        ] {
            assert_eq!(text.parse::<Injection>().unwrap().to_string(), text);
        }
        let two = "rank=1,phase=join,fault=hang;rank=2,step=5,fault=oom";
        assert_eq!(join(&split(two).unwrap()), two);
        assert_eq!(split(""), Ok(Vec::new()));
    }

    #[test]
    fn parse_errors_list_the_valid_values() {
        for (text, expected) in [
            ("rank=3", "no step or phase; write for example"),
            ("step=1,fault=hang", "no rank"),
            ("rank=1,step=1", "no fault"),
            ("rank=x,step=1,fault=hang", "rank `x` is not a number"),
            ("rank=1,step=1,fault=nap", "`nap` is not a fault; choose one of abort, exit0"),
            ("rank=1,phase=lunch,fault=hang", "choose one of start, join, collective, checkpoint, finalise"),
            ("rank=1,step=1,fault=exit:999", "`999` is not an exit code"),
            ("rank=1,when=now", "unknown key `when`"),
            ("now", "`now` is not KEY=VALUE"),
        ] {
            let error = text.parse::<Injection>().unwrap_err();
            assert!(error.contains(expected), "`{error}` should contain `{expected}`");
        }
    }
}
