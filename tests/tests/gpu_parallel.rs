//! Data parallelism on GPUs: the options of a step and their flags, on the fake libraries of `tests/gpu`.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use mgpu_tests::fake_gpu;
use mgpu_tests::process::{Finished, run};

const TRAIN: &str = env!("CARGO_BIN_EXE_t-train_mnist");

/// `program` on `ranks` fake GPUs.
fn on_gpus(ranks: u32, program: &str) -> Command {
    let mut launcher = fake_gpu::launched(env!("CARGO_BIN_EXE_t-mgpurun"), ranks);
    launcher.args(["--no-prefix", program]);
    launcher
}

fn step(ranks: u32, mode: &str) -> Finished {
    let finished = run(on_gpus(ranks, env!("CARGO_BIN_EXE_t-device-step")).arg(mode));
    assert_eq!(finished.code, Some(0), "{mode} on {ranks} ranks: {finished:#?}");
    finished
}

#[test]
fn gpu_and_cpu_steps_agree_with_every_option() {
    for ranks in [1, 2, 3] {
        step(ranks, "same").expect(0, &[&format!("the same on {ranks} ranks")]);
    }
}

#[test]
fn a_training_resumes_sharded_or_replicated() {
    for ranks in [1, 2, 3] {
        step(ranks, "resume");
    }
}

#[test]
fn steps_that_overflow_are_skipped_on_all_ranks_in_every_configuration() {
    for ranks in [1, 2, 3] {
        step(ranks, "scaled");
    }
}

#[test]
fn non_finite_gradients_and_differing_weights_are_named() {
    for ranks in [1, 2, 3] {
        step(ranks, "guards");
    }
}

#[test]
fn errors_in_a_group_name_ranks_of_the_world() {
    for ranks in [3, 4] {
        step(ranks, "groups");
    }
}

#[test]
fn parameter_groups_and_uneven_ranks_train_as_on_the_cpu() {
    for ranks in [1, 2, 3] {
        step(ranks, "uneven");
    }
}

#[test]
fn a_trace_has_the_times_of_a_launched_or_captured_step() {
    for ranks in [1, 2] {
        step(ranks, "trace");
    }
}

/// Few generated digits, only our own kernels.
const SMALL: [&str; 7] = ["--synthetic", "--images", "2000", "--json", "--kernels", "builtin", "--skip-test"];

fn train(ranks: u32, arguments: &[&str]) -> Finished {
    run(on_gpus(ranks, TRAIN).args(SMALL).args(arguments))
}

fn weights(finished: &Finished) -> String {
    assert_eq!(finished.code, Some(0), "{finished:#?}");
    finished.json()["weights"].as_str().expect("a checksum of the weights").to_owned()
}

/// A single rank that sends its gradients through NCCL, in graphs and without, has the weights of one that does not.
#[test]
fn one_rank_trains_through_nccl_on_request() {
    let folder = tempfile::tempdir().expect("a folder");
    for flags in [&["--accumulate", "2", "--clip-norm", "0.5"][..], &["--world-size-invariant", "2"]] {
        let all = [&["--batch", "2", "--steps", "14"][..], flags].concat();
        let expected = weights(&train(1, &all));
        for (graph, mode) in [("graph", &[][..]), ("eager", &["--no-graph"])] {
            let trace = folder.path().join(format!("{graph} {}", flags[0]));
            let mut program = on_gpus(1, TRAIN);
            program.env("MGPU_NCCL", "always").env("FAKE_NCCL_TRACE", &trace);
            program.args(SMALL).args(&all).args(mode);
            assert_eq!(expected, weights(&run(&mut program)), "{flags:?}, {graph}");
            let calls = std::fs::read_to_string(&trace).expect("calls of NCCL");
            let captured = calls.lines().any(|line| line == "ncclAllReduce captured");
            assert_eq!(captured, graph == "graph", "{calls}");
            assert!(calls.contains("ncclCommFinalize\nncclCommDestroy\n"), "{calls}");
        }
    }
}

/// Buckets join small layers: all gradients of `lenet5` are one all-reduce, in one group with that of the mark of gradients
/// that are not finite. So a captured step has one launch of NCCL.
#[test]
fn small_layers_are_reduced_in_one_group() {
    let folder = tempfile::tempdir().expect("a folder");
    let trace = folder.path().join("calls");
    let mut program = on_gpus(1, TRAIN);
    program.env("MGPU_NCCL", "always").env("FAKE_NCCL_TRACE", &trace);
    program.args(SMALL).args(["--net", "lenet5", "--batch", "1"]);
    run(program.args(["--steps", "14"])).expect(0, &[]);
    let calls = std::fs::read_to_string(&trace).expect("calls of NCCL");
    let calls: Vec<&str> = calls.lines().collect();
    let reduced = "ncclAllReduce captured";
    let group = ["ncclGroupStart", reduced, reduced, "ncclGroupEnd"];
    let groups = calls.windows(group.len()).filter(|calls| *calls == group).count();
    let all = calls.iter().filter(|call| **call == reduced).count();
    assert!(groups > 0 && all == 2 * groups, "{calls:#?}");
}

