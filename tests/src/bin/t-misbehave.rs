//! A rank that misbehaves between all-reduces: `t-misbehave FAULT RANK PATH [SEED]`, with PATH one of
//! `faults::PAYLOAD_PATHS`. With a seed, the fault happens at a random moment during an operation; without, before
//! one. The other ranks continue until they get an error, print it, try once more, print that result, and exit with
//! code 9. After a fault that all ranks learn of in the operation itself, each exits when all have printed theirs, so that
//! none learns of it by the exit of another rank.
//!
//! All ranks ignore SIGTERM, so that the healthy ones have time to report.

use std::process::ExitCode;
use std::time::Duration;

use mgpu::{Buffer, Communicator, DType, ReduceOp, Result, World};
use mgpu_tests::faults::PayloadPath;
use nix::sys::signal::{SigSet, Signal, kill};
use nix::unistd::Pid;

/// Number of all-reduces before the fault.
const HEALTHY: usize = 3;

/// Faults by which ranks disagree on an operation.
const MISMATCHES: [&str; 9] = [
    "wrong-count",
    "wrong-place",
    "wrong-type",
    "wrong-reduction",
    "wrong-algorithm",
    "barrier",
    "broadcast",
    "send",
    "recv",
];

fn main() -> ExitCode {
    let mut stubborn = SigSet::empty();
    stubborn.add(Signal::SIGTERM);
    stubborn.thread_block().expect("SIGTERM can be blocked");
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (fault, culprit, payload, seed) = match &arguments[..] {
        [fault, culprit, payload] => (fault, culprit, payload, None),
        [fault, culprit, payload, seed] => {
            (fault, culprit, payload, Some(seed.parse().expect("SEED is a number")))
        }
        _ => panic!("usage: t-misbehave FAULT RANK PATH [SEED]"),
    };
    let culprit = culprit.parse().expect("RANK is a number");
    let payload = PayloadPath::named(payload).expect("PATH is one of PAYLOAD_PATHS");
    match run(fault, culprit, payload, seed) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(9)
        }
    }
}

fn run(fault: &str, culprit: u32, payload: PayloadPath, seed: Option<u64>) -> Result<()> {
    if fault == "never-join" && std::env::var("RANK").as_deref() == Ok(&culprit.to_string()) {
        park();
    }
    let mut world = World::from_env()?;
    let mut comm = world.communicator()?;
    let mut buffer = match payload.in_arena {
        true => comm.allocate(DType::F32, payload.len)?,
        false => Buffer::zeroed::<f32>(payload.len),
    };
    comm.set_algorithm(payload.algorithm);
    let mut made = 0;
    // A slow rank may notice the fault before it has made as many all-reduces as the culprit.
    let error = loop {
        if made == HEALTHY && comm.rank() == culprit {
            match seed {
                None => {
                    let result = misbehave(fault, &mut comm, buffer, payload);
                    await_reports(&world, fault);
                    return result;
                }
                Some(seed) => end_soon(fault, seed),
            }
        }
        match comm.all_reduce(buffer, ReduceOp::Sum) {
            Ok(pending) => buffer = pending.wait()?,
            Err(error) => break error,
        }
        made += 1;
    };
    match comm.barrier() {
        Ok(()) => eprintln!("then: all is well"),
        Err(error) => eprintln!("then: {error}"),
    }
    await_reports(&world, fault);
    Err(error)
}

/// Waits until all ranks have come here, if the fault lets all of them come.
fn await_reports(world: &World, fault: &str) {
    if MISMATCHES.contains(&fault) {
        let store = world.store().expect("a launcher");
        let _ = store.barrier("all have reported", Duration::from_secs(20));
    }
}

/// Commits the fault, and ends the rank's part if it is still alive.
fn misbehave(fault: &str, comm: &mut Communicator, buffer: Buffer, payload: PayloadPath) -> Result<()> {
    let (op, len, next) = (ReduceOp::Sum, payload.len, (comm.rank() + 1) % comm.size());
    match fault {
        "wrong-count" => drop(comm.all_reduce(buffer.split_at(len / 2).0, op)?.wait()?),
        "wrong-place" => drop(comm.all_reduce(buffer.split_at(len / 2).1, op)?.wait()?),
        "wrong-type" => drop(comm.all_reduce(Buffer::zeroed::<i32>(len), op)?.wait()?),
        "wrong-reduction" => drop(comm.all_reduce(buffer, ReduceOp::Max)?.wait()?),
        "wrong-algorithm" => {
            comm.set_algorithm(payload.other_algorithm());
            drop(comm.all_reduce(buffer, op)?.wait()?);
        }
        "barrier" => comm.barrier()?,
        "broadcast" => drop(comm.broadcast(buffer, 0)?.wait()?),
        // More than the channel holds.
        "send" => drop(comm.send(Buffer::zeroed::<f32>(1 << 20), next)?.wait()?),
        "recv" => drop(comm.recv(Buffer::zeroed::<f32>(len), next)?.wait()?),
        "panic" => panic!("this rank panics"),
        _ => end(fault),
    }
    Ok(())
}

/// Ends this process from another thread during collectives, at any moment.
fn end_soon(fault: &str, seed: u64) {
    let fault = fault.to_owned();
    std::thread::spawn(move || {
        let turns = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 44;
        (0..turns).for_each(|_| std::hint::spin_loop());
        end(&fault);
    });
}

fn end(fault: &str) {
    let signal = |signal| kill(Pid::this(), signal).expect("a process may signal itself");
    match fault {
        "exit-0" => std::process::exit(0),
        "exit-3" => std::process::exit(3),
        "kill" => signal(Signal::SIGKILL),
        "stop" => signal(Signal::SIGSTOP),
        other => panic!("unknown fault {other}"),
    }
}

fn park() -> ! {
    loop {
        std::thread::park();
    }
}
