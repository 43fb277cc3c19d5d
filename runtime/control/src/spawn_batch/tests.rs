use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, Signal, sigaction};
use nix::sys::wait::{WaitStatus, waitpid};

use super::child::{Step, discard_pending_signals};
use super::*;

/// Everything that a child writes to one of its streams, and how it ends.
fn finish_child(child: Spawned, stream: usize) -> (String, WaitStatus) {
    let [out, err] = child.pipes;
    let mut pipe = File::from(if stream == 1 { out } else { err });
    let mut bytes = Vec::new();
    loop {
        poll(&mut [PollFd::new(pipe.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE).unwrap();
        match pipe.read_to_end(&mut bytes) {
            Ok(_) => break,
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
        }
    }
    (String::from_utf8(bytes).unwrap(), waitpid(child.pid, None).unwrap())
}

/// An [`Invocation`] that owns its texts.
struct Text {
    program: PathBuf,
    arguments: Vec<OsString>,
    environment: BTreeMap<OsString, Option<OsString>>,
}

fn program(path: impl Into<PathBuf>, arguments: &[&str]) -> Text {
    let arguments = arguments.iter().map(OsString::from).collect();
    Text { program: path.into(), arguments, environment: BTreeMap::new() }
}

fn shell(script: &str) -> Text {
    program("/bin/sh", &["-c", script])
}

impl Text {
    fn set(mut self, name: &str, value: Option<&str>) -> Self {
        self.environment.insert(name.into(), value.map(OsString::from));
        self
    }

    fn start(&self, batch: &mut SpawnBatch, cores: Option<CpuSet>) -> io::Result<Spawned> {
        let Text { program, arguments, environment } = self;
        batch.start(&Invocation { program, arguments, environment, cores, descriptor_limits: None })
    }
}

/// Starts one child, which has to start, and returns its standard output.
fn output_of(text: &Text) -> String {
    let mut batch = SpawnBatch::new().unwrap();
    let child = text.start(&mut batch, None).unwrap();
    assert!(batch.finish().unwrap().is_empty());
    let (output, end) = finish_child(child, 1);
    assert!(matches!(end, WaitStatus::Exited(_, 0)), "{end:?}: {output}");
    output
}

#[test]
fn each_child_gets_its_own_arguments_and_environment() {
    let mut batch = SpawnBatch::new().unwrap();
    let mut children = Vec::new();
    for number in 0..40 {
        let script = "echo $0 $1 $NUMBER ${HOME-none}; echo error >&2; exit $NUMBER";
        let text = program("/bin/sh", &["-c", script, "zero", "two words"]);
        let text = text.set("NUMBER", Some(&number.to_string())).set("HOME", None);
        children.push(text.start(&mut batch, None).unwrap());
    }
    assert!(batch.finish().unwrap().is_empty());
    for (child, number) in children.into_iter().zip(0..) {
        let stream = 1 + number as usize % 2;
        let (output, end) = finish_child(child, stream);
        let expected = format!("zero two words {number} none\n");
        assert_eq!(output, if stream == 1 { &expected } else { "error\n" });
        assert!(matches!(end, WaitStatus::Exited(_, code) if code == number));
    }
}

#[test]
fn a_child_has_a_group_of_its_own_and_no_blocked_caught_or_ignored_signal() {
    extern "C" fn ignore(_: c_int) {}
    let action = SigAction::new(SigHandler::Handler(ignore), SaFlags::empty(), SigSet::empty());
    // SAFETY: the handler does nothing, and nothing else in this program uses the signal.
    unsafe { sigaction(Signal::SIGWINCH, &action) }.unwrap();
    let mut blocked = SigSet::empty();
    blocked.add(Signal::SIGTERM);
    blocked.thread_block().unwrap();
    let script = "read pid name state parent group rest < /proc/self/stat; [ $pid = $group ] || exit 1; \
                  readlink /proc/self/fd/0; cat /proc/self/status";
    let output = output_of(&shell(script));
    assert!(output.starts_with("/dev/null\n"), "{output}");
    let has = |set: &str, signal: Signal| {
        let line = output.lines().find_map(|line| line.strip_prefix(set)?.strip_prefix(":\t"));
        u64::from_str_radix(line.unwrap(), 16).unwrap() >> (signal as u32 - 1) & 1 == 1
    };
    assert!(!has("SigBlk", Signal::SIGTERM), "{output}");
    assert!(!has("SigIgn", Signal::SIGPIPE), "{output}");
    assert!(!has("SigCgt", Signal::SIGWINCH) && !has("SigIgn", Signal::SIGWINCH), "{output}");
}

#[test]
fn a_child_that_does_not_start_is_reported_and_the_others_run() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing");
    let mut batch = SpawnBatch::new().unwrap();
    let programs = [shell("echo first"), program(missing, &[]), shell("echo last")];
    let children = programs.map(|text| text.start(&mut batch, None).unwrap());
    let failures = batch.finish().unwrap();
    assert!(
        matches!(&failures[..], [(1, SpawnFailure::NotStarted(error))]
            if error.raw_os_error() == Some(libc::ENOENT)),
        "{failures:?}"
    );
    let outputs = children.map(|child| finish_child(child, 1).0);
    assert_eq!(outputs, ["first\n", "", "last\n"]);
}

#[test]
fn a_refused_binding_is_reported_and_the_child_runs() {
    let mut batch = SpawnBatch::new().unwrap();
    let child = shell("echo unbound").start(&mut batch, Some(CpuSet::new())).unwrap();
    let failures = batch.finish().unwrap();
    assert!(
        matches!(&failures[..], [(0, SpawnFailure::Unbound(error))]
            if error.raw_os_error() == Some(libc::EINVAL)),
        "{failures:?}"
    );
    assert_eq!(finish_child(child, 1).0, "unbound\n");
}

#[test]
fn a_child_is_bound_to_its_cores() {
    let own = nix::sched::sched_getaffinity(Pid::from_raw(0)).unwrap();
    let core = (0..CpuSet::count()).find(|core| own.is_set(*core).unwrap()).unwrap();
    let mut one = CpuSet::new();
    one.set(core).unwrap();
    let mut batch = SpawnBatch::new().unwrap();
    let child = shell("grep Cpus_allowed_list /proc/self/status").start(&mut batch, Some(one)).unwrap();
    assert!(batch.finish().unwrap().is_empty());
    assert_eq!(finish_child(child, 1).0, format!("Cpus_allowed_list:\t{core}\n"));
    assert_eq!(nix::sched::sched_getaffinity(Pid::from_raw(0)).unwrap(), own);
}

#[test]
fn a_child_has_the_given_limits_on_descriptors() {
    let own = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE).unwrap();
    let mut batch = SpawnBatch::new().unwrap();
    let Text { program, arguments, environment } = &shell("ulimit -Sn; ulimit -Hn");
    let (cores, descriptor_limits) = (None, Some([60, 70]));
    let invocation = Invocation { program, arguments, environment, cores, descriptor_limits };
    let child = batch.start(&invocation).unwrap();
    assert!(batch.finish().unwrap().is_empty());
    assert_eq!(finish_child(child, 1).0, "60\n70\n");
    let after = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE).unwrap();
    assert_eq!(after, own);
}