/// Combinations of options.
const FLAGS: [&[&str]; 6] = [
    &["--accumulate", "2", "--clip-norm", "0.5", "--schedule", "cosine:0.1", "--warm-up", "3"],
    &["--shard-optimizer", "on", "--clip-norm", "0.5", "--schedule", "constant"],
    &["--gradients", "bf16", "--shard-optimizer", "on", "--accumulate", "2", "--schedule", "constant"],
    &["--world-size-invariant", "4", "--clip-norm", "0.5", "--schedule", "constant"],
    &["--placement", "shared", "--accumulate", "2", "--clip-norm", "0.5", "--schedule", "constant"],
    &["--placement", "host", "--gradients", "bf16", "--clip-norm", "0.5", "--schedule", "constant"],
];

#[test]
fn a_graph_gives_the_bits_of_single_launches_with_every_option() {
    for flags in FLAGS {
        // Beyond the first steps, with a larger graph and some single steps.
        let all = [&["--batch", "2", "--steps", "14"][..], flags].concat();
        let graph = weights(&train(2, &all));
        assert_eq!(graph, weights(&train(2, &[&all[..], &["--no-graph"]].concat())), "{flags:?}");
    }
}

#[test]
fn an_interrupted_run_resumes_bit_equal() {
    // `a_run_continues_under_another_placement` resumes placements.
    for flags in &FLAGS[..4] {
        let all = [&["--batch", "2", "--steps", "7"][..], flags].concat();
        // The schedule covers the whole run.
        let expected = weights(&train(2, &all));
        let folder = tempfile::tempdir().unwrap();
        let saving = ["--checkpoint-every", "2", "--checkpoint-dir", folder.path().to_str().unwrap()];
        let saving = [&all[..], &saving].concat();
        let mut killed = fake_gpu::launched(env!("CARGO_BIN_EXE_t-mgpurun"), 2);
        killed.args([
            "--inject",
            "rank=1,step=5,fault=sigkill",
            TRAIN,
            "--synthetic",
            "--images",
            "2000",
            "--kernels",
            "builtin",
        ]);
        run(killed.args(["--skip-test"]).args(&saving)).expect(128 + 9, &[]);
        let resumed = train(2, &[&saving[..], &["--resume"]].concat());
        resumed.expect(0, &["resumed from"]);
        assert_eq!(weights(&resumed), expected, "{flags:?}");
    }
}

/// The fake NCCL adds up in the order of ranks, as the CPU does, and both optimizers round alike. (On a real GPU the
/// sums of NCCL have another order, and the last bits of the host's powers may be others.)
#[test]
fn every_placement_trains_the_weights_of_a_replicated_model() {
    let cases: [(u32, &[&str]); 3] = [
        (2, &["--batch", "2", "--steps", "14", "--clip-norm", "0.5", "--accumulate", "2"]),
        (3, &["--batch", "1", "--steps", "5", "--gradients", "bf16", "--reduction", "sum"]),
        (2, &["--net", "mlp-gelu", "--batch", "2", "--steps", "2", "--precision", "bf16"]),
    ];
    for (ranks, flags) in cases {
        let placed = |name| weights(&train(ranks, &[flags, &["--placement", name]].concat()));
        let expected = placed("replicated");
        for name in ["shared", "host"] {
            assert_eq!(placed(name), expected, "{name}, {flags:?}");
        }
    }
    // A single rank needs no NCCL for them, or sends everything through it.
    let alone = ["--batch", "2", "--steps", "5", "--clip-norm", "0.5"];
    let expected = weights(&train(1, &alone));
    for (name, nccl) in [("shared", "always"), ("host", "auto")] {
        let mut program = on_gpus(1, TRAIN);
        program.env("MGPU_NCCL", nccl).args(SMALL);
        let found = weights(&run(program.args(alone).args(["--placement", name])));
        assert_eq!(found, expected, "{name}, MGPU_NCCL={nccl}");
    }
}

