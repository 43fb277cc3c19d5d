//! Faults on request: how a job behaves when a rank goes wrong can be tried before it happens.
//!
//! `mgpurun --inject rank=3,step=100,fault=sigkill` hands the text to the rank in `MGPU_INJECT`; the runtime commits the
//! fault when the rank comes to the point. This is the one place where the runtime ends its host process, and only
//! because it was asked to. A fault strikes in the first life of a rank, so that a job that is restarted can go on;
//! `restart=1` means the second.

use std::fmt;
use std::process::Command;
use std::str::FromStr;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// When a fault strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InjectionPoint {
    /// Before the rank joins the run.
    Start,
    /// Connected to the launcher, but not yet known to it.
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

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// SIGABRT, as a failed assertion in C.
    Abort,
    /// The process exits with this code.
    Exit(u8),
    /// SIGKILL, as by the kernel when memory is short.
    Sigkill,
    /// SIGSTOP: the process is there, and does nothing.
    Sigstop,
    /// The thread sleeps for ever.
    Hang,
    /// SIGSEGV.
    Segv,
    /// An allocation fails: the process limits its own address space and fills it.
    Oom,
    /// A panic.
    Panic,
    /// Leaves a child in a session of its own, with the usual signals ignored, and goes on.
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
    /// In which of the rank's lives, from 0.
    pub restart: u32,
}

/// A fault that this rank is to commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScheduledInjection {
    /// Its place in the list of all ranks' faults.
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
            return code.parse().map(Fault::Exit).map_err(|_| format!("`{code}` is no exit code (0 to 255)"));
        }
        named(&FAULTS, text)
            .ok_or_else(|| format!("`{text}` is no fault; known are {} and exit:N", names(&FAULTS)))
    }
}

impl FromStr for Injection {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (mut rank, mut point, mut fault, mut restart) = (None, None, None, 0);
        for part in text.split(',') {
            let (key, value) = part.split_once('=').ok_or_else(|| format!("`{part}` is not KEY=VALUE"))?;
            let number = || value.parse::<u32>().map_err(|_| format!("{key} `{value}` is no number"));
            match key.trim() {
                "rank" => rank = Some(number()?),
                "step" => point = Some(InjectionPoint::Step(u64::from(number()?.max(1)))),
                "phase" => {
                    let problem =
                        || format!("`{value}` is no phase; known are {}, or step=N", names(&POINTS));
                    point = Some(named(&POINTS, value).ok_or_else(problem)?);
                }
                "fault" => fault = Some(value.parse()?),
                "restart" => restart = number()?,
                other => {
                    return Err(format!("unknown `{other}`; known are rank, step, phase, fault, restart"));
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

/// As [`FromStr`] reads it.
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
    /// Does it to this process. Returns only from what leaves the process as it was.
    pub fn trigger(self) {
        match self {
            Fault::Abort => std::process::abort(),
            Fault::Exit(code) => std::process::exit(code.into()),
            Fault::Sigkill => end_by(Signal::SIGKILL),
            Fault::Segv => end_by(Signal::SIGSEGV),
            Fault::Hang => hang(),
            Fault::Oom => exhaust_memory(),
            Fault::Panic => panic!("a fault was injected: this rank panics"),
            // Not sent again when somebody lets the process go on.
            Fault::Sigstop => _ = kill(Pid::this(), Signal::SIGSTOP),
            Fault::LeakChild => leak_child(),
        }
    }
}

/// Sent until it works: the standard library's handler of SIGSEGV returns once from a signal that no access caused, and
/// only then leaves the next one to the kernel.
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

/// What is left of the address space to be filled.
const ROOM: u64 = 256 << 20;

/// Allocates until that fails, within a limit of its own: other processes keep their memory.
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

/// A shell in a session of its own starts a sleeper and exits, which makes the sleeper nobody's child.
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

/// Several injections as one text, for the environment.
pub fn join(injections: &[Injection]) -> String {
    injections.iter().map(Injection::to_string).collect::<Vec<_>>().join(";")
}

/// Reads what [`join`] wrote.
pub fn split(text: &str) -> Result<Vec<Injection>, String> {
    text.split(';').filter(|part| !part.is_empty()).map(str::parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
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
    fn mistakes_say_what_is_known() {
        for (text, expected) in [
            ("rank=3", "no step or phase; write for example"),
            ("step=1,fault=hang", "no rank"),
            ("rank=1,step=1", "no fault"),
            ("rank=x,step=1,fault=hang", "rank `x` is no number"),
            ("rank=1,step=1,fault=nap", "`nap` is no fault; known are abort, exit0"),
            ("rank=1,phase=lunch,fault=hang", "known are start, join, collective, checkpoint, finalise"),
            ("rank=1,step=1,fault=exit:999", "`999` is no exit code"),
            ("rank=1,when=now", "unknown `when`"),
            ("now", "`now` is not KEY=VALUE"),
        ] {
            let error = text.parse::<Injection>().unwrap_err();
            assert!(error.contains(expected), "`{error}` should contain `{expected}`");
        }
    }
}
