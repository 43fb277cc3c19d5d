//! Tests of the whole output, on pipes instead of the process's own streams.

use std::fs;
use std::io::{PipeReader, Read};
use std::os::fd::OwnedFd;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use proptest::prelude::*;

use super::*;

/// An output, and the other ends of its standard output and error.
fn output(ranks: u32, options: OutputOptions) -> (Output, [PipeReader; 2]) {
    let pipe = || {
        let (reader, writer) = std::io::pipe().unwrap();
        (reader, Destination::new(OwnedFd::from(writer), options.color, options.stall_timeout()))
    };
    let ((stdout, to_stdout), (stderr, to_stderr)) = (pipe(), pipe());
    (Output::to([to_stdout, to_stderr], &[ranks], options).unwrap(), [stdout, stderr])
}

/// The whole output, after it was closed.
fn read(mut output: Output, readers: [PipeReader; 2]) -> [String; 2] {
    output.close();
    while output.logs.as_ref().is_some_and(Logs::is_pending) {
        let mut fds: Vec<_> =
            output.log_bell().map(|fd| PollFd::new(fd, PollFlags::POLLIN)).into_iter().collect();
        poll(&mut fds, PollTimeout::NONE).unwrap();
        output.tick(Instant::now());
    }
    drop(output);
    readers.map(|mut reader| {
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        text
    })
}

#[test]
fn logs_replace_the_terminal() {
    let folder = tempfile::tempdir().unwrap();
    for tee in [false, true] {
        let options = OutputOptions {
            log_dir: Some(folder.path().join("logs")),
            filter: Some("1".parse().unwrap()),
            tee,
            ..OutputOptions::default()
        };
        let (mut output, readers) = output(2, options);
        output.push(0, Stream::Stdout, b"hidden\n");
        output.push(1, Stream::Stdout, b"one\ntw");
        output.push(1, Stream::Stderr, b"error\n");
        output.push(1, Stream::Stdout, b"o");
        output.finish(1, Stream::Stdout);
        let [stdout, stderr] = read(output, readers);
        let log =
            |rank: u32| fs::read_to_string(folder.path().join(format!("logs/rank-{rank}.log"))).unwrap();
        assert_eq!([log(0), log(1)], ["hidden\n", "one\nerror\ntwo\n"]);
        let shown = if tee { ["[1] one\n[1] two\n", "[1] error\n"] } else { ["", ""] };
        assert_eq!([stdout.as_str(), stderr.as_str()], shown);
    }
    let nowhere = OutputOptions { log_dir: Some("/proc/none".into()), ..OutputOptions::default() };
    let error = Output::new(&[1], nowhere).err().unwrap();
    assert!(error.to_string().starts_with("cannot write the log /proc/none: "), "{error}");
}

/// A node whose ranks get other numbers at a restart writes to files that another node has begun, or it itself.
#[test]
fn logs_of_earlier_attempts_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let log = |rank: u32| folder.path().join(format!("rank-{rank}.log"));
    fs::write(log(1), "an earlier run\n").unwrap();
    fs::write(log(2), "another node\n").unwrap();
    let options = OutputOptions { log_dir: Some(folder.path().to_owned()), ..OutputOptions::default() };
    let (mut output, readers) = output(0, options);
    assert!(!log(0).exists());
    for (attempt, first) in [1, 2, 1].into_iter().enumerate() {
        let logs = if attempt == 0 { Start::Empty } else { Start::Append };
        output.set_ranks(first, 1, logs).unwrap();
        let line = format!("attempt {attempt}\n");
        output.push(0, Stream::Stdout, line.as_bytes());
        // Each writer writes what it has before it ends, but nobody waits for the earlier ones.
        let is_written = || fs::read_to_string(log(first)).unwrap().ends_with(&line);
        let waited = (0..6000).any(|_| {
            is_written() || {
                std::thread::sleep(Duration::from_millis(10));
                false
            }
        });
        assert!(waited, "{line}");
    }
    read(output, readers);
    let written = [log(1), log(2)].map(|log| fs::read_to_string(log).unwrap());
    assert_eq!(written, ["attempt 0\nattempt 2\n", "another node\nattempt 1\n"]);
}

#[test]
fn chosen_streams_are_logged_in_files_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let streams = StreamChoice { redirects: "0:3,1:2".parse().unwrap(), tee: "0:2,2:1".parse().unwrap() };
    let options = OutputOptions {
        log_dir: Some(folder.path().to_owned()),
        streams: Some(streams),
        local_filter: Some("0-2".parse().unwrap()),
        prefix: false,
        ..OutputOptions::default()
    };
    let (mut output, readers) = output(4, options);
    for rank in 0..4 {
        output.push(rank, Stream::Stdout, format!("out {rank}\n").as_bytes());
        output.push(rank, Stream::Stderr, format!("err {rank}\n").as_bytes());
    }
    let [stdout, stderr] = read(output, readers);
    assert_eq!([&*stdout, &*stderr], ["out 1\nout 2\n", "err 0\nerr 2\n"]);
    let mut logs: Vec<(String, String)> = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|entry| (entry.file_name().into_string().unwrap(), fs::read_to_string(entry.path()).unwrap()))
        .collect();
    logs.sort();
    let expected = [
        ("rank-0.stderr.log", "err 0\n"),
        ("rank-0.stdout.log", "out 0\n"),
        ("rank-1.stderr.log", "err 1\n"),
        ("rank-2.stdout.log", "out 2\n"),
    ];
    assert_eq!(logs, expected.map(|(name, text)| (name.to_owned(), text.to_owned())));
}

