//! `--placement`: the same weights, the bytes of its formula, memory where it says.

use mgpu_tests::mnist;
use mgpu_tests::process::{Finished, run};

use super::TRAIN;

/// Four steps on `ranks` ranks.
fn train(ranks: u32, flags: &[&str]) -> Finished {
    let folder = tempfile::tempdir().unwrap();
    mnist::write_tiny(folder.path());
    let mut launcher = TRAIN.launched(ranks);
    launcher.arg("--data").arg(folder.path()).args(["--batch", "4", "--steps", "4", "--json"]);
    run(launcher.args(flags))
}

fn bytes_per_step(finished: &Finished) -> u64 {
    finished.json()["bytes_per_step"].as_u64().expect("a number of bytes")
}

#[test]
fn every_placement_trains_the_same_weights_and_moves_the_bytes_of_its_formula() {
    for (ranks, net, parameters) in [(1, "lenet5", 61_706), (2, "lenet5", 61_706), (3, "mlp-gelu", 269_322)] {
        let run = |placement| train(ranks, &["--net", net, "--skip-test", "--placement", placement]);
        let replicated = run("replicated");
        // In all of them gradients and parameters together cross as often.
        let formula = 2 * u64::from(ranks - 1) * 4 * parameters;
        for finished in [&run("shared"), &run("host"), &replicated] {
            assert_eq!(finished.weights(), replicated.weights());
            let found = bytes_per_step(finished);
            let bounds = formula..=formula + formula / 20;
            assert!(bounds.contains(&found), "{found} bytes, not {formula}: {finished:#?}");
        }
    }
}

#[test]
fn evaluations_and_checkpoints_move_no_bytes_of_a_step() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = folder.path().join("checkpoints");
    let shared = ["--net", "mlp-gelu", "--placement", "host"];
    let plain = train(2, &[&shared[..], &["--skip-test"]].concat());
    let saving = ["--checkpoint-dir", checkpoints.to_str().unwrap(), "--checkpoint-every", "1"];
    let saved = train(2, &[&shared[..], &saving].concat());
    assert_eq!(saved.json()["checkpoints"], 4);
    assert_eq!(bytes_per_step(&saved), bytes_per_step(&plain));
}

#[test]
fn rank_0_alone_has_the_memory_of_the_optimizer_of_shared_weights() {
    let memory = |placement| {
        let json = train(2, &["--net", "deep", "--skip-test", "--placement", placement]).json();
        [0, 1].map(|rank| json["rank_rss_mib"][rank].as_f64().unwrap())
    };
    // Adam's two states and the moving average of 6.6 million parameters take 75 MiB.
    let ([first, second], [replicated, _]) = (memory("shared"), memory("replicated"));
    assert!(first - second > 50.0 && replicated - second > 30.0, "{first}, {second}, {replicated}");
}

#[test]
fn flags_incompatible_with_a_placement_are_refused_with_the_reason() {
    for (placement, flag, value, text) in [
        ("shared", "--shard-optimizer", "on", "keeps all of its state on rank 0"),
        ("host", "--shard-optimizer", "off", "so all of it is sharded: enable sharding"),
        (
            "shared",
            "--world-size-invariant",
            "4",
            "invariant reduction needs placement replicated: its ranks",
        ),
        ("host", "--world-size-invariant", "4", "invariant reduction needs placement replicated: its ranks"),
    ] {
        train(2, &["--placement", placement, flag, value]).expect(1, &[text]);
    }
    let all = "it should be replicated, shared, host, layers, or layers:K";
    train(1, &["--placement", "nowhere"]).expect(2, &[all]);
}
