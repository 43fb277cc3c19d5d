//! Memory of GPU 0 that is allocated and freed while other work goes on: `t-gpu-memory capture|pinned`. Panics at a
//! wrong result.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;

use mgpu_kernels::DType;
use mgpu_kernels::cuda::{Device, Memory, Pinned, Result, Stream};

const LEN: usize = 1000;

fn main() -> Result<()> {
    let device = Device::open(0)?;
    match std::env::args().nth(1).as_deref() {
        Some("capture") => capture(&device),
        Some("pinned") => pinned(&device),
        other => panic!("unknown body {other:?}"),
    }
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