#[test]
fn lines_dropped_for_a_stalled_reader_are_reported() {
    let (mut output, [mut stdout, stderr]) = output(2, OutputOptions::default());
    let mut pushed = 0;
    while output.has_room(0, Stream::Stdout) {
        output.push(0, Stream::Stdout, &[b'\n'; 1000]);
        pushed += 1000;
    }
    assert!(output.has_room(0, Stream::Stderr));
    let deadline = output.next_deadline().unwrap();
    output.tick(deadline - Duration::from_millis(1));
    assert!(!output.has_room(1, Stream::Stdout));
    output.tick(deadline);
    assert!(output.has_room(1, Stream::Stdout) && output.next_deadline().is_none());
    output.push(0, Stream::Stdout, b"lost\nlost\n");
    output.push(1, Stream::Stdout, b"lost\ncut");
    let mut shown = Vec::new();
    let mut read_on = |output: &mut Output| {
        while output.waiting().next().is_some() {
            let mut bytes = [0; 4096];
            let count = stdout.read(&mut bytes).unwrap();
            shown.extend_from_slice(&bytes[..count]);
            output.resume(Stream::Stdout);
        }
    };
    read_on(&mut output);
    output.push(1, Stream::Stdout, b" short\n");
    read_on(&mut output);
    let [rest, told] = read(output, [stdout, stderr]);
    let shown = String::from_utf8(shown).unwrap() + &rest;
    assert!(shown == "[0] \n".repeat(pushed) + "[1] cut short\n");
    assert_eq!(
        told,
        "mgpurun: 3 lines of standard output were dropped: the reader accepted nothing for 30 s\n"
    );
}

#[test]
fn the_last_lines_are_repeated_for_hidden_ranks_too() {
    let options = OutputOptions { filter: Some("1-".parse().unwrap()), ..OutputOptions::default() };
    let (mut output, readers) = output(2, options);
    for line in 0..15 {
        output.push(0, Stream::Stdout, format!("line {line}\n").as_bytes());
    }
    output.repeat_last_lines(0);
    output.repeat_last_lines(1);
    let [stdout, stderr] = read(output, readers);
    let lines: String = (5..15).map(|line| format!("    line {line}\n")).collect();
    assert_eq!(stdout, "");
    let heads = ["mgpurun: the last lines of rank 0:\n", "mgpurun: rank 1 has written nothing\n"];
    assert_eq!(stderr, format!("{}{lines}{}", heads[0], heads[1]));
}

#[test]
fn every_line_has_a_timestamp() {
    let options = OutputOptions { timestamps: true, prefix: false, ..OutputOptions::default() };
    let (mut output, readers) = output(1, options);
    output.push(0, Stream::Stderr, b"one\n\ntwo\n");
    output.say("own");
    output.repeat_last_lines(0);
    let [_, stderr] = read(output, readers);
    let texts: Vec<&str> = stderr
        .lines()
        .map(|line| {
            let (time, text) = line.split_once(' ').unwrap();
            assert!(time.len() == 24 && humantime::parse_rfc3339(time).is_ok(), "{line}");
            text
        })
        .collect();
    let own = ["mgpurun: own", "mgpurun: the last lines of rank 0:"];
    assert_eq!(texts, ["one", "", "two", own[0], own[1], "    one", "    ", "    two"]);
}

proptest! {
    /// Whatever the ranks write, in whatever chunks: each line arrives complete and unchanged, in the order of its rank.
    #[test]
    fn lines_of_each_rank_arrive_complete_and_in_order(
        writes in prop::collection::vec((0u32..3, prop::collection::vec(prop_oneof![Just(b'\n'), any::<u8>()], 0..40)), 0..40)
    ) {
        let (mut output, readers) = output(3, OutputOptions::default());
        let mut written = vec![Vec::new(); 3];
        for (rank, bytes) in writes {
            let bytes: Vec<u8> = bytes.into_iter().filter(|byte| *byte != b'\r').collect();
            output.push(rank, Stream::Stdout, &bytes);
            written[rank as usize].extend(bytes);
        }
        (0..3).for_each(|rank| output.finish(rank, Stream::Stdout));
        drop(output);
        let [mut stdout, _] = readers;
        let mut bytes = Vec::new();
        stdout.read_to_end(&mut bytes).unwrap();
        let mut arrived = vec![Vec::new(); 3];
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            prop_assert!(line.len() >= 5 && line[0] == b'[' && &line[2..4] == b"] ", "{line:?}");
            arrived[usize::from(line[1] - b'0')].extend_from_slice(&line[4..]);
        }
        for written in written.iter_mut().filter(|bytes| bytes.last().is_some_and(|byte| *byte != b'\n')) {
            written.push(b'\n');
        }
        prop_assert_eq!(arrived, written);
    }
}
