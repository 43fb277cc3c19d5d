//! Counters of blocks that have finished their part of a sum.
//!
//! Kernels that cut a long sum into slices add up the slices themselves: a block that finishes counts, and the last one
//! of a group adds up the group (`add_slices` of `device.cuh`). So a sum is one launch, and its order is fixed. Counters
//! are zero between kernels; kernels that may run at the same time need counters of their own.

use std::sync::Arc;

use super::elements::check;
use super::{Device, Memory, Result, View};
use crate::DType;

/// Number of counters that any kernel needs at most.
const COUNTERS: usize = 2048;

/// Slices of a group, `SLICES_OF_GROUP` of the kernels.
const SLICES_OF_GROUP: usize = 16;

/// Counters for kernels that run one after another.
#[derive(Debug)]
pub struct Counters(Memory);

impl Counters {
    /// Allocates counters.
    ///
    /// # Errors
    /// If memory is short.
    pub fn new(device: &Arc<Device>) -> Result<Self> {
        Ok(Counters(Memory::zeroed(device, DType::I32, COUNTERS)?))
    }

    /// For the arguments of operations.
    pub fn view(&self) -> View<'_> {
        self.0.view()
    }
}

/// `struct ColumnSums` of the kernels: addresses.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
pub(crate) struct ColumnSums {
    pub(crate) slices: u64,
    pub(crate) total: u64,
    pub(crate) counters: u64,
}

impl ColumnSums {
    /// The sums are not wanted.
    pub(crate) const NONE: Self = ColumnSums { slices: 0, total: 0, counters: 0 };
}

/// # Panics
/// Unless `counters` are those of a [`Counters`], and enough for `rows` rows of a grid with `slices` slices each.
#[track_caller]
pub(crate) fn check_counters(counters: View<'_>, rows: usize, slices: usize) {
    check("counters", counters, DType::I32, COUNTERS);
    let wanted = rows * (slices.div_ceil(SLICES_OF_GROUP) + 1);
    assert!(
        slices == 1 || wanted <= COUNTERS,
        "{COUNTERS} counters for {rows} rows of {slices} slices, which need {wanted}"
    );
}
