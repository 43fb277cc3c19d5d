//! What a library has to supply to compute a layer's passes on a GPU.

use crate::cuda::algorithm::LibraryAlgorithm;
use crate::cuda::autotune::{Note, Pass};
use crate::cuda::trial::Candidate;
use crate::cuda::{Result, Stream, View};

/// What one pass reads and writes.
#[derive(Clone, Copy)]
pub(super) struct Operands<'a> {
    pub(super) pass: Pass,
    pub(super) factors: [View<'a>; 2],
    pub(super) result: View<'a>,
    /// Added to the result of the forward pass; `None` for the others.
    pub(super) bias: Option<View<'a>>,
    pub(super) workspace: View<'a>,
}

impl<'a> Operands<'a> {
    /// `y` from `x` and the weights.
    pub(super) fn forward(
        x: View<'a>,
        weights: View<'a>,
        bias: View<'a>,
        y: View<'a>,
        workspace: View<'a>,
    ) -> Self {
        Operands { pass: Pass::Forward, factors: [x, weights], result: y, bias: Some(bias), workspace }
    }

    /// `dx` from the weights and `dy`.
    pub(super) fn backward_input(weights: View<'a>, dy: View<'a>, dx: View<'a>, workspace: View<'a>) -> Self {
        Operands { pass: Pass::BackwardInput, factors: [weights, dy], result: dx, bias: None, workspace }
    }

    /// `dw` from `x` and `dy`.
    pub(super) fn backward_weights(x: View<'a>, dy: View<'a>, dw: View<'a>, workspace: View<'a>) -> Self {
        Operands { pass: Pass::BackwardWeights, factors: [x, dy], result: dw, bias: None, workspace }
    }

    /// Both factors and the result.
    pub(super) fn views(&self) -> [View<'a>; 3] {
        let [a, b] = self.factors;
        [a, b, self.result]
    }
}

/// One layer, described to a library that computes its passes.
pub(super) trait LibraryLayer: Send + Sync {
    /// The library's name and version.
    fn version(&self) -> String;

    /// Algorithms worth benchmarking that need a workspace of at most `limit` bytes, and notes about those that are
    /// not usable.
    fn candidates(&self, pass: Pass, deterministic: bool, limit: usize) -> (Vec<Candidate>, Vec<Note>);

    /// Bytes of workspace that an algorithm needs.
    ///
    /// # Errors
    /// If the library does not support it for this layer.
    fn workspace(&self, pass: Pass, algorithm: &LibraryAlgorithm) -> Result<usize>;

    /// Computes a pass. In the forward pass a [fused](crate::cuda::algorithm::Form::Fused) algorithm adds the bias
    /// and applies the activation; other algorithms leave both to the caller.
    ///
    /// # Errors
    /// If the library refuses.
    fn run(&self, stream: &Stream, algorithm: &LibraryAlgorithm, operands: &Operands<'_>) -> Result<()>;
}
