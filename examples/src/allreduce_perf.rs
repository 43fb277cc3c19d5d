//! `mgpurun -n 2 allreduce_perf --check`: how long an all-reduce takes, by size.
//!
//! One JSON object a line, with the keys of the usual MPI and gloo measurements, so that lines of several programs
//! can be put side by side. An operation's time is that of its slowest rank. Bus bandwidth is the figure of
//! NVIDIA's nccl-tests: `bytes / time · 2 (n − 1) / n`, which does not depend on the number of ranks for an
//! algorithm that is limited by its links.

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use half::{bf16, f16};
use mgpu::{Algorithm, Buffer, Communicator, DType, Element, ReduceOp, World};
use serde::Serialize;

/// Measures all-reduce by size, in place, one JSON object a line.
#[derive(Debug, Parser)]
#[command(name = "allreduce_perf", version)]
struct Args {
    /// Smallest size in bytes.
    #[arg(long, default_value_t = 4, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(1..1 << 46))]
    min: u64,
    /// Largest size in bytes.
    #[arg(long, default_value_t = 256 << 20, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(1..1 << 46))]
    max: u64,
    /// Each size is this many times the one before.
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    factor: u32,
    /// Element type: f32, f64, f16, bf16, i32, i64 or u8.
    #[arg(long, default_value = "f32")]
    dtype: DType,
    /// Reduction: sum, avg, min, max or prod.
    #[arg(long, default_value = "sum")]
    op: ReduceOp,
    /// Algorithm: auto, eager (up to 8 KiB), direct or ring.
    #[arg(long, default_value = "auto")]
    algo: Algorithm,
    /// Compare every element of one operation of each size with the expected result.
    #[arg(long)]
    check: bool,
}

/// One line of output.
#[derive(Debug, Serialize)]
struct Line {
    #[serde(rename = "impl")]
    implementation: &'static str,
    ranks: u32,
    bytes: usize,
    us_p50: f64,
    us_min: f64,
    busbw_gbps: f64,
    algo: &'static str,
    dtype: &'static str,
    op: &'static str,
    checked: bool,
}

/// The program.
pub fn main() -> ExitCode {
    crate::exit::report("allreduce_perf", run(&Args::parse()))
}

fn run(args: &Args) -> Result<(), Box<dyn std::error::Error>> {
    let mut world = World::from_env()?;
    let mut comm = world.communicator()?;
    comm.set_algorithm(args.algo);
    let mut bytes = (args.min as usize).next_multiple_of(args.dtype.size());
    let max = args.max as usize;
    let most = if args.algo == Algorithm::Eager { max.min(8 << 10) } else { max };
    while bytes <= most {
        let line = match args.dtype {
            DType::F32 => measure::<f32>(&mut *comm, args, bytes),
            DType::F64 => measure::<f64>(&mut *comm, args, bytes),
            DType::F16 => measure::<f16>(&mut *comm, args, bytes),
            DType::Bf16 => measure::<bf16>(&mut *comm, args, bytes),
            DType::I32 => measure::<i32>(&mut *comm, args, bytes),
            DType::I64 => measure::<i64>(&mut *comm, args, bytes),
            DType::U8 => measure::<u8>(&mut *comm, args, bytes),
        }?;
        if comm.rank() == 0 {
            println!("{}", serde_json::to_string(&line)?);
        }
        bytes = bytes.saturating_mul(args.factor as usize);
    }
    Ok(())
}

