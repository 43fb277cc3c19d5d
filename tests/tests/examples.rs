//! The small examples at several world sizes.

use mgpu_tests::example_programs;
use mgpu_tests::process::{command, run};

fn launched(ranks: u32, program: &str, arguments: &[&str]) -> mgpu_tests::process::Finished {
    let mut launcher = command(env!("CARGO_BIN_EXE_t-mgpurun"));
    run(launcher.args(["-n", &ranks.to_string(), "--no-prefix", program]).args(arguments))
}

#[test]
fn hello_ring_goes_around() {
    let program = env!("CARGO_BIN_EXE_t-hello_ring");
    run(&mut command(program)).expect(0, &["hello from rank 0 of 1 (solo backend)", "came back with 0"]);
    for (ranks, sum) in [(1, 0), (2, 1), (5, 10)] {
        let finished = launched(ranks, program, &[]);
        finished.expect(0, &[&format!("the token came back with {sum}"), &format!("the ranks sum to {sum}")]);
        assert_eq!(finished.stdout.lines().filter(|line| line.starts_with("hello")).count(), ranks as usize);
    }
}

#[test]
fn embed_starts_its_own_ranks() {
    let program = env!("CARGO_BIN_EXE_t-embed");
    let line = "y = 2.000 x + 0.500";
    run(&mut command(program)).expect(0, &["1 ranks agree", line]);
    run(command(program).arg("3")).expect(0, &["3 ranks agree", line]);
    launched(2, program, &[]).expect(0, &["2 ranks agree", line]);
    run(command(program).arg("many")).expect(2, &["invalid value 'many'"]);
}

#[test]
fn all_reduce_adds_up_the_darts_of_all_ranks() {
    let program = env!("CARGO_BIN_EXE_t-all_reduce");
    run(&mut command(program)).expect(0, &["of the 1000000 darts of 1 ranks", "pi is about 3.14"]);
    for ranks in [1, 2] {
        let finished = launched(ranks, program, &["--darts", "200000"]);
        finished
            .expect(0, &[&format!("of the {} darts of {ranks} ranks", 200_000 * ranks), "pi is about 3.1"]);
        assert_eq!(finished.stdout.lines().count(), 1);
    }
}

/// The loss in a line such as `step 50: loss 0.5 on rank 0`.
fn loss_after(finished: &mgpu_tests::process::Finished, step: u32) -> f64 {
    let beginning = format!("step {step}: loss ");
    let line =
        finished.stdout.lines().find_map(|line| line.strip_prefix(&beginning)).expect("a line of the step");
    line.split(' ').next().and_then(|loss| loss.parse().ok()).expect("a loss")
}

#[test]
fn small_networks_learn_on_one_rank_and_on_two() {
    let programs = [
        (env!("CARGO_BIN_EXE_t-train_mlp"), "of 500 test images correct; weights "),
        (env!("CARGO_BIN_EXE_t-own_optimizer"), "weights "),
    ];
    for (program, last) in programs {
        for ranks in [1, 2] {
            let finished = launched(ranks, program, &[]);
            finished.expect(0, &[&format!("{ranks} ranks: "), last, " on all"]);
            // Ten classes: an untrained network has a loss of 2.3.
            let [early, late] = [50, 150].map(|step| loss_after(&finished, step));
            assert!(late < early && late < 1.0, "{program} on {ranks} ranks: {}", finished.stdout);
        }
        run(command(program).args(["--steps", "1"])).expect(0, &["1 ranks: ", last]);
    }
}

/// On one rank, which trains both networks, and on groups of different sizes.
#[test]
fn an_ensemble_averages_networks_of_groups() {
    let program = env!("CARGO_BIN_EXE_t-ensemble");
    let arguments = ["--nets", "mlp-gelu,lenet5", "--steps", "60", "--batch", "32"];
    for (ranks, groups) in [(1, 1), (3, 2)] {
        let finished = launched(ranks, program, &arguments);
        let header = format!("2 networks on {ranks} ranks in {groups} groups; generated digits");
        finished
            .expect(0, &[&header, "mlp-gelu: test accuracy ", "lenet5: test accuracy ", "average of their"]);
        let accuracies: Vec<f64> = finished.stdout.lines().filter_map(accuracy).collect();
        assert_eq!(accuracies.len(), 3, "{}", finished.stdout);
        // Ten classes: an untrained network has 10%.
        assert!(accuracies.iter().all(|accuracy| *accuracy > 40.0), "{}", finished.stdout);
    }
    // More networks than ranks, of which two differ only by their seeds.
    let nets = ["--nets", "lenet5,lenet5,mlp-gelu", "--steps", "2", "--batch", "8"];
    launched(2, program, &nets).expect(0, &["3 networks on 2 ranks in 2 groups"]);
    run(command(program).args(["--nets", "lenet5,none"])).expect(2, &["none"]);
}

