//! A rank that misbehaves: `t-misbehave FAULT RANK`. The others do what is right, print the error they get and
//! exit with code 9.
//!
//! SIGTERM is ignored by all, so that the well-behaved have the time to report.

use std::process::ExitCode;
use std::time::Duration;

use mgpu::{Buffer, Communicator, ReduceOp, Result, World};
use nix::sys::signal::{SigSet, Signal, raise};

/// Elements of the all-reduces: through an arena, so that several blocks and ranks are involved.
const LEN: usize = 100_000;

fn main() -> ExitCode {
    let mut stubborn = SigSet::empty();
    stubborn.add(Signal::SIGTERM);
    stubborn.thread_block().expect("SIGTERM can be blocked");
    let arguments: Vec<String> = std::env::args().collect();
    let [_, fault, culprit] = &arguments[..] else { panic!("usage: t-misbehave FAULT RANK") };
    let culprit: u32 = culprit.parse().expect("RANK is a number");
    match run(fault, culprit) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(9)
        }
    }
}

fn run(fault: &str, culprit: u32) -> Result<()> {
    if fault == "never-join" && std::env::var("RANK").as_deref() == Ok(&culprit.to_string()) {
        park();
    }
    let mut world = World::from_env()?;
    world.set_timeout(Duration::from_secs(2));
    let mut comm = world.communicator()?;
    let buffer = comm.allocate(mgpu::DType::F32, LEN)?;
    let buffer = comm.all_reduce(buffer, ReduceOp::Sum)?.wait()?;
    if comm.rank() == culprit {
        misbehave(fault, &mut *comm, buffer)?;
    } else {
        let _ = comm.all_reduce(buffer, ReduceOp::Sum)?.wait()?;
    }
    comm.barrier()
}

fn misbehave(fault: &str, comm: &mut dyn Communicator, buffer: Buffer) -> Result<()> {
    let (head, tail) = buffer.split_at(LEN / 2);
    match fault {
        "exit-3" => std::process::exit(3),
        "exit-0" => std::process::exit(0),
        "panic" => panic!("this rank panics"),
        "kill" => raise(Signal::SIGKILL).expect("a process can kill itself"),
        "silent" => park(),
        "wrong-length" => drop(comm.all_reduce(head, ReduceOp::Sum)?.wait()?),
        "wrong-place" => drop(comm.all_reduce(tail, ReduceOp::Sum)?.wait()?),
        "wrong-type" => drop(comm.all_reduce(Buffer::zeroed::<i32>(LEN), ReduceOp::Sum)?.wait()?),
        "wrong-reduction" => drop(comm.all_reduce(head, ReduceOp::Max)?.wait()?),
        "wrong-operation" => comm.barrier()?,
        other => panic!("unknown fault {other}"),
    }
    Ok(())
}

fn park() -> ! {
    loop {
        std::thread::park();
    }
}