/// Times all-reduces of `bytes` bytes.
fn measure<T: Pattern>(
    comm: &mut dyn Communicator,
    args: &Args,
    bytes: usize,
) -> Result<Line, Box<dyn std::error::Error>> {
    let len = bytes / T::DTYPE.size();
    let mut buffer = comm.allocate(T::DTYPE, len)?;
    if args.check {
        buffer = check::<T>(comm, args.op, buffer)?;
    }
    let iterations = match bytes {
        0..=65_536 => 2000,
        65_537..=4_194_304 => 200,
        _ => 20,
    };
    let warm_up = iterations / 10 + 2;
    let mut micros = Vec::with_capacity(iterations);
    for iteration in 0..warm_up + iterations {
        // Sums grow: begin again before they overflow.
        if iteration % 16 == 0 {
            buffer.as_mut_slice::<T>().fill(T::pattern(1, 0));
        }
        comm.barrier()?;
        let start = Instant::now();
        buffer = comm.all_reduce(buffer, args.op)?.wait()?;
        let mut slowest = [start.elapsed().as_secs_f64() * 1e6];
        comm.all_reduce_slice(&mut slowest, ReduceOp::Max)?;
        if iteration >= warm_up {
            micros.push(slowest[0]);
        }
    }
    micros.sort_by(f64::total_cmp);
    let p50 = micros[micros.len() / 2];
    let ranks = f64::from(comm.size());
    let round = |value: f64, unit: f64| (value * unit).round() / unit;
    Ok(Line {
        implementation: "mgpu",
        ranks: comm.size(),
        bytes,
        us_p50: round(p50, 100.0),
        us_min: round(micros[0], 100.0),
        busbw_gbps: round(bytes as f64 / p50 / 1e3 * 2.0 * (ranks - 1.0) / ranks, 1000.0),
        algo: args.algo.name(),
        dtype: T::DTYPE.name(),
        op: args.op.name(),
        checked: args.check,
    })
}

/// All-reduces a pattern whose result is known exactly and compares every element.
fn check<T: Pattern>(
    comm: &mut dyn Communicator,
    op: ReduceOp,
    mut buffer: Buffer,
) -> Result<Buffer, Box<dyn std::error::Error>> {
    let (rank, ranks) = (comm.rank(), comm.size());
    for (index, value) in buffer.as_mut_slice::<T>().iter_mut().enumerate() {
        *value = T::pattern(rank, index);
    }
    let buffer = comm.all_reduce(buffer, op)?.wait()?;
    // The pattern repeats: a few results cover all elements.
    let expected: Vec<T> = (0..PERIOD).map(|index| T::expected(ranks, index, op)).collect();
    let wrong =
        buffer.as_slice::<T>().iter().enumerate().find(|(index, value)| **value != expected[index % PERIOD]);
    match wrong {
        None => Ok(buffer),
        Some((index, value)) => Err(format!(
            "rank {rank}: element {index} of {} is {value:?} where {:?} is right",
            buffer.len(),
            expected[index % PERIOD]
        )
        .into()),
    }
}

/// Elements after which the pattern repeats.
const PERIOD: usize = 13;

/// Element types with inputs whose reduction is exact up to 8 ranks of products and 100 of sums.
trait Pattern: Element {
    /// What rank `rank` holds at `index`: 1 or 2, so that even products of 16-bit floats are exact.
    fn pattern(rank: u32, index: usize) -> Self;
    /// The reduction over `ranks` ranks.
    fn expected(ranks: u32, index: usize, op: ReduceOp) -> Self;
}

fn small_number(rank: u32, index: usize) -> u32 {
    1 + (index % PERIOD + rank as usize) as u32 % 2
}

macro_rules! pattern {
    ($($type:ty: $from:expr, $average:expr;)*) => {$(
        impl Pattern for $type {
            fn pattern(rank: u32, index: usize) -> Self {
                $from(small_number(rank, index))
            }
            fn expected(ranks: u32, index: usize, op: ReduceOp) -> Self {
                let values = (0..ranks).map(|rank| small_number(rank, index));
                match op {
                    ReduceOp::Sum => $from(values.sum()),
                    ReduceOp::Prod => $from(values.product()),
                    ReduceOp::Min => $from(values.min().unwrap_or_default()),
                    ReduceOp::Max => $from(values.max().unwrap_or_default()),
                    ReduceOp::Avg => $average(values.sum(), ranks),
                }
            }
        }
    )*};
}
pattern! {
    f32: |x: u32| x as f32, |sum: u32, ranks: u32| sum as f32 / ranks as f32;
    f64: |x: u32| f64::from(x), |sum: u32, ranks: u32| f64::from(sum) / f64::from(ranks);
    f16: |x: u32| f16::from_f32(x as f32), |sum: u32, ranks: u32| f16::from_f32(sum as f32 / ranks as f32);
    bf16: |x: u32| bf16::from_f32(x as f32), |sum: u32, ranks: u32| bf16::from_f32(sum as f32 / ranks as f32);
    i32: |x: u32| x as i32, |sum: u32, ranks: u32| (sum / ranks) as i32;
    i64: |x: u32| i64::from(x), |sum: u32, ranks: u32| i64::from(sum / ranks);
    u8: |x: u32| x as u8, |sum: u32, ranks: u32| (sum / ranks) as u8;
}
