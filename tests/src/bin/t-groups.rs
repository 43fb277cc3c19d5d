//! A rank with groups under the nccl backend, in a grid of two columns: `t-groups grid` tests rows and columns on device
//! memory, `t-groups drops` drops them in another order on each rank.
//!
//! `t-groups FAULT RANK [device]` runs all-reduces in the row and the column in turn, on host buffers or on device
//! memory, until an error; RANK misbehaves in its row after a few turns. The ranks print the error, try once more, print
//! that result, and exit with code 9 after all others that can have printed theirs, so that none learns of an error by
//! the exit of another rank.
//!
//! All ranks ignore SIGTERM, so that the healthy ones have time to report.

use std::process::ExitCode;
use std::time::Duration;

use mgpu::{Buffer, Communicator, DType, DeviceCommunicator, Error, ReduceOp, Result, World};
use mgpu_kernels::cuda::{Memory, Stream};
use mgpu_tests::device::DeviceTest;
use nix::sys::signal::{SigSet, Signal, kill};
use nix::unistd::Pid;

/// Columns of the grid.
const WIDTH: u32 = 2;
/// Turns before a fault.
const HEALTHY: usize = 3;
/// Elements of an all-reduce.
const LEN: usize = 2048;

fn main() -> ExitCode {
    let mut stubborn = SigSet::empty();
    stubborn.add(Signal::SIGTERM);
    stubborn.thread_block().expect("SIGTERM can be blocked");
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut world = World::from_env().expect("a world");
    match run(&mut world, &arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            let store = world.store().expect("a launcher");
            let silent = silent_rank(&arguments);
            let others: Vec<u32> = (0..world.size()).filter(|rank| Some(*rank) != silent).collect();
            let _ = store.barrier_of("all have reported", &others, Duration::from_secs(20));
            ExitCode::from(9)
        }
    }
}

fn run(world: &mut World, arguments: &[String]) -> Result<()> {
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["grid"] => grid(world),
        ["drops"] => drops(world),
        [fault, culprit] => {
            let mut comm = world.communicator()?;
            let fault = is_culprit(world, culprit).then_some(fault);
            misbehave_in_split(fault);
            let row = comm.split(Some(world.rank() / WIDTH), 0)?.expect("a row");
            let column = comm.split(Some(world.rank() % WIDTH), 0)?.expect("a column");
            take_turns(&mut HostGrid { row, column }, fault)
        }
        [fault, culprit, "device"] => {
            let comm = world.device_communicator()?;
            let fault = is_culprit(world, culprit).then_some(fault);
            misbehave_in_split(fault);
            let row = comm.split(Some(world.rank() / WIDTH), 0)?.expect("a row");
            let column = comm.split(Some(world.rank() % WIDTH), 0)?.expect("a column");
            let stream = Stream::new(comm.device())?;
            take_turns(&mut DeviceGrid { row, column, stream }, fault)
        }
        _ => panic!("usage: t-groups grid|drops, or t-groups FAULT RANK [device]"),
    }
}

/// The rank that will not report, if it is known: the culprit, or the rank that the fake NCCL's fault names.
fn silent_rank(arguments: &[String]) -> Option<u32> {
    let rank = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["kill" | "hang" | "no-split", culprit, ..] => culprit.to_owned(),
        _ => std::env::var("FAKE_NCCL_FAULT").ok()?.strip_prefix("hang_call_split@")?.to_owned(),
    };
    Some(rank.parse().expect("a rank is a number"))
}

fn is_culprit(world: &World, culprit: &str) -> bool {
    world.rank() == culprit.parse::<u32>().expect("RANK is a number")
}