/// The accuracy at the end of a line, in per cent.
fn accuracy(line: &str) -> Option<f64> {
    line.rsplit_once("test accuracy ")?.1.strip_suffix('%')?.parse().ok()
}

#[test]
fn every_program_has_help_and_refuses_unknown_arguments() {
    for (name, program) in example_programs!() {
        run(command(program).arg("--help")).expect(0, &[&format!("Usage: t-{name}"), "--help"]);
        run(command(program).arg("--no-such-option")).expect(2, &["unexpected argument '--no-such-option'"]);
    }
}

const COLLECTIVE_PERF: &str = env!("CARGO_BIN_EXE_t-collective_perf");

/// Runs collective_perf on small sizes, expects success, and returns its lines and standard error.
fn measured(ranks: u32, max: &str, arguments: &[&str]) -> (Vec<serde_json::Value>, String) {
    let sizes = ["--check", "--min", "4", "--max", max, "--factor", "16"];
    let finished = launched(ranks, COLLECTIVE_PERF, &[&sizes, arguments].concat());
    assert_eq!(finished.code, Some(0), "{finished:#?}");
    let lines: Vec<serde_json::Value> =
        finished.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for line in &lines {
        assert_eq!(
            (&line["impl"], &line["ranks"], &line["checked"]),
            (&"mgpu".into(), &ranks.into(), &true.into())
        );
        assert!(line["us_p50"].as_f64().unwrap() >= line["us_min"].as_f64().unwrap());
    }
    (lines, finished.stderr)
}

fn sizes(lines: &[serde_json::Value]) -> Vec<u64> {
    lines.iter().map(|line| line["bytes"].as_u64().unwrap()).collect()
}

#[test]
fn collective_perf_checks_every_size() {
    for (ranks, arguments) in [
        (1, ["--dtype", "f32", "--op", "sum", "--algo", "auto"]),
        (2, ["--dtype", "bf16", "--op", "avg", "--algo", "direct"]),
        (3, ["--dtype", "u8", "--op", "prod", "--algo", "ring"]),
    ] {
        assert_eq!(sizes(&measured(ranks, "65536", &arguments).0), [4, 64, 1024, 16384]);
    }
}

#[test]
fn collective_perf_stops_at_the_limit_of_an_algorithm() {
    let eager = ["--dtype", "f64", "--op", "max", "--algo", "eager"];
    let (lines, stderr) = measured(2, "262144", &eager);
    assert!(sizes(&lines).starts_with(&[8, 64, 1024]) && lines.len() < 5, "{lines:#?}");
    assert!(
        stderr.contains("stopped before ") && stderr.contains("the eager algorithm supports at most"),
        "{stderr}"
    );
    let nothing =
        launched(2, COLLECTIVE_PERF, &[&eager[..], &["--min", "262144", "--max", "262144"]].concat());
    nothing.expect(1, &["collective_perf: all_reduce: the eager algorithm", "not 262144"]);
}

#[test]
fn collective_perf_checks_every_collective() {
    let collectives = [
        ("all_reduce", "sum", false),
        ("reduce_scatter", "prod", true),
        ("all_gather", "sum", true),
        ("broadcast", "sum", false),
        ("reduce", "max", false),
        ("all_to_all", "sum", true),
        ("gather", "sum", true),
        ("scatter", "prod", true),
    ];
    for (collective, op, sharded) in collectives {
        for (ranks, buffers) in [(1, "arena"), (2, "private"), (2, "arena"), (3, "arena"), (3, "private")] {
            let arguments = ["--collective", collective, "--op", op, "--buffers", buffers];
            let (lines, _) = measured(ranks, "4096", &arguments);
            let rounded =
                if sharded && ranks == 3 { [12, 72, 1032] } else { [4 * u64::from(ranks), 64, 1024] };
            assert_eq!(sizes(&lines), if sharded { rounded } else { [4, 64, 1024] }, "{lines:#?}");
            for line in lines {
                assert_eq!((&line["collective"], &line["buffers"]), (&collective.into(), &buffers.into()));
                let moves_only = !["all_reduce", "reduce_scatter", "reduce"].contains(&collective);
                assert_eq!(line["op"], if moves_only { "none" } else { op });
                assert_eq!(line.get("bound_us"), None);
            }
        }
    }
}

