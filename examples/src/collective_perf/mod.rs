//! `mgpurun -n 2 collective_perf --check`: benchmarks a collective by size. `allreduce_perf` is another name for it.
//!
//! Prints one JSON object per line, with the keys of common MPI and gloo benchmarks, so that results of several
//! programs can be compared; `--vs FILE` does that directly. The time of an operation is that of its slowest rank.
//! Bus bandwidth is defined as in NVIDIA's nccl-tests: `bytes / time` times the share of the bytes that must cross a
//! link. For an algorithm limited by its links it does not depend on the number of ranks.
//!
//! | file | content |
//! |---|---|
//! | `args` | command line |
//! | `collective` | the collectives and their results |
//! | `pattern` | verification of every element |
//! | `measure` | timing |
//! | `device` | timing on GPUs |
//! | `bound` | lower bound from memory bandwidth |
//! | `table` | comparison with other programs |

mod args;
mod bound;
mod collective;
mod device;
mod measure;
mod pattern;
mod table;

use std::path::PathBuf;
use std::process::ExitCode;

use args::{Args, Buffers};
use collective::Collective;
use half::{bf16, f16};
use measure::{RunLimits, Times, sample};
use mgpu::{Algorithm, Buffer, Communicator, DType, Error, World};
use pattern::Value;
use serde::Serialize;
use table::Peers;

use crate::print::{errln, outln, print_error};

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
    /// `none` for collectives without a reduction.
    op: &'static str,
    checked: bool,
    collective: Collective,
    /// `solo`, `cpu` or `nccl`.
    backend: &'static str,
    /// Name of the GPU, for buffers in its memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<String>,
    buffers: Buffers,
    /// Time of an all-reduce's memory traffic alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    bound_us: Option<f64>,
    /// The memory bandwidth of that measurement.
    #[serde(skip_serializing_if = "Option::is_none")]
    scale_gbps: Option<f64>,
}

/// Errors of a measurement.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Runtime(#[from] Error),
    #[error("rank {rank}: {collective} of {len} elements: element {index} is {found}, expected {expected}")]
    WrongResult {
        rank: u32,
        collective: Collective,
        len: usize,
        index: usize,
        found: String,
        expected: String,
    },
    #[error("{}: {problem}", path.display())]
    PeerFile { path: PathBuf, problem: String },
    #[error("{}:{line}: {problem}", path.display())]
    PeerLine { path: PathBuf, line: usize, problem: String },
    #[error(transparent)]
    Json(#[from] serde_json::Error),
}

/// The program.
pub fn main() -> ExitCode {
    crate::exit::report("collective_perf", run(&Args::parse_consistent()))
}

fn run(args: &Args) -> Result<(), Failure> {
    // Before joining the world: an unreadable file should not cost a measurement.
    let peers = args.vs.as_deref().map(Peers::read).transpose()?;
    let mut world = World::from_env()?;
    crate::print::print_notices("collective_perf", &world);
    let mut comm = world.communicator()?;
    let location = BufferLocation::choose(args, &mut world)?;
    comm.set_algorithm(args.algo);
    let unit = args.dtype.size() * if args.collective.is_sharded() { comm.size() as usize } else { 1 };
    let mut lines = Vec::new();
    for bytes in args.sizes(unit) {
        match measure_size(&mut comm, &location, args, bytes) {
            Ok(line) => lines.push(line),
            // The chosen algorithm supports no larger sizes. All ranks get this error, and nothing has been sent.
            Err(Failure::Runtime(refusal @ Error::InvalidArgument { .. })) if !lines.is_empty() => {
                if comm.rank() == 0 {
                    errln!("collective_perf: stopped before {bytes} bytes: {refusal}");
                }
                break;
            }
            Err(failure) => return Err(failure),
        }
        if comm.rank() == 0 {
            outln!("{}", serde_json::to_string(&lines[lines.len() - 1])?);
        }
    }
    if let Some(peers) = peers.filter(|_| comm.rank() == 0) {
        print_error(format_args!("{}", peers.table(args.collective, comm.size(), &lines)));
    }
    Ok(())
}

/// Where buffers are, and what accesses them there.
enum BufferLocation {
    Host(Buffers),
    Device(Box<device::Gpu>),
}

impl BufferLocation {
    fn choose(args: &Args, world: &mut World) -> Result<Self, Failure> {
        let nccl = world.backend() == mgpu::Backend::Nccl;
        let on_device = args.collective.works_in_place_on_devices();
        let first = match nccl {
            true if on_device => Buffers::Device,
            true => Buffers::Private,
            false => Buffers::Arena,
        };
        let refused = |problem: String| {
            Err(Failure::Runtime(Error::InvalidArgument { operation: "collective_perf", problem }))
        };
        match args.buffers.unwrap_or(first) {
            Buffers::Arena if nccl => refused("the nccl backend has no --buffers arena".into()),
            Buffers::Device if !nccl => refused("--buffers device needs the nccl backend".into()),
            Buffers::Device if !on_device => {
                refused(format!("--buffers device has no {} in place; use private", args.collective))
            }
            _ if nccl && args.algo != Algorithm::Auto => refused(format!(
                "--algo {} works only with the cpu backend: NCCL chooses its own algorithm (see NCCL_ALGO)",
                args.algo
            )),
            Buffers::Device => Ok(BufferLocation::Device(Box::new(device::Gpu::new(world)?))),
            buffers => Ok(BufferLocation::Host(buffers)),
        }
    }

