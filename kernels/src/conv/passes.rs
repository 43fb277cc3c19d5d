//! What a library supplies to make a layer's passes on a GPU.

use crate::cuda::algorithm::Algorithm;
use crate::cuda::choice::{Candidate, Note, Pass};
use crate::cuda::{Result, Stream, View};

/// The passes of one layer by a library, to which it has been described.
///
/// A pass has three operands, two factors and a result: x, w, y forward, w, dy, dx for the gradient of the input, and x,
/// dy, dw for that of the weights.
pub(super) trait Passes: Send + Sync {
    /// The library's name and version.
    fn version(&self) -> String;

    /// Algorithms that are worth a race and need a workspace of at most `limit` bytes, and notes about what is not.
    fn candidates(&self, pass: Pass, deterministic: bool, limit: usize) -> (Vec<Candidate>, Vec<Note>);

    /// Bytes of workspace of an algorithm.
    ///
    /// # Errors
    /// If the library does not support it for this layer.
    fn workspace(&self, pass: Pass, algorithm: &Algorithm) -> Result<usize>;

    /// Makes a pass. The forward one has a bias, which a [fused](crate::cuda::algorithm::Form::Fused) algorithm adds before
    /// it activates the output; other algorithms leave both to the caller.
    ///
    /// # Errors
    /// If the library refuses.
    fn run(
        &self,
        pass: Pass,
        stream: &Stream,
        algorithm: &Algorithm,
        operands: [View<'_>; 3],
        bias: Option<View<'_>>,
        workspace: View<'_>,
    ) -> Result<()>;
}
