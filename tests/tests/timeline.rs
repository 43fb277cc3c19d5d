//! The timeline of a training: a trace file for viewers, a track per rank, and one clock for all tracks.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use mgpu::ReduceOp;
use mgpu::timeline::Timeline;
use mgpu_tests::fake_gpu;
use mgpu_tests::process::{Finished, Program, run};
use mgpu_tests::threads;
use serde_json::Value;

const TRAIN: Program =
    Program { launcher: env!("CARGO_BIN_EXE_t-mgpurun"), path: env!("CARGO_BIN_EXE_t-train_mnist") };

fn train(mut program: Command, timeline: &Path, arguments: &[&str]) -> Finished {
    run(program
        .args(["--synthetic", "--images", "2000", "--threads", "1", "--timeline"])
        .arg(timeline)
        .args(arguments))
}

/// A span in the file, in nanoseconds.
#[derive(Debug, Clone, PartialEq)]
struct Span {
    name: String,
    begin: u64,
    end: u64,
    arguments: Value,
}

/// The spans of every rank, in file order.
fn tracks(path: &Path) -> Vec<Vec<Span>> {
    let file: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let (mut tracks, mut ranks) = (BTreeMap::<u64, Vec<Span>>::new(), Vec::new());
    for event in file["traceEvents"].as_array().unwrap() {
        let nanoseconds = |key: &str| (event[key].as_f64().unwrap() * 1e3).round() as u64;
        let name = event["name"].as_str().unwrap().to_owned();
        match event["ph"].as_str().unwrap() {
            "M" if name == "thread_name" => {
                ranks.push((event["tid"].as_u64().unwrap(), event["args"]["name"].clone()));
            }
            "M" => {}
            "X" => {
                let (begin, duration) = (nanoseconds("ts"), nanoseconds("dur"));
                let arguments = event["args"].clone();
                let span = Span { name, begin, end: begin + duration, arguments };
                tracks.entry(event["tid"].as_u64().unwrap()).or_default().push(span);
            }
            other => panic!("an event of kind {other}"),
        }
    }
    ranks.sort_by_key(|(track, _)| *track);
    assert_eq!(tracks.keys().collect::<Vec<_>>(), ranks.iter().map(|(track, _)| track).collect::<Vec<_>>());
    let names: Vec<_> = ranks.iter().map(|(_, name)| name.as_str().unwrap()).collect();
    // Tracks of the ranks, then of their reduction threads, if any.
    let each = names.iter().filter(|name| !name.contains("reductions")).count();
    let expected: Vec<_> = (0..ranks.len())
        .map(|track| format!("rank {}{}", track % each, if track < each { "" } else { ", reductions" }))
        .collect();
    assert_eq!(names, expected);
    tracks.into_values().collect()
}

/// The parent of each span. Asserts that spans overlap only if one contains the other.
fn parents(track: &[Span]) -> Vec<Option<usize>> {
    let (mut open, mut parents) = (Vec::<usize>::new(), Vec::new());
    for (place, span) in track.iter().enumerate() {
        while open.last().is_some_and(|outer| track[*outer].end <= span.begin) {
            open.pop();
        }
        let outer = open.last().copied();
        if let Some(outer) = outer.map(|outer| &track[outer]) {
            assert!(outer.begin <= span.begin && span.end <= outer.end, "{span:?} and {outer:?}");
        }
        parents.push(outer);
        open.push(place);
    }
    parents
}

fn of<'a>(track: &'a [Span], name: &'a str) -> impl Iterator<Item = &'a Span> {
    track.iter().filter(move |span| span.name == name)
}