    fn buffers(&self) -> Buffers {
        match self {
            BufferLocation::Host(buffers) => *buffers,
            BufferLocation::Device(_) => Buffers::Device,
        }
    }

    fn device(&self) -> Option<String> {
        match self {
            BufferLocation::Host(_) => None,
            BufferLocation::Device(gpu) => Some(gpu.name()),
        }
    }
}

fn measure_size(
    comm: &mut Communicator,
    location: &BufferLocation,
    args: &Args,
    bytes: usize,
) -> Result<Line, Failure> {
    match args.dtype {
        DType::F32 => measure_elements::<f32>(comm, location, args, bytes),
        DType::F64 => measure_elements::<f64>(comm, location, args, bytes),
        DType::F16 => measure_elements::<f16>(comm, location, args, bytes),
        DType::Bf16 => measure_elements::<bf16>(comm, location, args, bytes),
        DType::I32 => measure_elements::<i32>(comm, location, args, bytes),
        DType::I64 => measure_elements::<i64>(comm, location, args, bytes),
        DType::U8 => measure_elements::<u8>(comm, location, args, bytes),
    }
}

/// Private memory for `len` elements, which begins `offset` bytes after the beginning of a page if that is given.
fn private_buffer<T: Value>(len: usize, offset: Option<u16>) -> Buffer {
    const PAGE: usize = 4096;
    let Some(offset) = offset else { return Buffer::zeroed::<T>(len) };
    let elements = |bytes: usize| bytes / T::DTYPE.size();
    let pages = Buffer::zeroed::<T>(elements(PAGE + usize::from(offset)) + len);
    let to_page = pages.as_slice::<T>().as_ptr().cast::<u8>().align_offset(PAGE);
    let (_, from_offset) = pages.split_at(elements(to_page + usize::from(offset)));
    from_offset.split_at(len).0
}

/// Verifies and times a collective on `len` elements in host memory. The buffer is allocated once.
fn measure_on_host<T: Value>(
    comm: &mut Communicator,
    args: &Args,
    buffers: Buffers,
    len: usize,
) -> Result<Times, Failure> {
    let (collective, op) = (args.collective, args.op);
    let mut buffer = match buffers {
        Buffers::Arena => comm.allocate(T::DTYPE, len)?,
        _ => private_buffer::<T>(len, args.offset),
    };
    if args.check {
        buffer = pattern::check::<T>(comm, collective, op, buffer)?;
    }
    // Zeros stay zeros under every reduction. They are written explicitly, because untouched private memory is one
    // shared page of zeros.
    buffer.as_mut_slice::<T>().fill(T::from_number(0));
    let limits = RunLimits::for_size(len * T::DTYPE.size());
    Ok(sample(comm, buffer, limits, |comm, buffer| collective.run(comm, buffer, op))?.1)
}

/// Verifies and times one size, and measures its bound.
fn measure_elements<T: Value>(
    comm: &mut Communicator,
    location: &BufferLocation,
    args: &Args,
    bytes: usize,
) -> Result<Line, Failure> {
    let (collective, op) = (args.collective, args.op);
    let len = bytes / T::DTYPE.size();
    let times = match location {
        BufferLocation::Host(buffers) => measure_on_host::<T>(comm, args, *buffers, len)?,
        BufferLocation::Device(gpu) => gpu.measure::<T>(comm, collective, op, len, args.check)?,
    };
    let bound = if args.bound && collective == Collective::AllReduce {
        Some(bound::measure(comm, bytes)?)
    } else {
        None
    };
    let round = |value: f64, unit: f64| (value * unit).round() / unit;
    Ok(Line {
        implementation: "mgpu",
        ranks: comm.size(),
        bytes,
        us_p50: round(times.p50, 100.0),
        us_min: round(times.min, 100.0),
        busbw_gbps: round(bytes as f64 / times.p50 / 1e3 * collective.bus_factor(comm.size()), 1000.0),
        algo: args.algo.name(),
        dtype: T::DTYPE.name(),
        op: if collective.is_reduction() { op.name() } else { "none" },
        checked: args.check,
        collective,
        backend: comm.backend(),
        device: location.device(),
        buffers: location.buffers(),
        bound_us: bound.map(|bound| round(bound.micros, 10_000.0)),
        scale_gbps: bound.map(|bound| round(bound.gbps, 1000.0)),
    })
}
