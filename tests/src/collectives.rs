//! The body that every kind of world runs: all collectives, element types, reductions, algorithms and awkward
//! lengths, each result compared bit for bit with a fold in rank order.

use half::{bf16, f16};
use mgpu::{Algorithm, Buffer, Communicator, DType, Element, ReduceOp, Result, World};

/// Awkward lengths: nothing, one, a vector register, more than a line, more than a slot, many blocks and a rest.
const LENGTHS: [usize; 6] = [0, 1, 4, 100, 4097, (1 << 20) + 3];
/// Above this length only some element types and reductions are run: the paths are the same for all.
const LARGE: usize = 100_000;

/// An element type with test values and the reduction's definition.
trait Sample: Element {
    fn sample(seed: u64) -> Self;
    fn fold(values: impl Iterator<Item = Self>, op: ReduceOp, ranks: u32) -> Self;
}

fn mix(seed: u64) -> u64 {
    let z = (seed ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (z ^ (z >> 31)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 32
}

macro_rules! sample {
    ($($type:ty, $acc:ty, $widen:expr, $narrow:expr, $sample:expr;)*) => {$(
        impl Sample for $type {
            fn sample(seed: u64) -> Self {
                $sample(mix(seed))
            }
            fn fold(values: impl Iterator<Item = Self>, op: ReduceOp, ranks: u32) -> Self {
                let combine = |a: $acc, b: $acc| match op {
                    ReduceOp::Sum | ReduceOp::Avg => a + b,
                    ReduceOp::Min => if a < b { a } else { b },
                    ReduceOp::Max => if a > b { a } else { b },
                    ReduceOp::Prod => a * b,
                };
                let total: $acc = values.map($widen).reduce(combine).unwrap();
                $narrow(if op == ReduceOp::Avg { total / (ranks as $acc) } else { total })
            }
        }
    )*};
}
sample! {
    f32, f32, |x| x, |x| x, |r| (r % 20011) as f32 / 7.0 - 1429.0;
    f64, f64, |x| x, |x| x, |r| (r % 20011) as f64 / 7.0 - 1429.0;
    f16, f32, f16::to_f32, f16::from_f32, |r| f16::from_f32((r % 401) as f32 / 128.0 - 1.5);
    bf16, f32, bf16::to_f32, bf16::from_f32, |r| bf16::from_f32((r % 401) as f32 / 128.0 - 1.5);
    i32, i64, i64::from, |x| x as i32, |r| (r % 200) as i32 - 100;
    i64, i64, |x| x, |x| x, |r| (r % 100) as i64 - 50;
    u8, u64, u64::from, |x| x as u8, |r| (r % 128) as u8;
}

/// What rank `rank` holds before a test.
fn input<T: Sample>(rank: u32, len: usize) -> Vec<T> {
    (0..len as u64).map(|i| T::sample(i * 64 + u64::from(rank))).collect()
}

/// The reduction of all ranks' inputs.
fn reduced<T: Sample>(ranks: u32, len: usize, op: ReduceOp) -> Vec<T> {
    (0..len as u64)
        .map(|i| T::fold((0..ranks).map(|rank| T::sample(i * 64 + u64::from(rank))), op, ranks))
        .collect()
}

fn assert_equal<T: Element>(found: &[T], expected: &[T], what: &dyn Fn() -> String) {
    assert_eq!(found.len(), expected.len(), "{}", what());
    if let Some(i) = (0..found.len()).find(|&i| found[i] != expected[i]) {
        panic!("{}: element {i} is {:?} instead of {:?}", what(), found[i], expected[i]);
    }
}

/// Memory the collective runs on.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Place {
    Arena,
    Private,
}

struct Bench<'a> {
    comm: &'a mut dyn Communicator,
    place: Place,
}

