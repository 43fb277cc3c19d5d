//! The test bodies that every kind of world runs: all collectives, element types, reductions, algorithms and unusual
//! lengths, each result compared bit for bit with the [reference](mod@reference) result. The real NCCL may round sums of three or
//! more ranks differently. A [`Case`] is a single one, for property tests.

mod groups;
mod reference;

use std::ops::Range;

pub use groups::groups;
use half::{bf16, f16};
use mgpu::comm::shard;
use mgpu::{Algorithm, Buffer, Communicator, DType, ReduceOp, Result, World};
use reference::{Sample, assert_equal, input, reduced, reduced_part, uneven, wrong_in_any_order};

use crate::fake_gpu;

/// Unusual lengths: none, one, a vector register, more than a cache line, more than a slot, many blocks and a
/// remainder.
const LENGTHS: [usize; 6] = [0, 1, 4, 100, 4097, (1 << 19) + 3];
/// Above this length, only some element types and reductions are tested: the code paths are the same for all.
const LARGE: usize = 100_000;
/// Maximum payload of the eager algorithm in bytes.
const EAGER_BYTES: usize = 16 << 10;

/// The memory of a collective's buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BufferKind {
    /// Shared memory that peers access directly.
    Arena,
    /// Memory of one rank only.
    Private,
}

/// One collective with all its parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    /// Memory of the buffers.
    pub kind: BufferKind,
    /// Elements of the allocation before the buffer; one more follows it.
    pub offset: usize,
    /// Element type.
    pub dtype: DType,
    /// Reduction, for collectives with one.
    pub op: ReduceOp,
    /// Number of elements.
    pub len: usize,
    /// The collective.
    pub collective: Collective,
}

/// The collectives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Collective {
    /// With every algorithm that supports it.
    AllReduce,
    /// A shard to each rank.
    ReduceScatter,
    /// A shard from each rank.
    AllGather,
    /// From the rank of this number, modulo the number of ranks.
    Broadcast(u32),
    /// To the rank of this number, modulo the number of ranks.
    Reduce(u32),
    /// A shard from each rank to each.
    AllToAll,
    /// A shard from each rank to the rank of this number, modulo the number of ranks.
    Gather(u32),
    /// A shard to each rank from the rank of this number, modulo the number of ranks.
    Scatter(u32),
    /// Lengths that differ between ranks: gathered, exchanged, and as bytes.
    Uneven,
    /// Around the ring.
    Messages,
    /// No payload.
    Barrier,
}

impl Case {
    /// Runs the case and verifies the result. Panics at the first wrong element.
    ///
    /// # Errors
    /// As the collective.
    pub fn run(&self, comm: &mut Communicator) -> Result<()> {
        match self.dtype {
            DType::F32 => self.run_with::<f32>(comm),
            DType::F64 => self.run_with::<f64>(comm),
            DType::F16 => self.run_with::<f16>(comm),
            DType::Bf16 => self.run_with::<bf16>(comm),
            DType::I32 => self.run_with::<i32>(comm),
            DType::I64 => self.run_with::<i64>(comm),
            DType::U8 => self.run_with::<u8>(comm),
        }
    }

    fn run_with<T: Sample>(&self, comm: &mut Communicator) -> Result<()> {
        let (len, op, ranks) = (self.len, self.op, comm.size());
        let mut test =
            CollectiveTest { comm, kinds: &[self.kind], algorithms: &Algorithm::ALL, offset: self.offset };
        match self.collective {
            Collective::AllReduce => test.all_reduce::<T>(len, op),
            Collective::ReduceScatter => test.reduce_scatter::<T>(len, op),
            Collective::AllGather => {
                test.all_gather::<T>(len)?;
                test.update_all_gather::<T>(len)
            }
            Collective::Broadcast(root) => test.broadcast::<T>(len, root % ranks),
            Collective::Reduce(root) => test.reduce::<T>(len, op, root % ranks),
            Collective::AllToAll => test.all_to_all::<T>(len / ranks as usize),
            Collective::Gather(root) => test.gather::<T>(len, root % ranks),
            Collective::Scatter(root) => test.scatter::<T>(len, root % ranks),
            Collective::Uneven => {
                test.all_gather_v::<T>(len)?;
                test.all_to_all_v::<T>(len)?;
                test.bytes(len)
            }
            Collective::Messages => test.messages::<T>(len),
            Collective::Barrier => test.comm.barrier(),
        }
    }
}

