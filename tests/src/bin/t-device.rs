//! A rank with a GPU: `t-device all`, `groups`, `capture` or `alone` test its communicator; `t-device show` only prints which
//! interface NCCL is told to take; `t-device loop [FAULT
//! RANK]` runs all-reduces until an error, prints it, tries once more, prints that result, and exits with code 9.
//! RANK injects FAULT before its fourth round.
//!
//! All ranks ignore SIGTERM, so that the healthy ones have time to report.

use std::process::ExitCode;

use mgpu::{DType, Error, ReduceOp, Result, World};
use mgpu_kernels::cuda::{Memory, Stream};
use mgpu_tests::device::{DeviceTest, input, reduced};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::unistd::Pid;

/// Rounds of a loop.
const TURNS: usize = 20;
/// Rounds before a fault.
const HEALTHY: usize = 3;

fn main() -> ExitCode {
    let mut stubborn = SigSet::empty();
    stubborn.add(Signal::SIGTERM);
    stubborn.thread_block().expect("SIGTERM can be blocked");
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(9)
        }
    }
}

fn run(arguments: &[String]) -> Result<()> {
    let mut world = World::from_env()?;
    let device = world.device().expect("the nccl backend has a GPU").clone();
    println!("rank {} of {} on {}", world.rank(), world.size(), device.name());
    for notice in world.notices() {
        println!("notice: {notice}");
    }
    if arguments[0] == "show" {
        println!("named {}.", std::env::var("NCCL_SOCKET_IFNAME").unwrap_or_default());
        return Ok(());
    }
    let comm = world.device_communicator()?;
    // Ends before the other communicator.
    let _second = world.device_communicator()?;
    let stream = Stream::new(&device)?;
    let test = DeviceTest { comm: &comm, stream: &stream };
    match arguments[0].as_str() {
        "all" => test.all(),
        "groups" => test.groups(),
        "capture" => capture(&test),
        "loop" => {
            let fault = arguments.get(1).map_or("none", String::as_str);
            let culprit = arguments.get(2).map(|rank| rank.parse::<u32>().expect("RANK is a number"));
            turns(&test, culprit.filter(|rank| *rank == comm.rank()).map(|_| fault))
        }
        other => panic!("unknown body {other}"),
    }
}

/// Several operations in a graph, replayed.
fn capture(test: &DeviceTest<'_>) -> Result<()> {
    let DeviceTest { comm, stream } = *test;
    let (rank, ranks, len) = (comm.rank(), comm.size(), 1000);
    let mine = Memory::from_slice(stream, &input::<f32>(rank, len))?;
    let sum = Memory::zeroed(comm.device(), DType::F32, len)?;
    let shard = Memory::from_slice(stream, &input::<i32>(rank, 10))?;
    let whole = Memory::zeroed(comm.device(), DType::I32, 10 * ranks as usize)?;
    // Sets up connections before the capture.
    comm.all_reduce_into(stream, mine.view(), sum.view(), ReduceOp::Sum)?;
    comm.all_gather(stream, shard.view(), whole.view())?;
    comm.wait(stream, "what comes before the capture")?;
    let captured = comm.capture(2, |group| {
        group.all_reduce_into(stream, mine.view(), sum.view(), ReduceOp::Sum)?;
        group.all_gather(stream, shard.view(), whole.view())
    })?;
    let expected = reduced::<f32>(ranks, len, ReduceOp::Sum);
    let gathered: Vec<i32> = (0..ranks).flat_map(|rank| input::<i32>(rank, 10)).collect();
    for turn in 0..5 {
        stream.zero(sum.view())?;
        stream.zero(whole.view())?;
        captured.launch(stream)?;
        test.expect(sum.view(), &expected, &format!("repetition {turn}"))?;
        test.expect(whole.view(), &gathered, &format!("repetition {turn}"))?;
    }
    // Uncaptured work continues as before.
    comm.all_reduce(stream, mine.view(), ReduceOp::Sum)?;
    test.expect(mine.view(), &expected, "an operation after the repetitions")
}

fn turns(test: &DeviceTest<'_>, fault: Option<&str>) -> Result<()> {
    let DeviceTest { comm, stream } = *test;
    let memory = Memory::zeroed(comm.device(), DType::F32, 1000)?;
    let turn = |turn: usize| {
        comm.all_reduce(stream, memory.view(), ReduceOp::Sum)?;
        let what = format!("turn {turn}");
        if fault == Some("local") { comm.wait_local(stream, &what) } else { comm.wait(stream, &what) }
    };
    for number in 0..TURNS {
        if number == HEALTHY
            && let Some(fault) = fault
        {
            if fault == "error" {
                return Err(Error::InvalidArgument {
                    operation: "turn",
                    problem: "an error of its own".into(),
                });
            }
            misbehave(fault);
        }
        if let Err(error) = turn(number) {
            match turn(number) {
                Ok(()) => eprintln!("then: all is well"),
                Err(error) => eprintln!("then: {error}"),
            }
            // Before its memory is freed: the collective may still be in the stream.
            comm.drain(stream);
            return Err(error);
        }
    }
    Ok(())
}

fn misbehave(fault: &str) {
    let signal = |signal| kill(Pid::this(), signal).expect("a process may signal itself");
    match fault {
        "kill" => signal(Signal::SIGKILL),
        "stop" => signal(Signal::SIGSTOP),
        "exit-0" => std::process::exit(0),
        "panic" => panic!("this rank panics"),
        // The rank treats all its work as local.
        "local" => {}
        "hang" => loop {
            std::thread::park();
        },
        other => panic!("unknown fault {other}"),
    }
}