/// Collectives in which every rank waits for all others; in a broadcast it waits for its root, rank 0. (The root of a
/// small broadcast may run ahead.)
const COLLECTIVES: [&str; 6] =
    ["allocate", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier"];

/// All ranks ran the same collectives, no rank left one before those it waits for had arrived, and no wait ended earlier.
/// So their clocks agree.
fn assert_one_clock(tracks: &[Vec<Span>]) {
    // Each with the start of its name.
    let collectives = tracks.iter().map(|track| {
        let pairs = track.iter().zip(track.iter().skip(1).map(Some).chain([None]));
        pairs.filter(|(span, _)| COLLECTIVES.contains(&span.name.as_str())).collect::<Vec<_>>()
    });
    let collectives: Vec<_> = collectives.collect();
    assert!(!collectives[0].is_empty());
    for others in &collectives[1..] {
        assert_eq!(others.len(), collectives[0].len());
    }
    for place in 0..collectives[0].len() {
        let same: Vec<_> = collectives.iter().map(|track| track[place]).collect();
        let of_all = |(span, _): &(&Span, Option<&Span>)| {
            (&span.name, &span.arguments) == (&same[0].0.name, &same[0].0.arguments)
        };
        assert!(same.iter().all(of_all), "the ranks' {place}th collectives: {same:#?}");
        let waited_for = if same[0].0.name == "broadcast" { &same[..1] } else { &same[..] };
        let came = waited_for.iter().map(|(span, _)| span.begin).max().unwrap();
        for (span, within) in &same {
            assert!(came <= span.end, "somebody came after {span:?}, at {came}");
            let wait = within.filter(|within| within.name == "wait for peers").expect("waiting comes first");
            assert!(wait.begin == span.begin && wait.end >= came, "{wait:?} in {span:?} until {came}");
        }
    }
}

#[test]
fn every_rank_has_a_track_on_the_same_clock() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("timeline.json");
    let steps = 4;
    // Batch normalisation sums over ranks in its passes; buckets are both sharded and replicated.
    for (ranks, net, shard) in [(2, "lenet5", "off"), (3, "lenet5", "off"), (2, "keras", "auto")] {
        let arguments =
            ["--net", net, "--shard-optimizer", shard, "--batch", "8", "--steps", "4", "--skip-test"];
        train(TRAIN.launched(ranks), &path, &arguments).expect(0, &[]);
        let tracks = tracks(&path);
        assert_eq!(tracks.len(), ranks as usize);
        assert_one_clock(&tracks);
        for track in &tracks {
            let parents = parents(track);
            let made: Vec<_> =
                of(track, "step").map(|step| step.arguments["step"].as_u64().unwrap()).collect();
            assert_eq!(made, [1, 2, 3, 4]);
            for pass in ["gather", "forward", "backward", "optimizer", "loss"] {
                assert_eq!(of(track, pass).count(), steps, "{pass} of {net} on {ranks}");
            }
            let within = |place: usize| {
                std::iter::successors(parents[place], |outer| parents[*outer])
                    .map(|outer| track[outer].name.as_str())
            };
            for (place, span) in track.iter().enumerate() {
                let outer: Vec<_> = within(place).collect();
                match span.name.as_str() {
                    "step" => assert!(outer.is_empty(), "{span:?} in {outer:?}"),
                    "gather" | "forward" | "backward" | "optimizer" => assert_eq!(outer, ["step"]),
                    "wait for peers" | "update shard" => {
                        assert!(COLLECTIVES.contains(&outer[0]), "{span:?} in {outer:?}");
                    }
                    name if name.starts_with("backward ") => assert_eq!(outer, ["backward", "step"]),
                    name if name.starts_with("forward ") => assert_eq!(outer, ["forward", "step"]),
                    _ => {}
                }
                if !span.arguments["bucket"].is_null() {
                    assert!(span.arguments["bytes"].as_u64() > Some(0), "{span:?}");
                    assert!(outer.contains(&"backward"), "{span:?} in {outer:?}");
                }
            }
            // Every bucket once per step, in the same order.
            let buckets: Vec<_> = track.iter().filter_map(|span| span.arguments["bucket"].as_u64()).collect();
            let of_a_step = &buckets[..buckets.len() / steps];
            assert_eq!(buckets, of_a_step.repeat(steps));
            assert_eq!(of_a_step, (0..of_a_step.len() as u64).collect::<Vec<_>>());
            assert_eq!(of(track, "update shard").count(), if net == "keras" { steps } else { 0 });
        }
    }
}