/// Rows and columns on device memory, in turn; a group of a group; ranks without a group; a group of one rank.
fn grid(world: &mut World) -> Result<()> {
    let comm = world.device_communicator()?;
    let (rank, ranks) = (comm.rank(), comm.size());
    let stream = Stream::new(comm.device())?;
    let row = comm.split(Some(rank / WIDTH), 0)?.expect("a row");
    // In reverse order.
    let column = comm.split(Some(rank % WIDTH), -(rank as i32))?.expect("a column");
    assert_eq!((row.rank(), row.size()), (rank % WIDTH, WIDTH.min(ranks - rank / WIDTH * WIDTH)));
    assert_eq!(column.size(), (ranks - rank % WIDTH).div_ceil(WIDTH));
    assert_eq!(column.rank(), column.size() - 1 - rank / WIDTH);
    let rest = comm.split((rank > 0).then_some(u32::MAX), 0)?;
    assert_eq!(rest.as_ref().map(DeviceCommunicator::rank), rank.checked_sub(1));
    let alone = comm.split(Some(rank), 0)?.expect("a group of one rank");
    let inner = match &rest {
        Some(rest) => rest.split(Some(rest.rank() % 2), 0)?,
        None => None,
    };
    assert_eq!(inner.as_ref().map(DeviceCommunicator::rank), rank.checked_sub(1).map(|rank| rank / 2));
    for _ in 0..2 {
        let all = [Some(&row), Some(&column), rest.as_ref(), Some(&alone), inner.as_ref(), Some(&comm)];
        all.into_iter().flatten().try_for_each(|comm| DeviceTest { comm, stream: &stream }.groups())?;
    }
    DeviceTest { comm: &row, stream: &stream }.all()
}

/// Every rank drops its groups in another order, the world's communicator first, last or between them.
fn drops(world: &mut World) -> Result<()> {
    let comm = world.device_communicator()?;
    let rank = comm.rank();
    let stream = Stream::new(comm.device())?;
    let mut groups = vec![
        comm.split(Some(rank / WIDTH), 0)?.expect("a row"),
        comm.split(Some(rank % WIDTH), 0)?.expect("a column"),
        comm,
    ];
    for group in &groups {
        DeviceTest { comm: group, stream: &stream }.groups()?;
    }
    groups.rotate_left(rank as usize % 3);
    while groups.len() > 1 {
        drop(groups.swap_remove(0));
    }
    Ok(())
}

/// One all-reduce in each of two groups.
trait Grid {
    fn in_row(&mut self, len: usize) -> Result<()>;
    fn in_column(&mut self) -> Result<()>;
}

struct HostGrid {
    row: Communicator,
    column: Communicator,
}

impl Grid for HostGrid {
    fn in_row(&mut self, len: usize) -> Result<()> {
        self.row.all_reduce(Buffer::zeroed::<f32>(len), ReduceOp::Sum)?.wait().map(drop)
    }

    fn in_column(&mut self) -> Result<()> {
        self.column.all_reduce(Buffer::zeroed::<f32>(LEN), ReduceOp::Sum)?.wait().map(drop)
    }
}

struct DeviceGrid {
    row: DeviceCommunicator,
    column: DeviceCommunicator,
    stream: Stream,
}

fn all_reduce(comm: &DeviceCommunicator, stream: &Stream, len: usize) -> Result<()> {
    let memory = Memory::zeroed(comm.device(), DType::F32, len)?;
    let reduced = comm.all_reduce(stream, memory.view(), ReduceOp::Sum);
    let reduced = reduced.and_then(|_| comm.wait(stream, "a turn"));
    if reduced.is_err() {
        // Before its memory is freed: the collective may still be in the stream.
        comm.drain(stream);
    }
    reduced
}

impl Grid for DeviceGrid {
    fn in_row(&mut self, len: usize) -> Result<()> {
        all_reduce(&self.row, &self.stream, len)
    }

    fn in_column(&mut self) -> Result<()> {
        all_reduce(&self.column, &self.stream, LEN)
    }
}

fn take_turns(grid: &mut impl Grid, fault: Option<&str>) -> Result<()> {
    let error = loop_until_error(grid, fault);
    match grid.in_column() {
        Ok(()) => eprintln!("then: all is well"),
        Err(error) => eprintln!("then: {error}"),
    }
    Err(error)
}

fn loop_until_error(grid: &mut impl Grid, fault: Option<&str>) -> Error {
    for turn in 0.. {
        let mut len = LEN;
        match fault.filter(|_| turn == HEALTHY) {
            None => {}
            Some("mismatch") => len = LEN / 2,
            Some("kill") => kill(Pid::this(), Signal::SIGKILL).expect("a process may signal itself"),
            Some("hang") => park(),
            Some(fault) => panic!("unknown fault {fault}"),
        }
        if let Err(error) = grid.in_row(len).and_then(|()| grid.in_column()) {
            return error;
        }
    }
    unreachable!("turns do not end")
}

/// The fault that is due before the split.
fn misbehave_in_split(fault: Option<&str>) {
    if fault == Some("no-split") {
        park();
    }
}

fn park() -> ! {
    loop {
        std::thread::park();
    }
}