struct CollectiveTest<'a> {
    comm: &'a mut Communicator,
    /// Each collective runs with all of them, because the reference result is the same and takes longer to compute.
    kinds: &'a [BufferKind],
    algorithms: &'a [Algorithm],
    offset: usize,
}

impl CollectiveTest<'_> {
    /// A buffer with these values, inside a larger allocation, to test offsets too.
    fn buffer<T: Sample>(&mut self, kind: BufferKind, values: &[T]) -> Result<Buffer> {
        let whole = self.offset + values.len() + 1;
        let allocation = match kind {
            BufferKind::Private => Buffer::zeroed::<T>(whole),
            BufferKind::Arena => self.comm.allocate(T::DTYPE, whole)?,
        };
        let (_, tail) = allocation.split_at(self.offset);
        let (mut buffer, _) = tail.split_at(values.len());
        buffer.as_mut_slice().copy_from_slice(values);
        Ok(buffer)
    }

    /// A description for failure messages.
    fn describe<T: Sample>(&self, name: &str, len: usize, kind: BufferKind) -> String {
        format!("{name} of {len} {} ({kind:?} from element {})", T::DTYPE, self.offset)
    }

    /// Compares elements of a reduction with the reference result.
    fn assert_reduced<T: Sample>(
        &self,
        found: &[T],
        elements: Range<usize>,
        op: ReduceOp,
        expected: &[T],
        what: &dyn Fn() -> String,
    ) {
        // A sum of two is the same in both orders. The fake NCCL sums in rank order.
        let ranks = self.comm.size();
        if self.comm.capabilities().sums_in_rank_order || ranks < 3 || fake_gpu::is_loaded() {
            return assert_equal(found, expected, what);
        }
        assert_eq!(found.len(), expected.len(), "{}", what());
        if let Some(i) = wrong_in_any_order(found, expected, elements, op, ranks) {
            panic!("{}: element {i} is {:?} instead of {:?}", what(), found[i], expected[i]);
        }
    }

    fn all_reduce<T: Sample>(&mut self, len: usize, op: ReduceOp) -> Result<()> {
        let (rank, ranks) = (self.comm.rank(), self.comm.size());
        let (mine, expected) = (input::<T>(rank, len), reduced::<T>(ranks, len, op));
        for kind in self.kinds.iter().copied() {
            for algorithm in self.algorithms.iter().copied() {
                if algorithm == Algorithm::Eager && len * T::DTYPE.size() > EAGER_BYTES {
                    continue;
                }
                self.comm.set_algorithm(algorithm);
                let buffer = self.buffer(kind, &mine)?;
                let found = self.comm.all_reduce(buffer, op)?.wait()?;
                let what = || self.describe::<T>(&format!("{algorithm} {op} all_reduce"), len, kind);
                self.assert_reduced(found.as_slice::<T>(), 0..len, op, &expected, &what);
            }
        }
        self.comm.set_algorithm(Algorithm::Auto);
        Ok(())
    }

    fn reduce_scatter<T: Sample>(&mut self, len: usize, op: ReduceOp) -> Result<()> {
        let (rank, ranks) = (self.comm.rank(), self.comm.size());
        let shard = shard(len, ranks, rank);
        let (mine, expected) = (input::<T>(rank, len), reduced_part::<T>(ranks, shard.clone(), op));
        for kind in self.kinds.iter().copied() {
            let buffer = self.buffer(kind, &mine)?;
            let found = self.comm.reduce_scatter(buffer, op)?.wait()?;
            let what = || self.describe::<T>(&format!("{op} reduce_scatter"), len, kind);
            let found = &found.as_slice::<T>()[shard.clone()];
            self.assert_reduced(found, shard.clone(), op, &expected, &what);
        }
        Ok(())
    }

    fn all_gather<T: Sample>(&mut self, len: usize) -> Result<()> {
        let (rank, ranks) = (self.comm.rank(), self.comm.size());
        let shard = shard(len, ranks, rank);
        let expected = input::<T>(0, len);
        let mut mine = input::<T>(rank + 1, len);
        mine[shard.clone()].copy_from_slice(&expected[shard]);
        for kind in self.kinds.iter().copied() {
            let buffer = self.buffer(kind, &mine)?;
            let found = self.comm.all_gather(buffer)?.wait()?;
            assert_equal(found.as_slice::<T>(), &expected, &|| self.describe::<T>("all_gather", len, kind));
        }
        Ok(())
    }

    /// Updates two segments in blocks of any length; the rest must stay unchanged.
    fn update_all_gather<T: Sample>(&mut self, len: usize) -> Result<()> {
        let (rank, ranks) = (self.comm.rank(), self.comm.size());
        let (mut expected, mine) = (input::<T>(0, len), input::<T>(rank + 1, len));
        let segments = [len / 9..len / 3, len / 2..len];
        let own = |segment: usize| shard(segments[segment].len(), ranks, rank);
        for rest in [0..segments[0].start, segments[0].end..segments[1].start] {
            expected[rest.clone()].copy_from_slice(&mine[rest]);
        }
        for kind in self.kinds.iter().copied() {
            let buffer = self.buffer(kind, &mine)?;
            let (block, mut made) = (1 + len / 7, 0);
            let mut make = |segment: usize, begin: usize, values: &mut Buffer| {
                let elements = begin..begin + values.len();
                let (start, own) = (segments[segment].start, own(segment));
                assert!(start + own.start <= begin && elements.end <= start + own.end);
                assert!(values.len() <= block);
                made += values.len();
                values.as_mut_slice::<T>().copy_from_slice(&expected[elements]);
            };
            let found = self.comm.update_all_gather(buffer, &segments, block, &mut make)?.wait()?;
            assert_eq!(made, own(0).len() + own(1).len());
            let what = || self.describe::<T>("update_all_gather", len, kind);
            assert_equal(found.as_slice::<T>(), &expected, &what);
        }
        Ok(())
    }

    fn broadcast<T: Sample>(&mut self, len: usize, root: u32) -> Result<()> {
        let (mine, expected) = (input::<T>(self.comm.rank(), len), input::<T>(root, len));
        for kind in self.kinds.iter().copied() {
            let buffer = self.buffer(kind, &mine)?;
            let found = self.comm.broadcast(buffer, root)?.wait()?;
            let what = || self.describe::<T>(&format!("broadcast from {root}"), len, kind);
            assert_equal(found.as_slice::<T>(), &expected, &what);
        }
        Ok(())
    }

    fn reduce<T: Sample>(&mut self, len: usize, op: ReduceOp, root: u32) -> Result<()> {
        let (rank, ranks) = (self.comm.rank(), self.comm.size());
        let mine = input::<T>(rank, len);
        let reduced = (rank == root).then(|| reduced::<T>(ranks, len, op));
        for kind in self.kinds.iter().copied() {
            let buffer = self.buffer(kind, &mine)?;
            let found = self.comm.reduce(buffer, op, root)?.wait()?;
            let what = || self.describe::<T>(&format!("{op} reduce to {root}"), len, kind);
            match &reduced {
                Some(expected) => self.assert_reduced(found.as_slice(), 0..len, op, expected, &what),
                None => assert_equal(found.as_slice::<T>(), &mine, &what),
            }
        }
        Ok(())
    }

    /// Shards of `len` elements.
    fn all_to_all<T: Sample>(&mut self, len: usize) -> Result<()> {
        let (rank, ranks) = (self.comm.rank() as usize, self.comm.size());
        let whole = len * ranks as usize;
        let own = rank * len..(rank + 1) * len;
        let expected: Vec<T> =
            (0..ranks).flat_map(|peer| input::<T>(peer, whole)[own.clone()].to_vec()).collect();
        let mine = input::<T>(rank as u32, whole);
        for kind in self.kinds.iter().copied() {
            let buffer = self.buffer(kind, &mine)?;
            let found = self.comm.all_to_all(buffer)?.wait()?;
            assert_equal(found.as_slice::<T>(), &expected, &|| self.describe::<T>("all_to_all", len, kind));
        }
        Ok(())
    }

    fn gather<T: Sample>(&mut self, len: usize, root: u32) -> Result<()> {
        let (rank, ranks) = (self.comm.rank(), self.comm.size());
        let mine = input::<T>(rank, len);
        let mut expected = mine.clone();
        if rank == root {
            for peer in 0..ranks {
                let shard = shard(len, ranks, peer);
                expected[shard.clone()].copy_from_slice(&input::<T>(peer, len)[shard]);
            }
        }
        for kind in self.kinds.iter().copied() {
            let buffer = self.buffer(kind, &mine)?;
            let found = self.comm.gather(buffer, root)?.wait()?;
            let what = || self.describe::<T>(&format!("gather to {root}"), len, kind);
            assert_equal(found.as_slice::<T>(), &expected, &what);
        }
        Ok(())
    }

    fn scatter<T: Sample>(&mut self, len: usize, root: u32) -> Result<()> {
        let (rank, ranks) = (self.comm.rank(), self.comm.size());
        let (mine, own) = (input::<T>(rank, len), shard(len, ranks, rank));
        let mut expected = mine.clone();
        expected[own.clone()].copy_from_slice(&input::<T>(root, len)[own]);
        for kind in self.kinds.iter().copied() {
            let buffer = self.buffer(kind, &mine)?;
            let found = self.comm.scatter(buffer, root)?.wait()?;
            let what = || self.describe::<T>(&format!("scatter from {root}"), len, kind);
            assert_equal(found.as_slice::<T>(), &expected, &what);
        }
        Ok(())
    }

    /// Parts of 0 to `len` elements.
    fn all_gather_v<T: Sample>(&mut self, len: usize) -> Result<()> {
        let (rank, ranks) = (self.comm.rank(), self.comm.size());
        let counts: Vec<usize> = (0..ranks).map(|rank| uneven(len, rank, 0)).collect();
        let begin = counts[..rank as usize].iter().sum::<usize>();
        let expected: Vec<T> = (0..ranks).flat_map(|rank| input(rank, counts[rank as usize])).collect();
        let mut mine = input::<T>(rank + 1, expected.len());
        let own = begin..begin + counts[rank as usize];
        mine[own.clone()].copy_from_slice(&expected[own]);
        for kind in self.kinds.iter().copied() {
            let buffer = self.buffer(kind, &mine)?;
            let found = self.comm.all_gather_v(buffer, &counts)?.wait()?;
            let what = || self.describe::<T>("all_gather_v", len, kind);
            assert_equal(found.as_slice::<T>(), &expected, &what);
        }
        Ok(())
    }

    /// Messages of 0 to `len` elements.
    fn all_to_all_v<T: Sample>(&mut self, len: usize) -> Result<()> {
        let (rank, ranks) = (self.comm.rank(), self.comm.size());
        let message = |from: u32, to: u32| input::<T>(from * ranks + to, uneven(len, from, to));
        let sent: Vec<usize> = (0..ranks).map(|to| uneven(len, rank, to)).collect();
        let received: Vec<usize> = (0..ranks).map(|from| uneven(len, from, rank)).collect();
        let mine: Vec<T> = (0..ranks).flat_map(|to| message(rank, to)).collect();
        let expected: Vec<T> = (0..ranks).flat_map(|from| message(from, rank)).collect();
        for kind in self.kinds.iter().copied() {
            // Arenas have the same length on all ranks.
            let mut part = |values: &[T]| -> Result<Buffer> {
                let mut padded = values.to_vec();
                padded.resize(len * ranks as usize, T::sample(0));
                Ok(self.buffer(kind, &padded)?.split_at(values.len()).0)
            };
            let send = part(&mine)?;
            let receive = part(&vec![T::sample(1); expected.len()])?;
            let found = self.comm.all_to_all_v(&send, &sent, receive, &received)?.wait()?;
            let what = || self.describe::<T>("all_to_all_v", len, kind);
            assert_equal(found.as_slice::<T>(), &expected, &what);
            assert_equal(send.as_slice::<T>(), &mine, &what);
        }
        Ok(())
    }

    /// A different number of bytes on each rank.
    fn bytes(&mut self, len: usize) -> Result<()> {
        let of = |rank: u32| input::<u8>(rank, uneven(len, rank, 1));
        let (rank, ranks) = (self.comm.rank(), self.comm.size());
        let found = self.comm.all_gather_bytes(&of(rank))?;
        assert_eq!(found, (0..ranks).map(of).collect::<Vec<_>>(), "all_gather_bytes of {len}");
        assert_eq!(
            self.comm.broadcast_bytes(&of(rank), ranks - 1)?,
            of(ranks - 1),
            "broadcast_bytes of {len}"
        );
        Ok(())
    }

    /// Messages around the ring: even ranks send first, which avoids a deadlock.
    fn messages<T: Sample>(&mut self, len: usize) -> Result<()> {
        let (rank, ranks) = (self.comm.rank(), self.comm.size());
        if ranks == 1 {
            return Ok(());
        }
        let (left, right) = neighbours(self.comm);
        let (mine, expected) = (input::<T>(rank, len), input::<T>(left, len));
        for kind in self.kinds.iter().copied() {
            let (outgoing, incoming) = (self.buffer(kind, &mine)?, self.buffer(kind, &mine)?);
            let found = if rank % 2 == 0 {
                let _ = self.comm.send(outgoing, right)?.wait()?;
                self.comm.recv(incoming, left)?.wait()?
            } else {
                let found = self.comm.recv(incoming, left)?.wait()?;
                let _ = self.comm.send(outgoing, right)?.wait()?;
                found
            };
            let what = || self.describe::<T>("send and recv", len, kind);
            assert_equal(found.as_slice::<T>(), &expected, &what);
        }
        Ok(())
    }

    /// The collectives without a reduction, with shards of `len` elements.
    fn moves<T: Sample>(&mut self, len: usize) -> Result<()> {
        let ranks = self.comm.size();
        let whole = len * ranks as usize;
        self.all_to_all::<T>(len)?;
        // Equal shards, and unequal ones.
        self.all_gather::<T>(whole)?;
        self.all_gather::<T>(len + 1)?;
        self.update_all_gather::<T>(len + 1)?;
        for root in [0, ranks - 1] {
            self.broadcast::<T>(whole, root)?;
            self.gather::<T>(len + 1, root)?;
            self.scatter::<T>(len + 1, root)?;
        }
        self.all_gather_v::<T>(len)?;
        self.all_to_all_v::<T>(len)?;
        self.bytes(len)?;
        self.messages::<T>(len)
    }

    /// The collectives with a reduction: of `len` elements, and of shards.
    fn reductions<T: Sample>(&mut self, len: usize, shard: usize, op: ReduceOp) -> Result<()> {
        let ranks = self.comm.size();
        let whole = shard * ranks as usize;
        self.all_reduce::<T>(len, op)?;
        self.reduce_scatter::<T>(whole, op)?;
        self.reduce_scatter::<T>(shard + 1, op)?;
        self.reduce::<T>(whole, op, 0)?;
        self.reduce::<T>(whole, op, ranks - 1)
    }

    fn element<T: Sample>(&mut self) -> Result<()> {
        for len in LENGTHS {
            let large = len > LARGE;
            if large && !matches!(T::DTYPE, DType::F32 | DType::Bf16) {
                continue;
            }
            let shard = if large { len / 8 } else { len };
            self.moves::<T>(shard)?;
            for op in ReduceOp::ALL {
                // NCCL averages bytes by dividing a sum that may wrap, as documented.
                let wraps = op == ReduceOp::Avg
                    && T::DTYPE == DType::U8
                    && !self.comm.capabilities().sums_in_rank_order;
                if (large && op != ReduceOp::Avg) || wraps {
                    continue;
                }
                self.reductions::<T>(len, shard, op)?;
            }
        }
        Ok(())
    }
}

