//! The tensors of a model.

use std::ffi::c_char;
use std::ops::Deref;
use std::sync::{Mutex, MutexGuard};

use mgpu::Layout;

use crate::call::{Result, borrow, call, free, lock, put, put_handle, slice, text};
use crate::status::{Failure, Status};

/// Names and shapes of the tensors of a model, one after the other in one array of floats.
pub struct LayoutHandle(Mutex<Layout>);

/// A layout that cannot change meanwhile.
pub(crate) struct LockedLayout<'a>(MutexGuard<'a, Layout>);

impl LayoutHandle {
    pub(crate) fn get(&self) -> Result<LockedLayout<'_>> {
        Ok(LockedLayout(lock(&self.0)?))
    }
}

impl LockedLayout<'_> {
    /// Checks that an array of `count` elements has the layout's length.
    pub(crate) fn check_count(&self, count: usize, name: &str) -> Result<()> {
        let len = self.0.len();
        match count == len {
            true => Ok(()),
            false => {
                Err(Failure::argument(format!("`{name}` has {count} elements, and the layout has {len}")))
            }
        }
    }

    /// Checks that there is such a tensor.
    pub(crate) fn check_tensor(&self, tensor: usize) -> Result<()> {
        let tensors = self.0.tensors().len();
        match tensor < tensors {
            true => Ok(()),
            false => Err(Failure::argument(format!("no tensor {tensor}: the layout has {tensors}"))),
        }
    }
}

impl Deref for LockedLayout<'_> {
    type Target = Layout;

    fn deref(&self) -> &Layout {
        &self.0
    }
}

/// Creates a layout without tensors.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_layout_create(layout: *mut *mut LayoutHandle) -> Status {
    // SAFETY: the header's rules.
    call(|| unsafe { put_handle(layout, "layout", LayoutHandle(Mutex::default())) })
}

/// Frees a layout. Null is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_layout_free(layout: *mut LayoutHandle) {
    // SAFETY: the header's rules.
    unsafe { free(layout) };
}

/// Appends a tensor, whose number is `*tensor` (which may be null): 0 for the first. `shape` has `dimensions` extents,
/// slowest first; a scalar has none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_layout_push(
    layout: *mut LayoutHandle,
    name: *const c_char,
    shape: *const usize,
    dimensions: usize,
    tensor: *mut usize,
) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        let (layout, name, shape) =
            unsafe { (borrow(layout, "layout")?, text(name, "name")?, slice(shape, dimensions, "shape")?) };
        let number = lock(&layout.0)?.try_push(name, shape)?;
        match tensor.is_null() {
            true => Ok(()),
            // SAFETY: the header's rules.
            false => unsafe { put(tensor, "tensor", number) },
        }
    })
}

/// Number of elements of all tensors.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_layout_count(layout: *const LayoutHandle, count: *mut usize) -> Status {
    // SAFETY: the header's rules.
    call(|| unsafe { put(count, "count", borrow(layout, "layout")?.get()?.len()) })
}

/// Where tensor `tensor` begins and ends in the array, in elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_layout_range(
    layout: *const LayoutHandle,
    tensor: usize,
    begin: *mut usize,
    end: *mut usize,
) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        let layout = unsafe { borrow(layout, "layout")? }.get()?;
        layout.check_tensor(tensor)?;
        let range = layout.range(tensor);
        // SAFETY: the header's rules.
        unsafe {
            put(begin, "begin", range.start)?;
            put(end, "end", range.end)
        }
    })
}