#[test]
fn overlapped_reductions_have_their_own_tracks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("timeline.json");
    let arguments = ["--overlap", "--net", "deep", "--batch", "8", "--steps", "6", "--skip-test", "--json"];
    let finished = train(TRAIN.launched(2), &path, &arguments);
    finished.expect(0, &[]);
    let tracks = tracks(&path);
    assert_eq!(tracks.len(), 4);
    assert_one_clock(&tracks[2..]);
    for (own, reductions) in tracks[..2].iter().zip(&tracks[2..]) {
        assert!(own.iter().all(|span| span.arguments["bucket"].is_null()), "{own:#?}");
        parents(own);
        let buckets: Vec<_> =
            reductions.iter().filter_map(|span| span.arguments["bucket"].as_u64()).collect();
        assert_eq!(buckets, (0..buckets.len() as u64 / 6).collect::<Vec<_>>().repeat(6));
        // None starts before the backward pass has computed its gradients.
        let backward = of(own, "backward").next().unwrap();
        let first = reductions.iter().find(|span| span.arguments["bucket"] == 0).unwrap();
        assert!(backward.begin < first.begin, "{first:?} and {backward:?}");
        assert!(of(own, "wait for reductions").count() >= buckets.len());
    }
    assert!(finished.json()["communication"].as_f64() > Some(0.0));
}

#[test]
fn a_world_of_one_has_a_timeline_too() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("timeline.json");
    let saving = folder.path().join("checkpoints");
    let arguments = ["--steps", "3", "--checkpoint-dir", saving.to_str().unwrap()];
    train(TRAIN.alone(), &path, &arguments).expect(0, &[]);
    let [track] = &tracks(&path)[..] else { panic!("more than a track") };
    parents(track);
    for (name, count) in [("step", 3), ("evaluation", 1), ("checkpoint", 1)] {
        assert_eq!(of(track, name).count(), count, "{name}");
    }
    assert_eq!(of(track, "wait for peers").count(), 0);
}

#[test]
fn only_the_requested_steps_are_recorded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("timeline.json");
    let arguments = ["--batch", "8", "--steps", "9", "--skip-test", "--timeline-steps", "4-6"];
    train(TRAIN.launched(2), &path, &arguments).expect(0, &[]);
    let tracks = tracks(&path);
    assert_one_clock(&tracks);
    for track in &tracks {
        let steps: Vec<_> = of(track, "step").map(|step| step.arguments["step"].as_u64().unwrap()).collect();
        assert_eq!(steps, [4, 5, 6]);
        // Nothing before the first or after the last requested step.
        let (first, last) = (of(track, "step").next().unwrap(), of(track, "step").last().unwrap());
        assert!(track.iter().all(|span| first.begin <= span.begin && span.end <= last.end));
    }
}

#[test]
fn recording_a_timeline_does_not_change_the_weights() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("timeline.json");
    let weights = |watched: bool| {
        let mut program = TRAIN.launched(2);
        program.args([
            "--synthetic",
            "--images",
            "2000",
            "--net",
            "keras",
            "--batch",
            "8",
            "--steps",
            "4",
            "--skip-test",
            "--json",
        ]);
        if watched {
            program.arg("--timeline").arg(&path);
        }
        run(&mut program).weights()
    };
    assert_eq!(weights(true), weights(false));
}