/// The ranks to the left and to the right in the ring.
fn neighbours(comm: &Communicator) -> (u32, u32) {
    let (rank, ranks) = (comm.rank(), comm.size());
    ((rank + ranks - 1) % ranks, (rank + 1) % ranks)
}

/// Runs every collective in `world`. Panics at the first wrong element.
///
/// # Errors
/// As the collectives.
pub fn all(mut world: World) -> Result<()> {
    all_of(&mut world.communicator()?, &[BufferKind::Arena, BufferKind::Private], &Algorithm::ALL)
}

/// As [`all`], where there is one algorithm.
///
/// # Errors
/// As the collectives.
pub fn all_kinds(mut world: World) -> Result<()> {
    all_of(&mut world.communicator()?, &[BufferKind::Arena, BufferKind::Private], &[Algorithm::Auto])
}

fn all_of(comm: &mut Communicator, kinds: &[BufferKind], algorithms: &[Algorithm]) -> Result<()> {
    let mut test = CollectiveTest { comm, kinds, algorithms, offset: 3 };
    test.element::<f32>()?;
    test.element::<f64>()?;
    test.element::<f16>()?;
    test.element::<bf16>()?;
    test.element::<i32>()?;
    test.element::<i64>()?;
    test.element::<u8>()?;
    comm.barrier()
}