#[test]
fn a_run_continues_under_another_placement() {
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--net", "lenet5", "--batch", "2", "--schedule", "constant"];
    let expected = weights(&train(2, &[&flags[..], &["--steps", "8"]].concat()));
    let saving = [&flags[..], &["--checkpoint-dir", folder.path().to_str().unwrap()]].concat();
    let mut last = train(2, &[&saving[..], &["--steps", "2"]].concat());
    for (name, steps) in [("shared", "4"), ("host", "6"), ("replicated", "8")] {
        last = train(2, &[&saving[..], &["--resume", "--placement", name, "--steps", steps]].concat());
        last.expect(0, &["resumed from"]);
    }
    assert_eq!(weights(&last), expected);
}

#[test]
fn a_rank_that_dies_is_named_in_every_placement() {
    for name in ["shared", "host"] {
        let mut killed = fake_gpu::launched(env!("CARGO_BIN_EXE_t-mgpurun"), 2);
        killed.args(["--inject", "rank=1,step=6,fault=sigkill", "--grace", "60"]);
        // The other rank ignores the launcher's SIGTERM, and ends by its own error.
        killed.args([
            "sh",
            "-c",
            "trap '' TERM; exec \"$0\" \"$@\"",
            TRAIN,
            "--synthetic",
            "--images",
            "2000",
            "--kernels",
            "builtin",
        ]);
        let killed = run(killed.args(["--skip-test", "--batch", "1", "--steps", "50", "--placement", name]));
        killed.expect(
            128 + 9,
            &["mgpurun: rank 1 was killed by SIGKILL", "train_mnist: rank 0 lost rank 1 in "],
        );
    }
}

#[test]
fn a_placement_that_does_not_fit_is_refused_with_a_reason() {
    for (name, flags, reason) in [
        ("shared", ["--shard-optimizer", "on"], "keeps all of its state on rank 0"),
        ("shared", ["--world-size-invariant", "4"], "reduction needs placement replicated"),
        ("host", ["--shard-optimizer", "off"], "placement host has one copy of the optimizer's state"),
        ("host", ["--world-size-invariant", "4"], "reduction needs placement replicated"),
    ] {
        let flags = [&["--placement", name, "--batch", "4", "--steps", "1"][..], &flags].concat();
        train(2, &flags).expect(1, &[reason]);
    }
}

#[test]
fn world_size_invariant_training_is_bit_equal() {
    // keras has batch normalisation and dropout.
    for (net, batch, steps) in [("lenet5", 4, "5"), ("keras", 4, "1")] {
        let run = |ranks: u32| {
            let batch = (batch / ranks).to_string();
            let all = ["--net", net, "--batch", &batch, "--steps", steps, "--world-size-invariant", "4"];
            let shards = if ranks == 2 { "on" } else { "off" };
            weights(&train(ranks, &[&all[..], &["--clip-norm", "1", "--shard-optimizer", shards]].concat()))
        };
        let expected = run(1);
        for ranks in [2, 4] {
            assert_eq!(run(ranks), expected, "{net} on {ranks} ranks");
        }
    }
}

/// Three ranks with three, three and two images train what one rank trains with all of them. With a world-size-invariant
/// reduction a run goes on with fewer ranks bit-equal.
#[test]
fn a_global_batch_is_divided_over_gpus() {
    let losses = |ranks| {
        let flags = ["--global-batch", "8", "--lr", "0.01", "--steps", "4", "--log-every", "1"];
        let finished = train(ranks, &flags);
        assert_eq!(finished.code, Some(0), "{finished:#?}");
        let lines = finished.stdout.lines().filter(|line| line.starts_with("step "));
        lines.map(|line| line.split(' ').nth(5).unwrap().parse().unwrap()).collect::<Vec<f64>>()
    };
    let (alone, divided) = (losses(1), losses(3));
    let is_close = |(a, b): (&f64, &f64)| (a - b).abs() < 2e-4;
    assert!(alone.len() == 4 && alone.iter().zip(&divided).all(is_close), "{divided:?}, not {alone:?}");

    let folder = tempfile::tempdir().unwrap();
    let all = ["--global-batch", "8", "--world-size-invariant", "4", "--schedule", "constant"];
    let run = |ranks, steps, more: &[&str]| train(ranks, &[&all[..], &["--steps", steps], more].concat());
    let saving = ["--checkpoint-dir", folder.path().to_str().unwrap(), "--resume"];
    for (ranks, steps) in [(4, "2"), (2, "5")] {
        run(ranks, steps, &saving).expect(0, &[]);
    }
    assert_eq!(weights(&run(4, "6", &saving)), weights(&run(1, "6", &[])));
    train(3, &["--global-batch", "14", "--accumulate", "2", "--steps", "1"])
        .expect(1, &["the 5 images of rank 0 cannot be split into 2 equal micro-batches; only on CPUs"]);
}

