//! Flattening moves no data: a flattened image is still one in memory, and the layer behind it is what notices.

use super::{Definition, Operation, LayerContext};
use crate::nets::tensors::Tensors;

/// Turns the channels of an image into one vector.
pub(super) struct Flatten;

impl Definition for Flatten {
    fn output(&self, extents: [usize; 3]) -> [usize; 3] {
        [extents.iter().product(), 1, 1]
    }

    fn plan(&self, _: &mut Tensors, _: &LayerContext) -> Option<Box<dyn Operation>> {
        None
    }
}