/// Private buffers that are so large that ranks read them in each other's memory, if they can. Panics at the first wrong
/// element.
///
/// # Errors
/// As the collectives.
pub fn large_private(mut world: World) -> Result<()> {
    let mut comm = world.communicator()?;
    let mut test = CollectiveTest {
        comm: &mut comm,
        kinds: &[BufferKind::Private],
        algorithms: &[Algorithm::Auto],
        offset: 3,
    };
    for len in [(1 << 20) - 1, 1 << 20, (1 << 20) + 5] {
        test.all_reduce::<f32>(len, ReduceOp::Sum)?;
        test.reduce_scatter::<f32>(len, ReduceOp::Avg)?;
        test.all_gather::<f32>(len)?;
    }
    // Of another element size, with small operations in between.
    test.all_gather_v::<bf16>(1 << 20)?;
    test.broadcast::<f64>(3, 0)?;
    test.all_reduce::<bf16>((2 << 20) + 1, ReduceOp::Avg)?;
    test.all_reduce::<i32>(100_000, ReduceOp::Max)?;
    // Two payloads that fill the caches: copies go around them.
    if test.comm.size() == 2 {
        let mut test = CollectiveTest { kinds: &[BufferKind::Private, BufferKind::Arena], ..test };
        let len = (16 << 20) + 7;
        test.all_gather::<u8>(len)?;
        test.broadcast::<u8>(len, 0)?;
        test.all_to_all_v::<u8>(len)?;
        test.messages::<u8>(len)?;
    }
    comm.barrier()
}