#[test]
fn collective_perf_adds_the_memory_bound_of_an_all_reduce() {
    let (lines, _) = measured(2, "16384", &["--bound", "--dtype", "f16"]);
    assert_eq!(sizes(&lines), [4, 64, 1024, 16384]);
    // The time of the smallest size is lost in rounding.
    for line in &lines[2..] {
        // Bandwidth is 2 n S bytes divided by that time, up to rounding.
        let (micros, gbps) = (line["bound_us"].as_f64().unwrap(), line["scale_gbps"].as_f64().unwrap());
        let moved = 2.0 * 2.0 * line["bytes"].as_f64().unwrap();
        assert!((micros * gbps * 1e3 / moved - 1.0).abs() < 0.01, "{line}");
    }
    let (lines, _) = measured(2, "4", &["--bound", "--collective", "broadcast"]);
    assert_eq!((lines[0].get("bound_us"), lines[0].get("scale_gbps")), (None, None));
}

#[test]
fn collective_perf_compares_with_other_programs() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("peers.jsonl");
    let peers = [
        r#"{"impl":"mpich","ranks":2,"bytes":4,"us_p50":123456.5,"us_min":1}"#,
        r#"{"impl":"openmpi","ranks":2,"bytes":64,"us_p50":98765.25,"collective":"all_reduce"}"#,
        r#"{"impl":"gloo","ranks":3,"bytes":64,"us_p50":5}"#,
        r#"{"impl":"impi","ranks":2,"bytes":64,"us_p50":5,"collective":"reduce"}"#,
    ];
    std::fs::write(&path, peers.join("\n")).unwrap();
    let file = path.to_str().unwrap();
    let (lines, stderr) = measured(2, "64", &["--vs", file]);
    assert_eq!(lines.len(), 2, "standard output is lines of JSON alone");
    let table: Vec<Vec<&str>> = stderr.lines().map(|line| line.split_whitespace().collect()).collect();
    assert!(stderr.starts_with("all_reduce on 2 ranks: "), "{stderr}");
    assert_eq!(table[1], ["bytes", "ours", "mpich", "ratio", "openmpi", "ratio"]);
    assert_eq!((table[2][0], table[2][2], &table[2][4..]), ("4", "123456.50", &["-", "-"][..]));
    assert_eq!((table[3][0], &table[3][2..5]), ("64", &["-", "-", "98765.25"][..]));
    assert_eq!(table.len(), 4, "{stderr}");
    let (_, stderr) = measured(2, "4", &["--vs", file, "--collective", "broadcast"]);
    assert_eq!(stderr, "no peer has results for broadcast on 2 ranks\n");

    std::fs::write(&path, peers.join("\n") + "\nmpiexec: a warning\n").unwrap();
    for (ranks, file, problem) in [
        (1, file, "peers.jsonl:5: not a measurement"),
        (2, file, "peers.jsonl:5: not a measurement"),
        (2, "/nonexistent/peers.jsonl", "/nonexistent/peers.jsonl: No such file"),
    ] {
        let refused = launched(ranks, COLLECTIVE_PERF, &["--vs", file, "--max", "4"]);
        refused.expect(1, &[problem]);
        assert_eq!(refused.stdout, "", "nothing is measured");
    }
}

#[test]
fn collective_perf_refuses_invalid_arguments() {
    for (arguments, problem) in [
        (&["--dtype", "f8"][..], "known are f32, f64, f16"),
        (&["--min", "8", "--max", "4"], "--min 8 is larger than --max 4"),
        (
            &["--collective", "sort"],
            "[possible values: all_reduce, reduce_scatter, all_gather, broadcast, reduce, all_to_all, gather, scatter]",
        ),
        (&["--buffers", "shared"], "[possible values: arena, private, device]"),
        (&["--collective", "reduce", "--algo", "ring"], "--algo ring works only with all_reduce"),
    ] {
        run(command(COLLECTIVE_PERF).args(arguments)).expect(2, &[problem]);
    }
}
