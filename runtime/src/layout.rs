//! Names, shapes and offsets of the tensors that share one flat arena.
//!
//! Parameters, gradients and optimizer state of a model each live in one contiguous allocation. A [`Layout`]
//! says where every tensor begins; the same layout serves all of them, so that tensor `i` of the gradients lies
//! where tensor `i` of the parameters does, and one pass over a range updates both.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// One tensor's place in a flat arena.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorSpec {
    /// The name under which errors and checkpoints know the tensor, such as `3.weight`.
    pub name: String,
    /// Extents, slowest first; elements are stored row-major.
    pub shape: Vec<usize>,
    /// Index of the first element in the arena.
    pub offset: usize,
}

impl TensorSpec {
    /// Number of elements: the product of the shape, 1 for a scalar.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// True for a tensor with an extent of zero.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The tensor's elements within the arena.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len()
    }
}

/// The tensors of one arena, in the order they were added, back to back unless they are to be aligned.
///
/// ```
/// let mut layout = mgpu::Layout::new();
/// let weight = layout.push("fc.weight", [10, 84]);
/// let bias = layout.push("fc.bias", [10]);
/// assert_eq!(layout.range(weight), 0..840);
/// assert_eq!(layout.range(bias), 840..850);
/// assert_eq!(layout.len(), 850);
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    tensors: Vec<TensorSpec>,
}

impl Layout {
    /// A layout without tensors.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a tensor behind the last one and returns its index.
    pub fn push(&mut self, name: impl Into<String>, shape: impl Into<Vec<usize>>) -> usize {
        let offset = self.len();
        self.tensors.push(TensorSpec { name: name.into(), shape: shape.into(), offset });
        self.tensors.len() - 1
    }

    /// As [`push`](Self::push), with the tensor's offset a multiple of `alignment` elements, so that every tensor can be
    /// moved in whole vectors. What lies between two tensors belongs to none.
    ///
    /// ```
    /// let mut layout = mgpu::Layout::new();
    /// layout.push_aligned("conv.bias", [6], 64);
    /// let weight = layout.push_aligned("fc.weight", [10, 84], 64);
    /// assert_eq!(layout.range(weight), 64..904);
    /// ```
    pub fn push_aligned(
        &mut self,
        name: impl Into<String>,
        shape: impl Into<Vec<usize>>,
        alignment: usize,
    ) -> usize {
        let offset = self.len().next_multiple_of(alignment);
        self.tensors.push(TensorSpec { name: name.into(), shape: shape.into(), offset });
        self.tensors.len() - 1
    }

    /// All tensors, in arena order.
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    /// The elements of tensor `index` within the arena.
    ///
    /// # Panics
    /// If there is no tensor `index`.
    pub fn range(&self, index: usize) -> Range<usize> {
        self.tensors[index].range()
    }

    /// Number of elements in the whole arena.
    pub fn len(&self) -> usize {
        self.tensors.last().map_or(0, |last| last.offset + last.len())
    }

    /// True when the arena holds no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Describes the first place where `other` differs, or `None` when both are the same.
    pub fn difference(&self, other: &Layout) -> Option<String> {
        let pairs = self.tensors.iter().zip(&other.tensors);
        for (index, (mine, theirs)) in pairs.enumerate() {
            if mine.name != theirs.name {
                return Some(format!("tensor {index} is `{}` here and `{}` there", mine.name, theirs.name));
            }
            if mine.shape != theirs.shape {
                return Some(format!(
                    "tensor `{}` has shape {:?} here and {:?} there",
                    mine.name, mine.shape, theirs.shape
                ));
            }
        }
        let (here, there) = (self.tensors.len(), other.tensors.len());
        (here != there).then(|| format!("{here} tensors here and {there} there"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn difference_names_the_first_tensor_and_both_shapes() {
        let mut left = Layout::new();
        left.push("a", [2, 3]);
        left.push("b", [4]);
        let mut right = left.clone();
        assert_eq!(left.difference(&right), None);
        right.push("c", [1]);
        assert_eq!(left.difference(&right).unwrap(), "2 tensors here and 3 there");
        let mut right = Layout::new();
        right.push("a", [2, 3]);
        right.push("b", [5]);
        assert_eq!(left.difference(&right).unwrap(), "tensor `b` has shape [4] here and [5] there");
    }
}