/// Alternates between two communicators of one world, with memory of either. Panics at the first wrong element.
///
/// # Errors
/// As the collectives.
pub fn two_communicators(mut world: World) -> Result<()> {
    let mut comms = [world.communicator()?, world.communicator()?];
    let (rank, ranks) = (world.rank(), world.size());
    for (turn, len) in [3, 150, 5000, 300_000].into_iter().enumerate() {
        let expected = reduced::<i32>(ranks, len, ReduceOp::Sum);
        let mut buffers = [comms[0].allocate(DType::I32, len)?, comms[1].allocate(DType::I32, len)?];
        // The first is ahead of the second by some operations, a different number in each round.
        (0..turn).try_for_each(|_| comms[0].barrier())?;
        for (user, owner, algorithm) in [
            (0, 1, Algorithm::Auto),
            (1, 0, Algorithm::Auto),
            (1, 1, Algorithm::Direct),
            (0, 0, Algorithm::Ring),
            (1, 0, Algorithm::Ring),
            (0, 1, Algorithm::Direct),
        ] {
            let mut buffer = std::mem::replace(&mut buffers[owner], Buffer::zeroed::<u8>(0));
            buffer.as_mut_slice().copy_from_slice(&input::<i32>(rank, len));
            comms[user].set_algorithm(algorithm);
            buffers[owner] = comms[user].all_reduce(buffer, ReduceOp::Sum)?.wait()?;
            let what =
                || format!("{algorithm} all_reduce of {len} by communicator {user}, memory of {owner}");
            assert_equal(buffers[owner].as_slice::<i32>(), &expected, &what);
        }
    }
    let [mut first, mut second] = comms;
    second.barrier()?;
    drop(second);
    first.barrier()
}

