//! Adopts memory of its own in place and runs collectives on it: `t-adopt` in a rank, `t-adopt N` with N ranks as threads.
//! With `--lose RANK` that rank leaves in the middle, and the others must get their memory back.

use std::process::ExitCode;
use std::ptr::NonNull;

use mgpu::comm::AdoptedMemory;
use mgpu::{Communicator, DType, Error, ReduceOp, Result, World};

/// Fills what belongs to nobody.
const FILLER: f32 = -7.5;

/// What rank `rank` contributes at `index` in round `round`: exact in f32, and its sums, too.
fn input(rank: u32, index: usize, round: usize) -> f32 {
    (index % 997 + 1000 * rank as usize + 17 * round) as f32
}

/// Memory with something before and after the part to adopt, which begins at another place in its page on every rank.
struct Own {
    all: Vec<f32>,
    begin: usize,
    len: usize,
}

impl Own {
    fn new(rank: u32, len: usize) -> Self {
        let begin = 1500 + [0, 16, 1023, 100, 1][rank as usize % 5];
        Own { all: vec![FILLER; begin + len + 2000], begin, len }
    }

    fn base(&mut self) -> NonNull<f32> {
        NonNull::from(&mut self.all[self.begin])
    }

    /// Adopts the part.
    fn adopt(&mut self, comm: &mut Communicator) -> Result<AdoptedMemory> {
        // SAFETY: `all` is kept until the result is dropped, and used by this thread only, between operations.
        unsafe { comm.adopt_in_place(DType::F32, self.base().cast(), self.len) }
    }

    fn write(&mut self, value: impl Fn(usize) -> f32) {
        let base = self.base().as_ptr();
        // SAFETY: within `all`. Volatile, because peers change the memory behind the compiler's back.
        (0..self.len).for_each(|index| unsafe { base.add(index).write_volatile(value(index)) });
    }

    fn expect(&mut self, what: &str, value: impl Fn(usize) -> f32) {
        let base = self.base().as_ptr();
        for index in 0..self.len {
            // SAFETY: as in `write`.
            let found = unsafe { base.add(index).read_volatile() };
            assert_eq!(found, value(index), "{what}: element {index} of {}", self.len);
        }
        let (before, after) = (&self.all[..self.begin], &self.all[self.begin + self.len..]);
        assert!(before.iter().chain(after).all(|value| *value == FILLER), "{what}: memory beside it");
    }
}

/// Runs all operations on adopted memory of several lengths. Panics at the first wrong element.
fn operations(world: &mut World) -> Result<()> {
    let mut comm = world.communicator()?;
    let (rank, ranks) = (comm.rank(), comm.size());
    let shared = comm.capabilities().shares_memory;
    for len in [0, 1, 10, 16_383, 17_000, 20_000, 1_000_003] {
        let mut own = Own::new(rank, len);
        own.write(|index| input(rank, index, 0));
        let mut adopted = own.adopt(&mut comm)?;
        // Two edges of up to a page lie outside.
        let is_large = len * 4 >= (64 << 10) + 2 * 4096;
        assert!(adopted.is_in_place() == (shared && is_large) || len == 17_000, "{len} elements");
        own.expect("after the adoption", |index| input(rank, index, 0));
        for round in 0..3 {
            own.write(|index| input(rank, index, round));
            adopted.all_reduce(&mut comm, ReduceOp::Sum)?;
            let sum = |index| (0..ranks).map(|rank| input(rank, index, round)).sum();
            own.expect("all_reduce", sum);
            own.write(|index| input(rank, index, round + 10));
            adopted.broadcast(&mut comm, ranks - 1)?;
            own.expect("broadcast", |index| input(ranks - 1, index, round + 10));
            own.write(|index| input(rank, index, round));
            adopted.reduce(&mut comm, ReduceOp::Max, 0)?;
            let kept = |index| input(if rank == 0 { ranks - 1 } else { rank }, index, round);
            own.expect("reduce", kept);
        }
        // Peers may still use theirs.
        drop(adopted);
        own.write(|index| input(rank, index, 5));
        comm.barrier()?;
        own.expect("after the release", |index| input(rank, index, 5));
        // The rank of the world's last communicator goes on with private memory.
        let mut values = own.all;
        comm.all_reduce_slice(&mut values[..2000], ReduceOp::Min)?;
    }
    refusals(&mut comm)
}

/// Different lengths are refused on every rank, and memory of any kind is accepted.
fn refusals(comm: &mut Communicator) -> Result<()> {
    let mut own = Own::new(comm.rank(), 20_000 + comm.rank() as usize);
    if comm.size() > 1 {
        let error = own.adopt(comm).expect_err("lengths differ");
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        assert!(error.to_string().contains("all ranks must pass as many"), "{error}");
    }
    // Arena memory of rank 0 is no private memory: all ranks copy.
    let mut arena = comm.allocate(DType::F32, 30_000)?;
    let mut own = Own::new(comm.rank(), 30_000);
    let base = if comm.rank() == 0 { NonNull::from(&mut arena.as_mut_slice::<f32>()[0]) } else { own.base() };
    // SAFETY: both outlive the result.
    let mut adopted = unsafe { comm.adopt_in_place(DType::F32, base.cast(), 30_000)? };
    assert!(!adopted.is_in_place());
    adopted.all_reduce(comm, ReduceOp::Avg)?;
    comm.barrier()
}

/// `lost` ends while the others reduce. Panics unless their memory is private and usable again afterwards.
fn lose(world: &mut World, lost: u32) -> Result<()> {
    let mut comm = world.communicator()?;
    let mut own = Own::new(comm.rank(), 500_000);
    let mut adopted = own.adopt(&mut comm)?;
    adopted.all_reduce(&mut comm, ReduceOp::Sum)?;
    if comm.rank() == lost {
        // Its memory is still adopted when the process ends.
        std::process::exit(9);
    }
    let error = adopted.all_reduce(&mut comm, ReduceOp::Sum).expect_err("a rank is lost");
    let again = adopted.all_reduce(&mut comm, ReduceOp::Sum).expect_err("an operation has failed");
    assert!(again.to_string().contains("drop it to get the memory back"), "{again}");
    drop(adopted);
    own.write(|index| index as f32);
    own.expect("after the loss", |index| index as f32);
    Err(error)
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments[..] {
        [] => World::from_env().and_then(|mut world| operations(&mut world)),
        ["--lose", rank] => {
            let lost = rank.parse().expect("a rank");
            World::from_env().and_then(|mut world| lose(&mut world, lost))
        }
        [ranks] => {
            let worlds = World::threads(ranks.parse().expect("a number of ranks"));
            worlds.and_then(|worlds| {
                std::thread::scope(|scope| {
                    let ranks: Vec<_> = worlds
                        .into_iter()
                        .map(|mut world| scope.spawn(move || operations(&mut world)))
                        .collect();
                    ranks.into_iter().try_for_each(|rank| rank.join().expect("a rank without panic"))
                })
            })
        }
        _ => panic!("unknown arguments {arguments:?}"),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
