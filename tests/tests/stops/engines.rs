//! Ranks that another launcher has started, one by one, with its variables. They get the signals themselves; one rank that
//! gets one makes all of them stop.

use std::process::Child;

use mgpu_tests::page;
use mgpu_tests::process::{Finished, command, finish, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{Training, expect_resumed, mgpurun, random, send, start, stopped_after};

/// The variables of `rank` of `ranks`, as an engine sets them for the job `name`.
fn variables(engine: &str, name: &str, rank: u32, ranks: u32) -> Vec<(&'static str, String)> {
    let (rank, ranks, name) = (rank.to_string(), ranks.to_string(), name.to_owned());
    match engine {
        "torchrun" => vec![
            ("RANK", rank.clone()),
            ("WORLD_SIZE", ranks.clone()),
            ("LOCAL_RANK", rank),
            ("LOCAL_WORLD_SIZE", ranks),
            ("MASTER_ADDR", "localhost".into()),
            ("MASTER_PORT", "29500".into()),
            ("TORCHELASTIC_RUN_ID", name),
        ],
        "mpirun" => vec![
            ("OMPI_COMM_WORLD_RANK", rank.clone()),
            ("OMPI_COMM_WORLD_SIZE", ranks.clone()),
            ("OMPI_COMM_WORLD_LOCAL_RANK", rank),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", ranks),
            ("PMIX_NAMESPACE", name),
        ],
        _ => vec![
            ("SLURM_PROCID", rank.clone()),
            ("SLURM_STEP_NUM_TASKS", ranks),
            ("SLURM_LOCALID", rank),
            ("SLURM_STEP_NUM_NODES", "1".into()),
            ("SLURM_JOB_ID", name),
            ("SLURM_STEP_ID", "0".into()),
        ],
    }
}

/// Starts the ranks, which save and resume, with these injected faults.
fn start_ranks(training: &Training, engine: &str, ranks: u32, faults: &str) -> Vec<Child> {
    let name = format!("stops-{engine}-{}", std::process::id());
    let rank = |rank| {
        let mut env = command("env");
        env.arg("--default-signal").env("CUDA_VISIBLE_DEVICES", "").env_remove("MGPU_BACKEND");
        env.envs(variables(engine, &name, rank, ranks)).env("MGPU_INJECT", faults);
        start(training.saved(env))
    };
    (0..ranks).map(rank).collect()
}

fn finish_all(ranks: Vec<Child>) -> Vec<Finished> {
    ranks.into_iter().map(|mut rank| finish(&mut rank)).collect()
}

#[test]
fn one_rank_that_gets_a_signal_makes_all_stop() {
    for (engine, ranks, signal) in [
        ("torchrun", 2, Signal::SIGTERM),
        ("mpirun", 3, Signal::SIGUSR1),
        ("srun", 2, Signal::SIGINT),
        ("srun", 4, Signal::SIGTERM),
    ] {
        let training = Training::new(16, "--steps 500 --batch 4");
        let whole = training.weights(mgpurun(&format!("-n {ranks}")));
        let started = start_ranks(&training, engine, ranks, "");
        // Rank 0 serves the others.
        page::wait(started[0].id(), page::has_made(1 + random(100)));
        send(&started[random(ranks.into()) as usize], signal);
        let stopped = finish_all(started);
        stopped.iter().for_each(|rank| _ = rank.expect(74, &[]));
        let step = stopped_after(&stopped[0]);
        // All ranks get it, as from `scancel` and `torchrun`; a second one soon after is the same request.
        let started = start_ranks(&training, engine, ranks, "");
        page::wait(started[0].id(), page::has_made(step + 1));
        for rank in started.iter().chain(&started) {
            let _ = kill(Pid::from_raw(rank.id() as i32), signal);
        }
        let stopped = finish_all(started);
        stopped.iter().for_each(|rank| _ = rank.expect(74, &[]));
        let again = stopped_after(&stopped[0]);
        assert!(again > step, "{again} after {step}");
        let resumed = finish_all(start_ranks(&training, engine, ranks, ""));
        expect_resumed(&resumed[0], again);
        assert_eq!(resumed[0].weights(), whole, "{engine}");
    }
}

#[test]
fn a_second_signal_ends_a_rank_that_does_not_stop() {
    let training = Training::new(16, "--steps 100000 --batch 4");
    // Rank 0 hangs where it would save.
    let mut started = start_ranks(&training, "torchrun", 2, "rank=0,phase=checkpoint,fault=hang");
    page::wait(started[0].id(), page::has_made(5));
    // Signals within a second are one request.
    until(|| {
        let mut all_ended = true;
        for rank in &mut started {
            if rank.try_wait().unwrap().is_none() {
                all_ended = false;
                send(rank, Signal::SIGTERM);
            }
        }
        all_ended
    });
    let ended = finish_all(started);
    assert!(ended[0].code.is_none() && !ended[0].stdout.contains("saved"), "{ended:#?}");
}
