//! The reducer: averages a model's gradients over ranks, for a program with its own optimizer.

use std::ffi::c_void;
use std::sync::Mutex;

use mgpu::{Compression, Error, GradientSink, Reducer, ReducerConfig, Reduction, Unused};

use crate::call::{Result, borrow, call, free, lock, put, put_handle};
use crate::layout::LayoutHandle;
use crate::status::{Failure, Status};
use crate::structs::{self, SizedStruct};
use crate::world::WorldHandle;

/// Averages gradients over ranks, in buckets.
pub struct ReducerHandle(Mutex<State>);

struct State {
    reducer: Reducer,
    /// Whether each tensor was marked ready in the current micro-batch.
    marked: Vec<bool>,
}

/// How gradients are averaged. Must be the same on all ranks. Fill it with `mgpu_reducer_config_init`, and then change
/// what should differ from the default.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ReducerOptions {
    /// `sizeof(mgpu_reducer_config)`.
    pub struct_size: usize,
    /// Bytes of gradients that are reduced in one operation; 0 for the default.
    pub bucket_bytes: u64,
    /// Largest norm of all averaged gradients together: longer ones are scaled down. 0: no limit.
    pub clip_norm: f64,
    /// Number of micro-batches in each step: how often the function of `mgpu_reduce_gradients` is called.
    pub micro_batches: u32,
    /// 1: reduce on a thread, while the function computes further gradients; useful if there is a free core.
    pub overlap: u32,
    /// 1: the sum over ranks and micro-batches instead of the mean.
    pub sum: u32,
    /// 1: gradients are sent as bfloat16, which halves the bytes.
    pub bf16: u32,
    /// 1 (the default): an error names the rank and the tensor whose gradients are NaN or infinite.
    pub check_finite: u32,
    /// 1: a tensor that was not marked ready counts as 0, instead of an error.
    pub unused_is_zero: u32,
}

// SAFETY: as required.
unsafe impl SizedStruct for ReducerOptions {
    const NAME: &'static str = "mgpu_reducer_config";
    const FIRST_SIZE: usize = 48;
}

const DEFAULT: ReducerOptions = ReducerOptions {
    struct_size: size_of::<ReducerOptions>(),
    bucket_bytes: 0,
    clip_norm: 0.0,
    micro_batches: 1,
    overlap: 0,
    sum: 0,
    bf16: 0,
    check_finite: 1,
    unused_is_zero: 0,
};

impl ReducerOptions {
    fn to_config(self) -> Result<ReducerConfig> {
        let flag = |value: u32, name: &str| match value {
            0 | 1 => Ok(value == 1),
            _ => Err(Failure::argument(format!("{name} is {value}: it must be 0 or 1"))),
        };
        let mut config = ReducerConfig::new()
            .with_overlap(flag(self.overlap, "overlap")?)
            .with_check_finite(flag(self.check_finite, "check_finite")?);
        config.micro_batches = self.micro_batches as usize;
        if self.bucket_bytes > 0 {
            config.bucket = Some(self.bucket_bytes as usize);
        }
        if self.clip_norm != 0.0 {
            config.clip_norm = Some(self.clip_norm);
        }
        if flag(self.sum, "sum")? {
            config.reduction = Reduction::Sum;
        }
        if flag(self.bf16, "bf16")? {
            config.compression = Compression::Bf16;
        }
        if flag(self.unused_is_zero, "unused_is_zero")? {
            config.unused = Unused::Zero;
        }
        Ok(config)
    }
}

/// Where the function of `mgpu_reduce_gradients` writes gradients. It exists during that call only, and is used by one
/// thread at a time.
pub struct SinkHandle<'a> {
    sink: &'a mut dyn GradientSink,
    /// Whether each tensor was marked ready.
    marked: &'a mut [bool],
    /// The error of the sink, which says more than the function's return value.
    error: Option<Error>,
}

/// Computes all gradients of a micro-batch: for each tensor it writes to the memory of `mgpu_sink_gradient`, and then calls
/// `mgpu_sink_ready`. Returns 0, or another number if it has failed. No C++ exception may leave it.
pub type Compute =
    Option<unsafe extern "C" fn(context: *mut c_void, sink: *mut SinkHandle<'_>, micro_batch: usize) -> i32>;

/// Sets all fields of a configuration to their defaults. `struct_size` is `sizeof(mgpu_reducer_config)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_reducer_config_init(config: *mut ReducerOptions, struct_size: usize) -> Status {
    call(|| {
        if !(ReducerOptions::FIRST_SIZE..=structs::LARGEST).contains(&struct_size) {
            let text = format!("struct_size is {struct_size}: pass sizeof(mgpu_reducer_config)");
            return Err(Failure::argument(text));
        }
        // SAFETY: the header's rules; the struct has this size, which is its first field.
        unsafe {
            put(config.cast::<usize>(), "config", struct_size)?;
            // What this version does not know.
            let unknown = struct_size.saturating_sub(size_of::<ReducerOptions>());
            config.cast::<u8>().wrapping_add(size_of::<ReducerOptions>()).write_bytes(0, unknown);
            structs::write(config, &DEFAULT)
        }
    })
}

/// Creates a reducer for the tensors of `layout`. `config` may be null: the defaults. It copies both. Collective, in the
/// same order as communicators are created.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_reducer_create(
    world: *mut WorldHandle,
    layout: *const LayoutHandle,
    config: *const ReducerOptions,
    reducer: *mut *mut ReducerHandle,
) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        unsafe { put(reducer, "reducer", std::ptr::null_mut())? };
        // SAFETY: the header's rules.
        let (world, layout) = unsafe { (borrow(world, "world")?, borrow(layout, "layout")?) };
        let layout = layout.get()?.clone();
        // SAFETY: the header's rules.
        let options = if config.is_null() { DEFAULT } else { unsafe { structs::read(config, DEFAULT)? } };
        let config = options.to_config()?;
        let comm = world.write()?.communicator()?;
        let marked = vec![false; layout.tensors().len()];
        let state = State { reducer: Reducer::new(comm, layout, config)?, marked };
        // SAFETY: the header's rules.
        unsafe { put_handle(reducer, "reducer", ReducerHandle(Mutex::new(state))) }
    })
}