#[test]
fn spans_beyond_the_limit_are_counted_in_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("timeline.json");
    threads::run(2, |mut world| {
        // Capacities may differ between ranks.
        let timeline = Timeline::new(3 + world.rank() as usize).unwrap();
        let mut comm = timeline.observe(world.communicator().unwrap());
        let own = timeline.name("rank's own");
        for _ in 0..10 {
            timeline.end(timeline.begin(), own);
        }
        comm.all_reduce_slice(&mut [1.0f32], ReduceOp::Sum).unwrap();
        timeline.write(&mut comm, &path).unwrap();
    });
    let file: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let events = file["traceEvents"].as_array().unwrap();
    let own = |rank: u64| {
        let of_rank = events.iter().filter(|event| event["tid"] == rank + 1 && event["ph"] == "X");
        of_rank.filter(|event| event["name"] == "rank's own").count() as u64
    };
    let left_out = |rank: usize| file["otherData"]["left_out"][rank].as_u64().unwrap();
    assert_eq!((own(0), own(1)), (3, 4));
    // The all-reduce and its wait are included.
    assert!((8..=9).contains(&left_out(0)) && (7..=8).contains(&left_out(1)), "{file:#}");
    assert_eq!(events.iter().filter(|event| event["ph"] == "i").count(), 2);
}

#[test]
fn bad_files_and_steps_are_named() {
    for (arguments, text) in [
        (&["--timeline-steps", "1-2"][..], "--timeline"),
        (&["--timeline", "t.json", "--timeline-steps", "2-1"], "two steps, such as 101-120"),
        (&["--timeline", "t.json", "--timeline-steps", "0-1"], "two steps, such as 101-120"),
        (&["--timeline", "t.json", "--timeline-steps", "5"], "two steps, such as 101-120"),
        (&["--bucket", "0"], "a number from 0.001 to 1024"),
        (&["--bucket", "1e9"], "a number from 0.001 to 1024"),
    ] {
        run(TRAIN.alone().args(arguments)).expect(2, &[text]);
    }
    // Detected before training.
    let nowhere = Path::new("/nonexistent/t.json");
    let finished = train(TRAIN.alone(), nowhere, &["--steps", "1"]);
    finished.expect(1, &["cannot write the timeline /nonexistent/t.json"]);
    assert!(!finished.stdout.contains("epoch"), "{finished:#?}");
}

/// The training program on fake GPUs, with a small batch and the project's own kernels.
fn on_gpus(ranks: u32) -> Command {
    let mut launcher = fake_gpu::launched(TRAIN.launcher, ranks);
    launcher.args([
        "--no-prefix",
        TRAIN.path,
        "--kernels",
        "builtin",
        "--batch",
        "2",
        "--skip-test",
        "--json",
    ]);
    launcher
}

#[test]
fn stages_and_collectives_of_gpus_have_their_own_tracks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("timeline.json");
    // Step 3 launches each kernel, later ones are graphs.
    let recorded: Vec<u64> = (3..=6).collect();
    let steps = ["--steps", "16", "--timeline-steps", "3-6", "--bucket", "0.05", "--shard-optimizer"];
    for (ranks, sharded, collectives) in
        [(1, "off", &[][..]), (2, "off", &["all_reduce"]), (2, "on", &["reduce_scatter", "all_gather"])]
    {
        train(on_gpus(ranks), &path, &[&steps[..], &[sharded]].concat()).expect(0, &[]);
        let tracks = tracks(&path);
        assert_eq!(tracks.len(), if ranks == 1 { 1 } else { 4 });
        let (own, reductions) = tracks.split_at(ranks as usize);
        for track in own {
            let parents = parents(track);
            let steps: Vec<&Span> = of(track, "step").collect();
            let numbers: Vec<_> = steps.iter().map(|step| step.arguments["step"].as_u64().unwrap()).collect();
            assert_eq!(numbers, recorded);
            for pass in ["forward", "backward", "optimizer", "loss"] {
                assert_eq!(of(track, pass).count(), steps.len(), "{pass} on {ranks}");
            }
            // The first layer reads images where they are.
            assert_eq!(of(track, "gather").count(), 0);
            for (span, parent) in track.iter().zip(parents) {
                let outer = parent.map(|parent| track[parent].name.as_str());
                match span.name.as_str() {
                    "step" => assert_eq!(outer, None),
                    "forward" | "backward" | "optimizer" => assert_eq!(outer, Some("step")),
                    name if name.starts_with("backward ") => assert_eq!(outer, Some("backward")),
                    name if name.starts_with("forward ") => assert_eq!(outer, Some("forward")),
                    _ => {}
                }
            }
            let waits = of(track, "wait for reductions").count();
            assert_eq!(waits > 0, ranks > 1, "{waits} waits on {ranks}");
        }
        for (own, reductions) in own.iter().zip(reductions) {
            // Spans on this stream follow each other.
            assert!(reductions.is_sorted_by(|one, next| one.end <= next.begin), "{reductions:#?}");
            let buckets: Vec<_> =
                reductions.iter().filter_map(|span| span.arguments["bucket"].as_u64()).collect();
            let of_a_step = buckets.len() / recorded.len();
            assert!(of_a_step > 1, "{buckets:?}");
            assert_eq!(buckets, (0..of_a_step as u64).collect::<Vec<_>>().repeat(recorded.len()));
            for name in collectives {
                assert!(of(reductions, name).count() > 0, "no {name}");
            }
            for span in reductions {
                assert!(span.arguments["bytes"].as_u64() > Some(0), "{span:?}");
                let of_step = of(own, "step").find(|step| step.begin <= span.begin && span.end <= step.end);
                let step = of_step.unwrap_or_else(|| panic!("{span:?} is in no step"));
                // None starts before the backward pass has computed its gradients.
                let backward = of(own, "backward").find(|backward| backward.begin >= step.begin).unwrap();
                assert!(backward.begin < span.begin, "{span:?} and {backward:?}");
            }
        }
    }
}