/// Leaves messages to both neighbours waiting during a ring all-reduce between the same ranks. Panics at the first
/// wrong element.
///
/// # Errors
/// As the collectives.
pub fn messages_during_a_ring(mut world: World) -> Result<()> {
    let mut comm = world.communicator()?;
    let (rank, ranks) = (comm.rank(), comm.size());
    let (left, right) = neighbours(&comm);
    comm.set_algorithm(Algorithm::Ring);
    for (turn, len) in [0, 1, 1000, 100_000].into_iter().enumerate() {
        // Both fit into a channel, so that `send` does not block; with two ranks they share one channel.
        let messages = [input::<f32>(rank, 4000), input::<f32>(rank + 100, 1 + turn)];
        let _ = comm.send(Buffer::from_slice(&messages[0]), right)?.wait()?;
        let _ = comm.send(Buffer::from_slice(&messages[1]), left)?.wait()?;
        let found = comm.all_reduce(Buffer::from_slice(&input::<f32>(rank, len)), ReduceOp::Sum)?.wait()?;
        let expected = reduced::<f32>(ranks, len, ReduceOp::Sum);
        assert_equal(found.as_slice::<f32>(), &expected, &|| format!("all_reduce of {len} amid messages"));
        let found = comm.recv(Buffer::zeroed::<f32>(4000), left)?.wait()?;
        assert_equal(found.as_slice(), &input::<f32>(left, 4000), &|| {
            format!("message {turn} from the left")
        });
        let found = comm.recv(Buffer::zeroed::<f32>(1 + turn), right)?.wait()?;
        let expected = input::<f32>(right + 100, 1 + turn);
        assert_equal(found.as_slice(), &expected, &|| format!("message {turn} from the right"));
    }
    comm.barrier()
}