/// Frees a reducer. Null is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_reducer_free(reducer: *mut ReducerHandle) {
    // SAFETY: the header's rules.
    unsafe { free(reducer) };
}

/// Averages gradients over ranks and micro-batches. Calls `compute` with `context` once for each micro-batch. Collective.
/// After `MGPU_ERROR_NOT_FINITE` another call may follow.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_reduce_gradients(
    reducer: *mut ReducerHandle,
    compute: Compute,
    context: *mut c_void,
) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        let mut state = lock(&unsafe { borrow(reducer, "reducer")? }.0)?;
        let State { reducer, marked } = &mut *state;
        let compute = compute.ok_or_else(|| Failure::argument("`compute` is null"))?;
        reducer.reduce_accumulated(&mut [], |micro_batch, _, sink| {
            marked.fill(false);
            let mut handle = SinkHandle { sink, marked, error: None };
            // SAFETY: a function of this type, with a sink that lives during the call.
            let code = unsafe { compute(context, &mut handle, micro_batch) };
            match (code, handle.error) {
                (0, None) => Ok(()),
                (_, Some(error)) => Err(error),
                (code, None) => {
                    Err(Error::program(format!("the function that computes gradients has returned {code}")))
                }
            }
        })?;
        Ok(())
    })
}

/// # Safety
/// The header's rules.
unsafe fn sink<'a, 'b>(sink: *mut SinkHandle<'b>, tensor: usize) -> Result<&'a mut SinkHandle<'b>> {
    // SAFETY: the caller's promise.
    let sink = unsafe { sink.as_mut() }.ok_or_else(|| Failure::argument("`sink` is null"))?;
    match tensor < sink.marked.len() {
        true => Ok(sink),
        false => Err(Failure::argument(format!("no tensor {tensor}: the layout has {}", sink.marked.len()))),
    }
}

/// The memory for the gradient of `tensor`, as the mean over this rank's micro-batch. It contains old values. Valid until
/// the tensor is marked ready; an error afterwards, because its bucket may be on its way.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_sink_gradient(
    handle: *mut SinkHandle<'_>,
    tensor: usize,
    gradient: *mut *mut f32,
) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        let sink = unsafe { sink(handle, tensor)? };
        if sink.marked[tensor] {
            let problem = format!("the gradient of tensor {tensor} cannot be written: it was marked ready");
            let error = Error::InvalidArgument { operation: "step", problem };
            sink.error.get_or_insert_with(|| error.clone());
            return Err(error.into());
        }
        let memory = sink.sink.gradient(tensor).as_mut_ptr();
        // SAFETY: the header's rules.
        unsafe { put(gradient, "gradient", memory) }
    })
}

/// Marks the gradient of `tensor` ready: its bucket may be reduced now. Once per tensor and micro-batch.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_sink_ready(handle: *mut SinkHandle<'_>, tensor: usize) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        let sink = unsafe { sink(handle, tensor)? };
        // Also after an error: the bucket is lost then.
        sink.marked[tensor] = true;
        sink.sink.ready(tensor).map_err(|error| {
            sink.error.get_or_insert_with(|| error.clone());
            error.into()
        })
    })
}

/// The averaged gradient of `tensor`: `count` elements, valid until the next reduction.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_reducer_gradient(
    reducer: *mut ReducerHandle,
    tensor: usize,
    gradient: *mut *const f32,
    count: *mut usize,
) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        let mut state = lock(&unsafe { borrow(reducer, "reducer")? }.0)?;
        let averaged = state.reducer.gradient(tensor)?;
        // SAFETY: the header's rules.
        unsafe {
            put(count, "count", averaged.len())?;
            put(gradient, "gradient", averaged.as_ptr())
        }
    })
}

/// The norm of the last averaged gradients before clipping; -1 without clipping, or before the first reduction.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_reducer_gradient_norm(reducer: *const ReducerHandle, norm: *mut f64) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        let found = lock(&unsafe { borrow(reducer, "reducer")? }.0)?.reducer.gradient_norm();
        // SAFETY: the header's rules.
        unsafe { put(norm, "norm", found.unwrap_or(-1.0)) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::MGPU_ERROR_ARGUMENT;

    #[test]
    fn the_default_is_that_of_the_library() {
        assert_eq!(DEFAULT.to_config().unwrap(), ReducerConfig::new());
        let other = ReducerOptions { clip_norm: 2.0, sum: 1, bf16: 1, micro_batches: 3, ..DEFAULT };
        let config = other.to_config().unwrap();
        assert_eq!((config.clip_norm, config.micro_batches), (Some(2.0), 3));
        assert_eq!((config.reduction, config.compression), (Reduction::Sum, Compression::Bf16));
        assert!(ReducerOptions { overlap: 2, ..DEFAULT }.to_config().is_err());
    }

    #[test]
    fn a_handle_is_null_after_an_error_of_an_earlier_argument() {
        let (none, mut reducer) = (std::ptr::null_mut(), std::ptr::dangling_mut::<ReducerHandle>());
        // SAFETY: null pointers are refused, and the handle is not used.
        let status = unsafe { mgpu_reducer_create(none, std::ptr::null(), std::ptr::null(), &mut reducer) };
        assert_eq!(status, MGPU_ERROR_ARGUMENT);
        assert!(reducer.is_null());
    }
}