#[test]
fn a_non_finite_loss_ends_the_training_and_is_named() {
    for name in ["replicated", "shared", "host"] {
        let finished = train(2, &["--batch", "4", "--steps", "20", "--lr", "1e30", "--placement", name]);
        finished.expect(1, &["non-finite gradients (NaN or Inf) in tensor `", "in step "]);
    }
}

/// Each part of each network, scaled down, is alone on a rank, and so is each beginning and each end.
#[test]
fn parts_of_every_network_have_the_bits_of_the_whole() {
    assert_bits_of_the_whole("bf16", 3);
}

/// Networks are also cut in two, wherever that is possible.
#[test]
#[ignore = "takes minutes"]
fn parts_have_the_bits_of_the_whole_in_every_precision() {
    for precision in ["f32", "tf32", "bf16"] {
        for ranks in [2, 3] {
            assert_bits_of_the_whole(precision, ranks);
        }
    }
}

/// Every gradient, weight and running statistic has the bits of the whole network: no pass of a layer may depend on which
/// layers are on the same rank.
fn assert_bits_of_the_whole(precision: &str, ranks: u32) {
    let lines = |ranks: u32| -> Vec<String> {
        let program = env!("CARGO_BIN_EXE_t-device-step");
        let mut program = on_gpus(ranks, program);
        // Like a large GPU, on which small gradients are computed beside each other.
        program.env("FAKE_GPU_MULTIPROCESSORS", "132").args(["parts", precision]);
        let finished = run(&mut program);
        assert_eq!(finished.code, Some(0), "{precision} on {ranks} ranks: {finished:#?}");
        finished.stdout.lines().map(str::to_owned).collect()
    };
    let whole: BTreeSet<String> = lines(1).iter().map(|line| line.trim_end().to_owned()).collect();
    assert!(whole.iter().any(|line| line.starts_with("keras ") && line.contains("running_var")));
    let mut by_cut = BTreeMap::<(String, String), BTreeSet<String>>::new();
    for line in lines(ranks) {
        let (tensor, cut) = line.rsplit_once(' ').expect("cuts at the end of a line");
        let net = tensor.split(' ').next().expect("a network").to_owned();
        by_cut.entry((net, cut.to_owned())).or_default().insert(tensor.to_owned());
    }
    assert!(by_cut.len() >= 20, "{:?}", by_cut.keys());
    for ((net, cut), found) in by_cut {
        let of_net = |line: &&String| line.split(' ').next() == Some(&net[..]);
        let expected: BTreeSet<String> = whole.iter().filter(of_net).cloned().collect();
        let wrong: Vec<_> = expected.symmetric_difference(&found).collect();
        assert!(wrong.is_empty(), "{net} cut before {cut}, {precision}: {wrong:#?}");
    }
}

/// The parts of a network train what one rank trains with the same micro-batches, on a grid what as many ranks train as
/// there are copies. A run continues on another number of parts.
#[test]
fn layers_cut_over_gpus_train_the_weights_of_whole_networks() {
    let cases: [(u32, u32, &[&str], &str); 3] = [
        (1, 2, &["--net", "lenet5", "--batch", "4", "--accumulate", "4", "--steps", "4"], "layers"),
        (1, 3, &["--net", "keras", "--batch", "2", "--steps", "1", "--precision", "bf16"], "layers"),
        (2, 4, &["--net", "lenet5", "--batch", "2", "--accumulate", "2", "--steps", "3"], "layers:2"),
    ];
    for (copies, ranks, flags, placement) in cases {
        let expected = weights(&train(copies, flags));
        let cut = train(ranks, &[flags, &["--placement", placement]].concat());
        cut.expect(0, &["parts of the network: layers 0-"]);
        assert_eq!(weights(&cut), expected, "{ranks} ranks, {flags:?}");
        let json = cut.json();
        let stages = json["stages"].as_u64().unwrap();
        assert_eq!(stages, u64::from(ranks / copies));
        for rank in 0..ranks as usize {
            let in_flight = json["rank_in_flight"][rank].as_u64().unwrap();
            assert!(in_flight <= stages - rank as u64 % stages, "{json}");
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--net", "lenet5", "--batch", "2", "--accumulate", "2", "--schedule", "constant"];
    let expected = weights(&train(1, &[&flags[..], &["--steps", "6"]].concat()));
    let saving = [&flags[..], &["--checkpoint-dir", folder.path().to_str().unwrap()]].concat();
    let mut last = train(2, &[&saving[..], &["--steps", "2", "--placement", "layers"]].concat());
    for (ranks, placement, steps) in [(1, "replicated", "4"), (3, "layers", "6")] {
        let placed = ["--resume", "--placement", placement, "--steps", steps];
        last = train(ranks, &[&saving[..], &placed].concat());
        last.expect(0, &["resumed from"]);
    }
    assert_eq!(weights(&last), expected);
}