#[test]
fn tracing_on_gpus_does_not_change_the_weights() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("timeline.json");
    let steps = ["--synthetic", "--images", "2000", "--steps", "16", "--accumulate", "2"];
    let plain = run(on_gpus(2).args(steps)).weights();
    let profiled = run(on_gpus(2).args(steps).arg("--profile")).weights();
    let recorded = train(on_gpus(2), &path, &[&steps[3..], &["--timeline-steps", "5-9"]].concat());
    assert_eq!((&profiled, recorded.weights()), (&plain, plain.clone()));
}

#[test]
fn a_profile_of_gpus_has_the_rows_of_a_profile_of_cpus() {
    let train = |mut program: Command, more: &[&str]| {
        program.args(["--synthetic", "--images", "2000", "--steps", "7", "--profile"]).args(more);
        run(&mut program)
    };
    let cpu = train(TRAIN.alone(), &["--batch", "2", "--skip-test", "--json"]).json();
    let names = |summary: &Value| {
        let layers = summary["profile"].as_array().unwrap().iter();
        let layers: Vec<_> = layers.map(|layer| layer["layer"].as_str().unwrap().to_owned()).collect();
        (layers, summary["profile_ms"].as_object().unwrap().keys().cloned().collect::<Vec<_>>())
    };
    for (ranks, more, how) in [
        (1, &[][..], "times of events in a CUDA graph"),
        // The norm of sharded gradients is summed over ranks within the update.
        (
            2,
            &["--shard-optimizer", "on", "--clip-norm", "1"],
            "mean of 4 steps on rank 0; times of events in a CUDA graph",
        ),
        (1, &["--no-graph"], "times of events between launches"),
    ] {
        let finished = train(on_gpus(ranks), more);
        let gpu = finished.expect(0, &[how]).json();
        assert_eq!(names(&gpu), names(&cpu));
        assert_rows_add_up(&gpu);
        for layer in gpu["profile"].as_array().unwrap() {
            assert!(layer["forward_ms"].as_f64() > Some(0.0), "{layer:#}");
        }
        let communication = gpu["profile_ms"]["communication"].as_f64();
        assert_eq!(communication > Some(0.0), ranks > 1, "{gpu:#}");
        // The host cannot count it.
        assert!(gpu["communication"].is_null() && gpu["peak_gflops"].is_null(), "{gpu:#}");
    }
}

