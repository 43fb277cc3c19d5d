//! Where the blocks of a convolution leave sums of slices, until the last of them adds these up.

use super::partition::{Slices, Tile};
use crate::DType;
use crate::cuda::counters::check_counters;
use crate::cuda::{Arg, View};

/// Memory for the sums of slices. Calls that run one after another may share it.
#[derive(Debug, Clone, Copy)]
pub struct Workspace<'a> {
    /// f32 at a multiple of 16 bytes, at least [`workspace_bytes`](super::cuda::workspace_bytes); its contents do not
    /// matter.
    pub sums: View<'a>,
    /// Those of a [`Counters`](crate::cuda::Counters).
    pub counters: View<'a>,
    /// Images of a whole batch. They decide how the depth of the forward pass and of the gradient of the input is cut into
    /// slices, not the images of a call: so an image has the same bits in smaller batches, such as the last one of a test
    /// set.
    pub batch: usize,
}

impl Workspace<'_> {
    /// The address of `wanted` sums.
    #[track_caller]
    fn of_len(&self, wanted: usize) -> u64 {
        assert_eq!(self.sums.dtype(), DType::F32, "element type of a convolution's workspace");
        let has = self.sums.len();
        assert!(has >= wanted, "a workspace of {has} elements, but {wanted} are needed");
        self.sums.address()
    }

    /// The address of a row of `len` sums for each of `rows` slices: of none, if there is only one.
    #[track_caller]
    pub(super) fn rows(&self, rows: usize, len: usize) -> u64 {
        self.of_len(if rows == 1 { 0 } else { rows * len })
    }
}

/// `struct WeightSums` and `struct FirstSums` of the kernels.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
pub(super) struct WeightSums {
    slices: u64,
    weights: u64,
    bias: u64,
    counters: u64,
}

impl WeightSums {
    /// For the kernels. Slices are written and read.
    pub(super) fn argument(&self, slices: usize, dw: View<'_>, filters: usize) -> Arg {
        let sums = dw.bytes() + filters * size_of::<f32>();
        Arg::of(self).moving(if slices == 1 { sums } else { (2 * slices + 1) * sums })
    }

    /// For `slices` slices of the gradients, each computed by `tiles` blocks.
    #[track_caller]
    pub(super) fn new(
        workspace: &Workspace<'_>,
        slices: usize,
        tiles: usize,
        dw: View<'_>,
        db: Option<View<'_>>,
        filters: usize,
    ) -> Self {
        check_counters(workspace.counters, tiles, slices);
        WeightSums {
            slices: workspace.rows(slices, dw.len() + filters),
            weights: dw.address(),
            bias: db.map_or(0, |db| db.address()),
            counters: workspace.counters.address(),
        }
    }
}

/// `struct DepthSums` of the kernels.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
pub(super) struct DepthSums {
    slices: u64,
    counters: u64,
}

impl DepthSums {
    /// For a result of `rows` by `columns`, of which `tile` is a part. Slices are written and read.
    #[track_caller]
    pub(super) fn argument(
        workspace: &Workspace<'_>,
        slices: &Slices,
        tile: Tile,
        rows: usize,
        columns: usize,
    ) -> Arg {
        check_counters(workspace.counters, tile.count(rows, columns), slices.count);
        let address = workspace.of_len(slices.tile_sums(rows, columns));
        assert!(address.is_multiple_of(16), "a workspace at {address:#x}, which is no multiple of 16");
        let moved = if slices.count == 1 { 0 } else { 2 * slices.count * rows * columns * size_of::<f32>() };
        Arg::of(&DepthSums { slices: address, counters: workspace.counters.address() }).moving(moved)
    }
}
