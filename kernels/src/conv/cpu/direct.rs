//! Convolution by its definition.

use super::{Backward, Scratch, Tail};
use crate::conv::Shape;
use crate::threads::Threads;

/// A convolution computed directly.
#[derive(Debug)]
pub(super) struct Direct {
    shape: Shape,
    tail: Tail,
}

impl Direct {
    pub(super) fn new(shape: Shape, tail: Tail) -> Self {
        Direct { shape, tail }
    }

    #[expect(clippy::too_many_arguments, reason = "each is a part of the contract")]
    pub(super) fn forward(
        &mut self,
        threads: &Threads,
        scratch: &mut Scratch,
        images: usize,
        x: &[f32],
        weights: &[f32],
        bias: &[f32],
        y: &mut [f32],
        chosen: &mut [u8],
    ) {
        let _ = (threads, scratch, images, x, weights, bias, y, chosen, self.shape, self.tail);
        todo!()
    }

    #[expect(clippy::too_many_arguments, reason = "each is a part of the contract")]
    pub(super) fn backward(
        &mut self,
        threads: &Threads,
        scratch: &mut Scratch,
        images: usize,
        from: Backward<'_>,
        dw: &mut [f32],
        db: &mut [f32],
        dx: Option<&mut [f32]>,
    ) {
        let _ = (threads, scratch, images, from, dw, db, dx);
        todo!()
    }
}
