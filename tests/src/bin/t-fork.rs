//! A rank that forks during a run. `t-fork`: the child uses everything it has a copy of, drops it and exits; the
//! ranks continue. `t-fork linger RANK FOLDER`: the child of this rank lives as long as the folder exists, and the
//! rank exits with code 3.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use mgpu::Phase;
use mgpu::checkpoint::{Snapshot, Writer};
use mgpu::{ReduceOp, Result, World};
use mgpu_control::process::{Fork, fork};
use nix::sys::wait::{WaitStatus, waitpid};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let result = match &arguments[..] {
        [] => run(),
        [mode, rank, folder] if mode == "linger" => {
            linger(rank.parse().expect("RANK is a number"), folder.as_ref())
        }
        _ => panic!("usage: t-fork [linger RANK FOLDER]"),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn linger(culprit: u32, folder: &Path) -> Result<()> {
    let mut world = World::from_env()?;
    let mut comm = world.communicator()?;
    comm.barrier()?;
    if comm.rank() == culprit {
        match fork().expect("a process without threads can be forked") {
            Fork::Child => {
                while folder.exists() {
                    std::thread::sleep(Duration::from_millis(20));
                }
                std::process::exit(0);
            }
            Fork::Parent(_) => std::process::exit(3),
        }
    }
    comm.barrier()
}

fn run() -> Result<()> {
    let folder = tempfile::tempdir().expect("a folder");
    let mut world = World::from_env()?;
    let mut comm = world.communicator()?;
    let mut writer = Writer::new(folder.path(), 1)?;
    world.report_step(7);
    comm.barrier()?;
    match fork().expect("a process without threads can be forked") {
        Fork::Child => {
            // The parent removes it.
            std::mem::forget(folder);
            world.report_step(8);
            world.report_phase(Phase::Checkpoint);
            let store = world.store().expect("a run with a launcher");
            for error in [
                comm.barrier().unwrap_err(),
                store.set("key", b"value", &[], 1).unwrap_err().into(),
                writer.save(Snapshot::new(1)).unwrap_err(),
                world.communicator().map(drop).unwrap_err(),
            ] {
                println!("child: {error}");
            }
        }
        Fork::Parent(child) => {
            let end = waitpid(child, None).expect("a child can be waited for");
            assert!(matches!(end, WaitStatus::Exited(_, 0)), "{end:?}");
            let mut sum = [1.0];
            comm.all_reduce_slice(&mut sum, ReduceOp::Sum)?;
            world.store().expect("a run with a launcher").barrier("end", world.timeout())?;
            println!("{} ranks went on", sum[0]);
        }
    }
    Ok(())
}