#[test]
fn communication_is_reported_for_several_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let metrics = folder.path().join("metrics.jsonl");
    let mut program = TRAIN.launched(2);
    program.args([
        "--synthetic",
        "--images",
        "2000",
        "--net",
        "keras",
        "--batch",
        "8",
        "--steps",
        "8",
        "--skip-test",
        "--json",
    ]);
    program.args(["--profile", "--bucket", "0.25", "--metrics"]).arg(&metrics);
    let finished = run(&mut program);
    let summary = finished.expect(0, &[]).json();
    let line = fs::read_to_string(&metrics).unwrap();
    let epoch: Value = serde_json::from_str(line.lines().next().unwrap()).unwrap();
    let share = |object: &Value, key: &str| object[key].as_f64().unwrap();
    for (object, key) in [(&summary, "communication"), (&epoch, "communication")] {
        let share = share(object, key);
        assert!(share > 0.0 && share < 1.0, "{key} in {object:#}");
    }
    assert!(share(&summary, "waiting") < share(&summary, "communication"));
    assert_rows_add_up(&summary);

    // With an evaluation, which is not part of a step.
    let alone =
        run(TRAIN.alone().args(["--synthetic", "--images", "2000", "--steps", "8", "--profile", "--json"]));
    let alone = alone.expect(0, &[]).json();
    assert!(alone["communication"].is_null() && alone["waiting"].is_null(), "{alone:#}");
    assert_rows_add_up(&alone);
}

/// The rows of a profile add up to the step.
fn assert_rows_add_up(summary: &Value) {
    let number = |value: &Value| value.as_f64().unwrap();
    let rest = summary["profile_ms"].as_object().unwrap();
    let layers = summary["profile"].as_array().unwrap().iter();
    let layers: f64 = layers.map(|layer| number(&layer["forward_ms"]) + number(&layer["backward_ms"])).sum();
    let rows: f64 = rest.iter().filter(|(row, _)| *row != "step").map(|(_, ms)| number(ms)).sum();
    let step = number(&rest["step"]);
    assert!((layers + rows - step).abs() < 0.01, "{layers} and {rows} of {step} ms");
    assert!(rest.values().all(|ms| number(ms) >= 0.0), "{rest:#?}");
}

/// A profiler gets a range for each step, pass and collective of every rank.
#[test]
fn a_profiler_gets_nested_ranges() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("ranges");
    let profiler = fake_gpu::folder().join("libcuda.so.1");
    let mut program = TRAIN.launched(2);
    program.env("NVTX_INJECTION64_PATH", profiler).env("FAKE_NVTX_TRACE", &trace);
    run(program.args(["--synthetic", "--images", "2000", "--threads", "1", "--steps", "3", "--skip-test"]))
        .expect(0, &[]);
    let text = fs::read_to_string(&trace).unwrap();
    for rank in 0..2 {
        let ranges: Vec<(u32, &str)> = text
            .lines()
            .filter_map(|line| line.strip_prefix(&format!("{rank} mgpu ")))
            .map(|line| line.split_once(' ').unwrap())
            .map(|(depth, name)| (depth.parse().unwrap(), name))
            .collect();
        for step in 1..=3 {
            assert!(ranges.contains(&(0, &format!("step {step}"))), "{text}");
        }
        for (name, depth) in [("gather", 1), ("forward", 1), ("backward", 1), ("optimizer", 1)] {
            let found: Vec<u32> =
                ranges.iter().filter(|(_, range)| *range == name).map(|(depth, _)| *depth).collect();
            assert_eq!(found, [depth; 3], "{name} in {text}");
        }
        // Reductions run within the backward pass.
        let bucket = |(depth, name): &&(u32, &str)| *depth == 2 && name.starts_with("all_reduce, bucket 0 [");
        assert_eq!(ranges.iter().filter(bucket).count(), 3, "{text}");
        assert!(ranges.iter().any(|(_, name)| name.starts_with("broadcast")), "{text}");
    }
    // One that cannot be opened is ignored.
    let mut program = TRAIN.launched(1);
    program.env("NVTX_INJECTION64_PATH", folder.path());
    run(program.args(["--synthetic", "--images", "2000", "--steps", "1", "--skip-test"])).expect(0, &[]);
}
