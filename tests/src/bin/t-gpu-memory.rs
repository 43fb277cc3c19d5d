//! Memory of GPU 0 that is allocated and freed while other work goes on: `t-gpu-memory capture|pinned`. Memory of every
//! rank that is registered with NCCL: `t-gpu-memory register`. Panics at a wrong result.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;

use mgpu::{ReduceOp, World};
use mgpu_kernels::DType;
use mgpu_kernels::cuda::{Device, Memory, Pinned, Result, Stream};
use mgpu_tests::device::{DeviceTest, input, reduced};

const LEN: usize = 1000;

fn main() -> Result<()> {
    let body = std::env::args().nth(1);
    if body.as_deref() == Some("register") {
        register().expect("all ranks succeed");
        return Ok(());
    }
    let device = Device::open(0)?;
    match body.as_deref() {
        Some("capture") => capture(&device),
        Some("pinned") => pinned(&device),
        other => panic!("unknown body {other:?}"),
    }
}

/// Memory of the program's own, registered with the communicator and not.
fn register() -> mgpu::Result<()> {
    let mut world = World::from_env()?;
    let comm = world.device_communicator()?;
    let stream = Stream::new(comm.device())?;
    let test = DeviceTest { comm: &comm, stream: &stream };
    let (rank, ranks) = (comm.rank(), comm.size());
    let memory = Memory::zeroed(comm.device(), DType::F32, LEN)?;
    let reduce = |what: &str| {
        stream.upload(&input::<f32>(rank, LEN), memory.view())?;
        let (first, rest) = (memory.slice(0..100), memory.slice(100..LEN));
        comm.group(|group| {
            group.all_reduce(&stream, first, ReduceOp::Sum)?;
            group.all_reduce(&stream, rest, ReduceOp::Sum)
        })?;
        test.expect(memory.view(), &reduced::<f32>(ranks, LEN, ReduceOp::Sum), what)
    };
    // SAFETY: the memory outlives the registrations, and its work has ended before they do.
    let register = |view| unsafe { comm.register(view) };
    let registration = register(memory.view())?;
    println!("registered: {}", registration.access());
    reduce("a registered buffer")?;
    // NCCL counts registrations.
    let again = register(memory.view())?;
    drop(registration);
    reduce("a buffer with another registration")?;
    drop(again);
    reduce("a buffer that was registered")?;
    println!("empty: {}", register(memory.slice(7..7))?.access());
    // Of different sizes none is registered, and the memory can be used as before.
    println!("unequal: {}", register(memory.slice(0..10 + rank as usize))?.access());
    reduce("a buffer that could not be registered")
}

/// Another thread captures a stream while this one allocates, copies and frees.
fn capture(device: &Arc<Device>) -> Result<()> {
    let ((begun, has_begun), (end, may_end)) = (channel::<()>(), channel::<()>());
    thread::scope(|scope| {
        let captured = scope.spawn(move || -> Result<Vec<f32>> {
            let stream = Stream::new(device)?;
            let values = Memory::from_slice(&stream, &[1.0f32; LEN])?;
            stream.begin_capture()?;
            begun.send(()).expect("the main thread waits for it");
            let zeroed = stream.zero(values.slice(0..LEN / 2));
            // Returns when the main thread has dropped its end.
            let _ = may_end.recv();
            let graph = stream.end_capture()?;
            zeroed?;
            // SAFETY: no communicator is used, and the download below waits for the graph.
            unsafe { stream.launch_graph(&graph) }?;
            values.to_vec(&stream)
        });
        // An error of the capturing thread ends the wait as well.
        let _ = has_begun.recv();
        let concurrent = use_memory(device);
        drop(end);
        let values = captured.join().expect("no panic")?;
        assert_eq!(concurrent?, [5; LEN]);
        assert_eq!(values, [[0.0; LEN / 2], [1.0; LEN / 2]].concat());
        Ok(())
    })
}

/// Allocates, fills, copies through pinned memory, and frees all of it.
fn use_memory(device: &Arc<Device>) -> Result<Vec<u8>> {
    let stream = Stream::new(device)?;
    let from = Memory::from_slice(&stream, &[5u8; LEN])?;
    let to = Memory::zeroed(device, DType::U8, LEN)?;
    assert_eq!(to.to_vec::<u8>(&stream)?, [0; LEN]);
    let mut pinned = Pinned::zeroed(device, LEN)?;
    stream.enqueue_download(from.view(), &mut pinned)?;
    stream.enqueue_upload_part(&pinned, 0, to.view())?;
    drop(pinned);
    to.to_vec(&stream)
}

/// Pinned memory is dropped right after copies were enqueued, directly and as a part of a graph.
fn pinned(device: &Arc<Device>) -> Result<()> {
    let (stream, other) = (Stream::new(device)?, Stream::new(device)?);
    let from = Memory::from_slice(&stream, &[7u8; LEN])?;
    let to = Memory::zeroed(device, DType::U8, 2 * LEN)?;
    let (first, second) = (to.slice(0..LEN), to.slice(LEN..2 * LEN));
    let mut pinned = Pinned::zeroed(device, LEN)?;
    stream.enqueue_download(from.view(), &mut pinned)?;
    stream.synchronize()?;
    // On two streams: the one that finishes later counts.
    stream.enqueue_upload_part(&pinned, 0, first)?;
    other.enqueue_upload_part(&pinned, 0, second)?;
    drop(pinned);
    other.synchronize()?;
    assert_eq!(to.to_vec::<u8>(&stream)?, [7; 2 * LEN]);

    stream.zero(to.view())?;
    let mut pinned = Pinned::zeroed(device, LEN)?;
    stream.begin_capture()?;
    stream.enqueue_download(from.view(), &mut pinned)?;
    stream.enqueue_upload_part(&pinned, 0, second)?;
    let graph = stream.end_capture()?;
    drop(pinned);
    // SAFETY: no communicator is used.
    unsafe { stream.launch_graph(&graph) }?;
    drop(graph);
    assert_eq!(to.to_vec::<u8>(&stream)?, [[0; LEN], [7; LEN]].concat());
    Ok(())
}
