//! Checkpoints of named arenas.

use std::ffi::{CStr, CString, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Mutex;

use mgpu::checkpoint::{self, Checkpoint, Snapshot, Writer};

use crate::call::{Result, borrow, call, free, lock, put, put_handle, slice, slice_mut, text};
use crate::layout::LayoutHandle;
use crate::status::{Failure, Status};

/// What a checkpoint will contain.
pub struct SnapshotHandle(Mutex<Snapshot>);

/// Writes checkpoints into a folder, on a thread.
pub struct WriterHandle(Mutex<Writer>);

/// A checkpoint on the disk.
pub struct CheckpointHandle {
    checkpoint: Checkpoint,
    state: CString,
    path: CString,
}

/// # Safety
/// The header's rules.
unsafe fn folder_of<'a>(folder: *const c_char) -> Result<&'a Path> {
    if folder.is_null() {
        return Err(Failure::argument("`folder` is null"));
    }
    // SAFETY: the caller's promise.
    Ok(Path::new(OsStr::from_bytes(unsafe { CStr::from_ptr(folder) }.to_bytes())))
}

/// Creates an empty snapshot after `step` training steps.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_snapshot_create(step: u64, snapshot: *mut *mut SnapshotHandle) -> Status {
    // SAFETY: the header's rules.
    call(|| unsafe { put_handle(snapshot, "snapshot", SnapshotHandle(Mutex::new(Snapshot::new(step)))) })
}

/// Frees a snapshot that is not written. Null is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_snapshot_free(snapshot: *mut SnapshotHandle) {
    // SAFETY: the header's rules.
    unsafe { free(snapshot) };
}

/// Adds a copy of `values`, which becomes the file `name`.safetensors with the tensors of `layout`. `count` is the number
/// of elements of the layout.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_snapshot_add(
    snapshot: *mut SnapshotHandle,
    name: *const c_char,
    layout: *const LayoutHandle,
    values: *const f32,
    count: usize,
) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        let (snapshot, name, layout) =
            unsafe { (borrow(snapshot, "snapshot")?, text(name, "name")?, borrow(layout, "layout")?.get()?) };
        layout.check_count(count, "values")?;
        // SAFETY: the header's rules.
        let values = unsafe { slice(values, count, "values")? };
        lock(&snapshot.0)?.add(name, &layout, values);
        Ok(())
    })
}

/// Adds other state of the program, a text in JSON.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_snapshot_set_state(
    snapshot: *mut SnapshotHandle,
    json: *const c_char,
) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        let (snapshot, json) = unsafe { (borrow(snapshot, "snapshot")?, text(json, "json")?) };
        let state = serde_json::from_str(json)
            .map_err(|error| Failure::argument(format!("the state is not JSON: {error}")))?;
        let mut snapshot = lock(&snapshot.0)?;
        *snapshot = std::mem::replace(&mut *snapshot, Snapshot::new(0)).with_state(state);
        Ok(())
    })
}

/// Prepares to write checkpoints into `folder`, which is created if it does not exist, and to keep the newest `keep`. Only
/// one rank has a writer, usually rank 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_writer_create(
    folder: *const c_char,
    keep: usize,
    writer: *mut *mut WriterHandle,
) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        unsafe { put(writer, "writer", std::ptr::null_mut())? };
        // SAFETY: the header's rules.
        let folder = unsafe { folder_of(folder)? };
        let created = Writer::new(folder, keep)?;
        // SAFETY: the header's rules.
        unsafe { put_handle(writer, "writer", WriterHandle(Mutex::new(created))) }
    })
}

/// Waits for the write in flight, and frees the writer. Null is ignored. The error of that write is lost: call
/// `mgpu_writer_finish` first.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_writer_free(writer: *mut WriterHandle) {
    // SAFETY: the header's rules.
    unsafe { free(writer) };
}

/// Starts writing a snapshot, which it frees, also after an error. The error is that of the write before: this one is
/// written nevertheless.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_writer_save(
    writer: *mut WriterHandle,
    snapshot: *mut SnapshotHandle,
) -> Status {
    call(|| {
        if snapshot.is_null() {
            return Err(Failure::argument("`snapshot` is null"));
        }
        // SAFETY: the header's rules.
        let snapshot = unsafe { Box::from_raw(snapshot) };
        let snapshot = snapshot.0.into_inner().map_err(|_| crate::call::unusable())?;
        // SAFETY: the header's rules.
        lock(&unsafe { borrow(writer, "writer")? }.0)?.save(snapshot)?;
        Ok(())
    })
}

/// Waits until the last snapshot is on the disk.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_writer_finish(writer: *mut WriterHandle) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        lock(&unsafe { borrow(writer, "writer")? }.0)?.finish()?;
        Ok(())
    })
}

/// Opens the newest checkpoint in `folder` that is not damaged; null if there is none. All ranks may read it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_checkpoint_find(
    folder: *const c_char,
    checkpoint: *mut *mut CheckpointHandle,
) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        unsafe { put(checkpoint, "checkpoint", std::ptr::null_mut())? };
        // SAFETY: the header's rules.
        let folder = unsafe { folder_of(folder)? };
        let Some(found) = checkpoint::find(folder)? else { return Ok(()) };
        let state = found.checkpoint.manifest().state.to_string();
        let path = found.checkpoint.path().as_os_str().as_bytes().to_owned();
        let handle = CheckpointHandle {
            checkpoint: found.checkpoint,
            state: CString::new(state).unwrap_or_default(),
            path: CString::new(path).unwrap_or_default(),
        };
        // SAFETY: the header's rules.
        unsafe { put_handle(checkpoint, "checkpoint", handle) }
    })
}

/// Closes a checkpoint. Null is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_checkpoint_free(checkpoint: *mut CheckpointHandle) {
    // SAFETY: the header's rules.
    unsafe { free(checkpoint) };
}

/// The number of training steps after which it was saved.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_checkpoint_step(checkpoint: *const CheckpointHandle, step: *mut u64) -> Status {
    // SAFETY: the header's rules.
    call(|| unsafe { put(step, "step", borrow(checkpoint, "checkpoint")?.checkpoint.manifest().step) })
}

/// The state of `mgpu_snapshot_set_state` in JSON, or "null". Valid until the checkpoint is freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_checkpoint_state(
    checkpoint: *const CheckpointHandle,
    json: *mut *const c_char,
) -> Status {
    // SAFETY: the header's rules.
    call(|| unsafe { put(json, "json", borrow(checkpoint, "checkpoint")?.state.as_ptr()) })
}

/// Its folder. Valid until the checkpoint is freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_checkpoint_path(
    checkpoint: *const CheckpointHandle,
    path: *mut *const c_char,
) -> Status {
    // SAFETY: the header's rules.
    call(|| unsafe { put(path, "path", borrow(checkpoint, "checkpoint")?.path.as_ptr()) })
}

/// Reads what was added as `name` into `values`, which has `count` elements. The file must have exactly the tensors of
/// `layout`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_checkpoint_load(
    checkpoint: *const CheckpointHandle,
    name: *const c_char,
    layout: *const LayoutHandle,
    values: *mut f32,
    count: usize,
) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        let (checkpoint, name, layout) = unsafe {
            (borrow(checkpoint, "checkpoint")?, text(name, "name")?, borrow(layout, "layout")?.get()?)
        };
        layout.check_count(count, "values")?;
        // SAFETY: the header's rules.
        let values = unsafe { slice_mut(values, count, "values")? };
        values.copy_from_slice(&checkpoint.checkpoint.load(name, &layout)?);
        Ok(())
    })
}