#[test]
fn a_clone_that_suspends_the_parent_works_as_well() {
    let batch = SpawnBatch::new().unwrap();
    let (out, err) = (pipe2(OFlag::O_CLOEXEC).unwrap(), pipe2(OFlag::O_CLOEXEC).unwrap());
    let Text { program, arguments, environment } = &shell("echo started");
    let invocation = Invocation { program, arguments, environment, cores: None, descriptor_limits: None };
    let streams = [batch.null.as_fd(), out.1.as_fd(), err.1.as_fd()];
    let mut described = batch.describe(&invocation, streams).unwrap();
    let pid = clone_in_same_memory(&mut described, libc::CLONE_VFORK).unwrap();
    drop((out.1, err.1));
    let (output, end) = finish_child(Spawned { pid, pipes: [out.0, err.0] }, 1);
    assert_eq!((output.as_str(), end), ("started\n", WaitStatus::Exited(pid, 0)));
    assert!(batch.finish().unwrap().is_empty());
}

#[test]
fn pending_signals_are_discarded_and_actions_stay() {
    let signals: SigSet = [Signal::SIGQUIT, Signal::SIGTERM, Signal::SIGXCPU].into_iter().collect();
    let mut before = SigSet::empty();
    pthread_sigmask(SigmaskHow::SIG_BLOCK, Some(&signals), Some(&mut before)).unwrap();
    extern "C" fn fail(_: c_int) {
        std::process::abort();
    }
    let action = SigAction::new(SigHandler::Handler(fail), SaFlags::empty(), SigSet::empty());
    // SAFETY: the handler is async-signal-safe, and nothing else in this program uses the signal.
    unsafe { sigaction(Signal::SIGXCPU, &action) }.unwrap();
    for signal in &signals {
        // To this thread: other threads do not block them.
        nix::sys::signal::raise(signal).unwrap();
    }
    // SAFETY: it changes the actions of signals for a moment; nothing else in this program sends these three.
    unsafe { discard_pending_signals() }.unwrap();
    // Ends this process if one is left.
    pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&before), None).unwrap();
    let kept = handled_signals();
    assert!(kept.contains(&libc::SIGXCPU) && !kept.contains(&libc::SIGQUIT), "{kept:?}");
}

#[test]
fn a_script_without_a_first_line_is_run_by_the_shell() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("script");
    std::fs::write(&script, "echo \"$0 $1\"\n").unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let text = program(&script, &["word"]);
    assert_eq!(output_of(&text), format!("{} word\n", script.display()));
}

#[test]
fn texts_with_a_zero_byte_and_names_without_a_path_are_refused() {
    let mut batch = SpawnBatch::new().unwrap();
    let texts = [
        shell("echo \0"),
        program("sh", &[]),
        program("/bin/\0", &[]),
        shell("").set("A", Some("\0")),
        shell("").set("A\0", Some("")),
    ];
    for text in texts {
        assert_eq!(text.start(&mut batch, None).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
    // A batch that is dropped waits for the children that it has started.
    let child = shell("echo started").start(&mut batch, None).unwrap();
    drop(batch);
    assert_eq!(finish_child(child, 1).0, "started\n");
}

#[test]
fn reports_are_parsed() {
    let bytes =
        |numbers: [u32; 3]| numbers.iter().flat_map(|number| number.to_ne_bytes()).collect::<Vec<u8>>();
    let parsed = parse_report(&bytes([7, Step::Start as u32, libc::EACCES as u32]));
    assert!(matches!(parsed, Some((7, SpawnFailure::NotStarted(error)))
        if error.raw_os_error() == Some(libc::EACCES)));
    assert!(parse_report(&bytes([7, 0, 1])[..11]).is_none());
}