impl Bench<'_> {
    fn buffer<T: Sample>(&mut self, values: &[T]) -> Result<Buffer> {
        match self.place {
            Place::Private => Ok(Buffer::from_slice(values)),
            Place::Arena => {
                // An odd part of a larger allocation: offsets are exercised too.
                let (_, mut buffer) = self.comm.allocate(T::DTYPE, values.len() + 3)?.split_at(3);
                buffer.as_mut_slice().copy_from_slice(values);
                Ok(buffer)
            }
        }
    }

    fn all_reduce<T: Sample>(&mut self, len: usize, op: ReduceOp) -> Result<()> {
        let (rank, ranks, place) = (self.comm.rank(), self.comm.size(), self.place);
        let expected = reduced::<T>(ranks, len, op);
        for algorithm in Algorithm::ALL {
            if algorithm == Algorithm::Eager && len * T::DTYPE.size() > 8 << 10 {
                continue;
            }
            self.comm.set_algorithm(algorithm);
            let buffer = self.buffer(&input::<T>(rank, len))?;
            let found = self.comm.all_reduce(buffer, op)?.wait()?;
            let what = || format!("{algorithm} all_reduce of {len} {} ({op}, {place:?})", T::DTYPE);
            assert_equal(found.as_slice::<T>(), &expected, &what);
        }
        self.comm.set_algorithm(Algorithm::Auto);
        Ok(())
    }

    /// Everything but the all-reduce; `len` is a shard's length.
    fn others<T: Sample>(&mut self, len: usize, op: ReduceOp) -> Result<()> {
        let (rank, ranks, place) = (self.comm.rank(), self.comm.size(), self.place);
        let what = |name: &str| format!("{name} of {len} {} a rank ({op}, {place:?})", T::DTYPE);
        let whole = len * ranks as usize;
        let shard = rank as usize * len..(rank as usize + 1) * len;

        let buffer = self.buffer(&input::<T>(rank, whole))?;
        let found = self.comm.reduce_scatter(buffer, op)?.wait()?;
        let expected = reduced::<T>(ranks, whole, op);
        assert_equal(&found.as_slice::<T>()[shard.clone()], &expected[shard.clone()], &|| {
            what("reduce_scatter")
        });

        let expected = input::<T>(0, whole);
        let mut mine = input::<T>(rank + 1, whole);
        mine[shard.clone()].copy_from_slice(&expected[shard]);
        let buffer = self.buffer(&mine)?;
        let found = self.comm.all_gather(buffer)?.wait()?;
        assert_equal(found.as_slice::<T>(), &expected, &|| what("all_gather"));

        for root in [0, ranks - 1] {
            let buffer = self.buffer(&input::<T>(rank, whole))?;
            let found = self.comm.broadcast(buffer, root)?.wait()?;
            assert_equal(found.as_slice::<T>(), &input::<T>(root, whole), &|| what("broadcast"));

            let buffer = self.buffer(&input::<T>(rank, whole))?;
            let found = self.comm.reduce(buffer, op, root)?.wait()?;
            let expected = if rank == root { reduced(ranks, whole, op) } else { input::<T>(rank, whole) };
            assert_equal(found.as_slice::<T>(), &expected, &|| what("reduce"));
        }

        // Messages around the ring: even ranks send first, then nobody waits for nobody.
        if ranks > 1 {
            let (left, right) = ((rank + ranks - 1) % ranks, (rank + 1) % ranks);
            let (outgoing, incoming) =
                (self.buffer(&input::<T>(rank, len))?, self.buffer(&input::<T>(rank, len))?);
            let found = if rank % 2 == 0 {
                let _ = self.comm.send(outgoing, right)?.wait()?;
                self.comm.recv(incoming, left)?.wait()?
            } else {
                let found = self.comm.recv(incoming, left)?.wait()?;
                let _ = self.comm.send(outgoing, right)?.wait()?;
                found
            };
            assert_equal(found.as_slice::<T>(), &input::<T>(left, len), &|| what("send and recv"));
        }
        Ok(())
    }

    fn element<T: Sample>(&mut self) -> Result<()> {
        for len in LENGTHS {
            let large = len > LARGE;
            if large && !matches!(T::DTYPE, DType::F32 | DType::Bf16) {
                continue;
            }
            for op in ReduceOp::ALL {
                if large && op != ReduceOp::Avg {
                    continue;
                }
                self.all_reduce::<T>(len, op)?;
                self.others::<T>(if large { len / 8 } else { len }, op)?;
            }
        }
        Ok(())
    }
}

/// Runs every collective in `world`. Panics at the first wrong element.
///
/// # Errors
/// As the collectives.
pub fn all(mut world: World) -> Result<()> {
    let mut comm = world.communicator()?;
    for place in [Place::Arena, Place::Private] {
        let mut bench = Bench { comm: &mut *comm, place };
        bench.element::<f32>()?;
        bench.element::<f64>()?;
        bench.element::<f16>()?;
        bench.element::<bf16>()?;
        bench.element::<i32>()?;
        bench.element::<i64>()?;
        bench.element::<u8>()?;
    }
    comm.barrier()
}
