//! Supervised programs: started, with a time limit, their output collected.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// No test program takes this long unless it hangs.
const LIMIT: Duration = Duration::from_secs(240);

/// The results of a program.
#[derive(Debug)]
pub struct Finished {
    /// Exit code, `None` if a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Finished {
    /// The last line of standard output as JSON.
    ///
    /// # Panics
    /// If there is none.
    pub fn json(&self) -> serde_json::Value {
        let line = self.stdout.lines().last().unwrap_or_default();
        serde_json::from_str(line).unwrap_or_else(|error| panic!("{error} in {self:#?}"))
    }

    /// The weights checksum printed by a training.
    ///
    /// # Panics
    /// If the training failed or printed none.
    #[track_caller]
    pub fn weights(&self) -> String {
        assert_eq!(self.code, Some(0), "{self:#?}");
        self.json()["weights"].as_str().expect("a checksum of the weights").to_owned()
    }

    /// Asserts the exit code, and that each of `texts` occurs in the output.
    ///
    /// # Panics
    /// If not.
    #[track_caller]
    pub fn expect(&self, code: i32, texts: &[&str]) -> &Self {
        assert_eq!(self.code, Some(code), "exit code of {self:#?}");
        for text in texts {
            assert!(self.stdout.contains(text) || self.stderr.contains(text), "no `{text}` in {self:#?}");
        }
        self
    }
}

/// Environment variables of a rank under any of the launchers, and of its data folder.
const OWN: [&str; 11] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MGPU_RENDEZVOUS",
    "MGPU_DATA",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "SLURM_STEP_ID",
];

/// A command without rank variables and data folders of this process.
pub fn command(program: impl AsRef<Path>) -> Command {
    let mut command = Command::new(program.as_ref());
    for name in OWN {
        command.env_remove(name);
    }
    command.env_remove("XDG_CACHE_HOME").env("HOME", "/dev/null/home").stdin(Stdio::null());
    command
}

/// A program of this package and the launcher, whose paths only tests know.
#[derive(Debug, Clone, Copy)]
pub struct Program {
    /// The launcher.
    pub launcher: &'static str,
    /// The program itself.
    pub path: &'static str,
}

impl Program {
    /// The program without a launcher.
    pub fn alone(self) -> Command {
        command(self.path)
    }

    /// The program as ranks of the launcher, without prefixes.
    pub fn launched(self, ranks: u32) -> Command {
        self.launched_with(ranks, &[])
    }

    /// The same, with additional launcher options.
    pub fn launched_with(self, ranks: u32, options: &[&str]) -> Command {
        let mut launcher = command(self.launcher);
        launcher.args(["-n", &ranks.to_string(), "--no-prefix"]).args(options).arg(self.path);
        launcher
    }
}

/// Runs a program with a private file system of `size` mounted at `disk`, after running `prepare` in it. Finally
/// prints a line `on the disk: …` for each file there, with its first line. The file system disappears with the
/// program.
pub fn on_a_small_disk(disk: &Path, size: &str, prepare: &str, program: impl AsRef<Path>) -> Command {
    let script = format!(
        r#"cd "$0" && mount -t tmpfs -o size={size} none . && cd . && cd "$0" || {{ echo no small disk >&2; exit 99; }}
        {{ {prepare}; }} 2>/dev/null; "$@"; code=$?
        find . -type f ! -name filler | while read -r file; do echo "on the disk: ${{file#./}} $(head -c 40 "$file" | head -1)"; done
        exit $code"#
    );
    let mut command = command("unshare");
    command.args(["--mount", "--map-root-user", "sh", "-c", &script]).arg(disk).arg(program.as_ref());
    command
}

/// Whether mounting is forbidden here; prints that the test is skipped.
pub fn mounting_is_forbidden(finished: &Finished) -> bool {
    let none = finished.code == Some(99) || finished.stderr.starts_with("unshare: ");
    if none {
        eprintln!("skipped: this environment forbids mounting: {}", finished.stderr);
    }
    none
}

/// Runs a command to its end.
///
/// # Panics
/// If it cannot be started, or exceeds the time limit (then it is killed).
#[track_caller]
pub fn run(command: &mut Command) -> Finished {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.unwrap_or_else(|error| panic!("{command:?}: {error}"));
    finish(&mut child)
}

/// Waits for a child whose output is piped.
///
/// # Panics
/// If it exceeds the time limit (then it is killed).
#[track_caller]
pub fn finish(child: &mut Child) -> Finished {
    let stdout = collect(child.stdout.take().expect("a piped standard output"));
    let stderr = collect(child.stderr.take().expect("a piped standard error"));
    let late = "killed by the test: it ran too long";
    let (Ok(stdout), Ok(stderr)) = (stdout.recv_timeout(LIMIT), stderr.recv_timeout(LIMIT)) else {
        let _ = child.kill();
        panic!("{late}");
    };
    let status = child.wait().expect("a child can be waited for");
    Finished { code: status.code(), stdout, stderr }
}

/// Waits until `condition` holds.
///
/// # Panics
/// If it does not hold within the time limit.
#[track_caller]
pub fn until(mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < LIMIT, "a condition that never came true");
        std::thread::park_timeout(Duration::from_millis(2));
    }
}

/// The processes with `mark` in their environment: the leftover processes of a run. Zombies do not count.
pub fn survivors(mark: &str) -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").expect("/proc can be read").flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let marked = |pid: &u32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes())
    };
    pids.filter(marked).collect()
}

fn collect(mut stream: impl Read + Send + 'static) -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = stream.read_to_end(&mut bytes);
        let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    receiver
}