/// Asks for more memory than any machine has. Panics unless every rank gets an error, the communicator still works,
/// and the process holds as many memory files as before.
///
/// # Errors
/// As the collectives.
pub fn shortage(mut world: World) -> Result<()> {
    let mut comm = world.communicator()?;
    let before = memory_files();
    for round in 1..=3 {
        let error = comm.allocate(DType::F32, 1 << 43).expect_err("no machine has 32 TiB for every rank");
        let text = error.to_string();
        assert!(matches!(error, mgpu::Error::InvalidArgument { .. }), "{error:?}");
        assert!(text.contains(" bytes are needed where ") && text.contains(" are available, "), "{text}");
        assert!(text.ends_with(&format!("for each of {} ranks", comm.size())), "{text}");
        let error = comm.allocate(DType::F64, usize::MAX).expect_err("the size fits no address");
        assert!(error.to_string().contains("more than any machine has"), "{error}");
        assert_eq!(memory_files(), before);
        let case = Case {
            kind: BufferKind::Arena,
            offset: 0,
            dtype: DType::F32,
            op: ReduceOp::Sum,
            len: 10_000 * round,
            collective: Collective::AllReduce,
        };
        case.run(&mut comm)?;
        assert_eq!(memory_files(), before, "what was allocated after the shortage is freed");
    }
    comm.barrier()
}

/// Number of memfds that this process has open or mapped. Other threads must not create any meanwhile.
fn memory_files() -> usize {
    let is_open = |entry: &std::fs::DirEntry| {
        std::fs::read_link(entry.path()).is_ok_and(|target| target.to_string_lossy().contains("memfd:"))
    };
    let open = std::fs::read_dir("/proc/self/fd").expect("/proc can be read").flatten();
    let maps = std::fs::read_to_string("/proc/self/maps").expect("/proc can be read");
    open.filter(is_open).count() + maps.lines().filter(|line| line.contains("memfd:")).count()
}
