//! The small examples, each at several world sizes.

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
    run(command(program).arg("many")).expect(2, &["usage"]);
}

#[test]
fn allreduce_perf_checks_every_size() {
    let program = env!("CARGO_BIN_EXE_t-allreduce_perf");
    for (ranks, arguments) in [
        (1, ["--dtype", "f32", "--op", "sum", "--algo", "auto"]),
        (2, ["--dtype", "bf16", "--op", "avg", "--algo", "direct"]),
        (3, ["--dtype", "u8", "--op", "prod", "--algo", "ring"]),
        (2, ["--dtype", "f64", "--op", "max", "--algo", "eager"]),
    ] {
        let sizes = ["--check", "--min", "4", "--max", "65536", "--factor", "16"];
        let finished = launched(ranks, program, &[&arguments[..], &sizes].concat());
        assert_eq!(finished.code, Some(0), "{finished:#?}");
        let lines: Vec<serde_json::Value> =
            finished.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert!(lines.len() >= 3, "{finished:#?}");
        for line in lines {
            assert_eq!(
                (&line["impl"], &line["ranks"], &line["checked"]),
                (&"mgpu".into(), &ranks.into(), &true.into())
            );
            assert!(line["us_p50"].as_f64().unwrap() >= line["us_min"].as_f64().unwrap());
        }
    }
    run(command(program).args(["--dtype", "f8"])).expect(2, &["known are f32, f64, f16"]);
}
