//! Jobs on several hosts, with an agent on each, or with ranks that an engine has started there.

use std::fs;
use std::path::Path;

use mgpu_control::progress::RankState;
use mgpu_tests::hosts::Hosts;
use mgpu_tests::page;
use mgpu_tests::process::{Finished, finish, run, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{LAUNCHER, TRAIN, Training, expect_resumed, mgpurun, random, start, stopped_after};
use crate::hosts::job::{self, Job};

/// The command line of the training, which saves and resumes.
fn words(training: &Training) -> Vec<String> {
    let folder = training.checkpoints().display().to_string();
    let own = [TRAIN.to_owned()].into_iter().chain(training.arguments.iter().cloned());
    own.chain(["--checkpoint-dir".to_owned(), folder, "--resume".to_owned()]).collect()
}

fn start_job<'a>(hosts: &'a Hosts, training: &Training) -> Job<'a> {
    let words = words(training);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    Job::start(hosts, &["-n", "2", "--backend", "cpu", "--no-prefix"], &words)
}

/// Waits until all ranks have made `step` steps, as their own hosts' pages say.
fn wait_for_step(job: &mut Job<'_>, hosts: &Hosts, step: u64) {
    for host in 0..hosts.count() {
        let agent = job.mgpuruns(host)[1].as_raw() as u32;
        page::wait(agent, |page| {
            (0..page.world_size()).any(|rank| page.host(rank).is_none() && page.progress(rank).step >= step)
        });
    }
}

fn resumes(hosts: &Hosts, training: &Training, stopped: &Finished, whole: &str) {
    let step = stopped_after(stopped);
    let resumed = start_job(hosts, training).finish();
    expect_resumed(&resumed[0], step);
    assert_eq!(resumed[0].weights(), whole);
}

#[test]
fn a_signal_to_any_agent_stops_all_ranks_at_the_same_step() {
    let Some(hosts) = Hosts::start(2) else { return };
    for (signalled, signal) in [
        (&[0, 1][..], Signal::SIGTERM),
        (&[1], Signal::SIGTERM),
        (&[1], Signal::SIGUSR1),
        (&[0, 1], Signal::SIGUSR1),
    ] {
        let training = Training::new(16, "--steps 300 --batch 4");
        let whole = training.weights(mgpurun("-n 4"));
        let mut job = start_job(&hosts, &training);
        wait_for_step(&mut job, &hosts, 1 + random(50));
        for host in signalled {
            kill(job.mgpuruns(*host)[0], signal).unwrap();
        }
        let stopped = job.finish();
        stopped.iter().for_each(|agent| _ = agent.expect(74, &["stopped on request"]));
        resumes(&hosts, &training, &stopped[0], &whole);
    }
}

#[test]
fn the_command_stops_a_job_from_any_of_its_hosts() {
    let Some(hosts) = Hosts::start(2) else { return };
    let training = Training::new(16, "--steps 100000 --batch 4");
    let mut job = start_job(&hosts, &training);
    wait_for_step(&mut job, &hosts, 5);
    run(hosts.command(1, LAUNCHER).arg("stop")).expect(0, &["asked to stop: launcher "]);
    job.finish().iter().for_each(|agent| _ = agent.expect(74, &["stopped on request (SIGUSR1)"]));
}

/// All ranks of one host have ended; its agent passes the request on, and does not signal what it does not run.
#[test]
fn a_request_to_an_agent_whose_ranks_have_ended_stops_the_others() {
    let Some(hosts) = Hosts::start(2) else { return };
    for by_command in [false, true] {
        let options = ["-n", "1", "--backend", "cpu", "--no-prefix"];
        let job = Job::start(&hosts, &options, &[env!("CARGO_BIN_EXE_t-job"), "until-stopped"]);
        let agents = [0, 1].map(|host| job.mgpuruns(host)[1].as_raw() as u32);
        page::wait(agents[0], |page| page.checks_for_stops(0));
        page::wait(agents[1], |page| page.state(1) == RankState::Left);
        // The agent has reaped the process.
        until(|| {
            fs::read_to_string(format!("/proc/{0}/task/{0}/children", agents[1]))
                .is_ok_and(|ids| ids.is_empty())
        });
        if by_command {
            run(hosts.command(1, LAUNCHER).arg("stop")).expect(0, &["asked to stop: launcher "]);
        } else {
            kill(job.mgpuruns(1)[0], Signal::SIGUSR1).unwrap();
        }
        let stopped = job.finish();
        stopped.iter().for_each(|agent| _ = agent.expect(74, &["stopped on request (SIGUSR1)"]));
        stopped[1].expect(74, &["SIGUSR1: no rank of this host is running any more"]);
    }
}

#[test]
fn ranks_of_an_engine_on_several_hosts_stop_together() {
    let Some(hosts) = Hosts::start(2) else { return };
    let training = Training::new(16, "--steps 300 --batch 4");
    let whole = training.weights(mgpurun("-n 4"));
    let rank = |rank: u32| {
        let mut command = hosts.command((rank / 2) as usize, Path::new("env"));
        let variables = [
            ("SLURM_PROCID", rank.to_string()),
            ("SLURM_STEP_NUM_TASKS", "4".into()),
            ("SLURM_LOCALID", (rank % 2).to_string()),
            ("SLURM_NODEID", (rank / 2).to_string()),
            ("SLURM_STEP_NUM_NODES", "2".into()),
            ("SLURM_STEP_TASKS_PER_NODE", "2(x2)".into()),
            ("SLURM_STEP_NODELIST", "a,b".into()),
            ("SLURM_JOB_ID", "7".into()),
            ("SLURM_STEP_ID", "0".into()),
        ];
        command.envs(variables).env_remove("MGPU_BACKEND");
        command.env("CUDA_VISIBLE_DEVICES", "").env("MGPU_SECRET", job::SECRET);
        start(training.saved(command))
    };
    let mut ranks: Vec<_> = (0..4).map(rank).collect();
    let mut processes = Vec::new();
    for rank in &ranks {
        processes.push(hosts.program(rank));
    }
    page::wait(processes[0].as_raw() as u32, |page| page.progress(0).step > random(50));
    until(|| page::of_process(processes[2].as_raw() as u32).is_some_and(|page| page.checks_for_stops(3)));
    // A rank that serves nobody.
    kill(Pid::from_raw(processes[3].as_raw()), Signal::SIGTERM).unwrap();
    let stopped: Vec<Finished> = ranks.iter_mut().map(finish).collect();
    stopped.iter().for_each(|rank| _ = rank.expect(74, &[]));
    let step = stopped_after(&stopped[0]);
    let mut ranks: Vec<_> = (0..4).map(rank).collect();
    let resumed: Vec<Finished> = ranks.iter_mut().map(finish).collect();
    expect_resumed(&resumed[0], step);
    assert_eq!(resumed[0].weights(), whole);
}
