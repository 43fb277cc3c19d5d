//! Flattening moves no data: the next layer handles the layout of the image.

use super::{Definition, LayerContext, Operation};
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
