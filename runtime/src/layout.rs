//! Names, shapes and offsets of the tensors that share one flat arena.
//!
//! Parameters, gradients and optimizer state of a model each live in one contiguous allocation. A [`Layout`]
//! says where every tensor begins; the same layout serves all of them, so that tensor `i` of the gradients lies
//! where tensor `i` of the parameters does, and one pass over a range updates both.

use std::collections::HashSet;
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Bytes of a tensor's name, at most: the header of a checkpoint's file has room for some 15,000 such names.
const LONGEST_NAME: usize = 1024;

/// The name under which a safetensors file keeps its metadata.
const METADATA: &str = "__metadata__";

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
    ///
    /// # Panics
    /// If no checkpoint could hold a tensor of that name beside the others: the name is empty, longer than 1,024 bytes,
    /// `__metadata__`, or another tensor's.
    pub fn push(&mut self, name: impl Into<String>, shape: impl Into<Vec<usize>>) -> usize {
        let (name, offset) = (self.checked_name(name.into()), self.len());
        self.tensors.push(TensorSpec { name, shape: shape.into(), offset });
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
    ///
    /// # Panics
    /// As [`push`](Self::push).
    pub fn push_aligned(
        &mut self,
        name: impl Into<String>,
        shape: impl Into<Vec<usize>>,
        alignment: usize,
    ) -> usize {
        let (name, offset) = (self.checked_name(name.into()), self.len().next_multiple_of(alignment));
        self.tensors.push(TensorSpec { name, shape: shape.into(), offset });
        self.tensors.len() - 1
    }

    fn checked_name(&self, name: String) -> String {
        let is_taken = self.tensors.iter().any(|tensor| tensor.name == name);
        if let Some(problem) = problem_of_name(&name, is_taken) {
            panic!("{problem}");
        }
        name
    }

    /// Why no checkpoint can hold these tensors, or `None` if one can: a layout that came from elsewhere was not checked
    /// when it was made.
    pub(crate) fn problem_of_names(&self) -> Option<String> {
        let mut names = HashSet::new();
        let mut tensors = self.tensors.iter();
        tensors.find_map(|tensor| problem_of_name(&tensor.name, !names.insert(&tensor.name)))
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

/// What is wrong with a tensor's name, which is another's too if `is_taken`.
fn problem_of_name(name: &str, is_taken: bool) -> Option<String> {
    match name {
        "" => Some("a tensor has an empty name".to_owned()),
        METADATA => {
            Some(format!("a tensor is called `{METADATA}`, which is not a tensor in a safetensors file"))
        }
        _ if name.len() > LONGEST_NAME => {
            let begin: String = name.chars().take(40).collect();
            Some(format!("the name of tensor `{begin}…` has {} bytes, more than {LONGEST_NAME}", name.len()))
        }
        _ if is_taken => Some(format!("two tensors are called `{name}`")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_no_checkpoint_can_hold_are_refused_when_the_layout_is_made() {
        let refused = |name: &str| {
            let push = || {
                let mut layout = Layout::new();
                layout.push("a", [2]);
                layout.push_aligned(name, [2], 16);
            };
            let panicked = std::panic::catch_unwind(push).expect_err(name);
            panicked.downcast_ref::<String>().expect("a text").clone()
        };
        assert_eq!(refused("a"), "two tensors are called `a`");
        assert_eq!(refused(""), "a tensor has an empty name");
        assert!(refused("__metadata__").starts_with("a tensor is called `__metadata__`"));
        assert!(refused(&"é".repeat(513)).ends_with("has 1026 bytes, more than 1024"));
        let mut layout = Layout::new();
        for name in ["\0", "a/../b", "__metadata", "dtype", "\"\n", "é", &"é".repeat(512)] {
            layout.push(name, [1]);
        }
        assert_eq!(layout.problem_of_names(), None);
        // As if from another rank.
        let json = serde_json::to_string(&layout).unwrap().replace("dtype", "__metadata");
        let forged: Layout = serde_json::from_str(&json).unwrap();
        assert_eq!(forged.problem_of_names().unwrap(), "two tensors are called `__metadata`");
    }

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
