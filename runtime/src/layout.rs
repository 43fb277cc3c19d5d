//! Names, shapes and offsets of the tensors in an arena.
//!
//! An arena is one contiguous buffer. The parameters, gradients and optimizer states of a model are an arena each. A
//! [`Layout`] says where every tensor begins. All arenas of a model have the same layout: tensor `i` of the gradients
//! has the same offset as tensor `i` of the parameters, and one pass over a range updates both.

use std::collections::HashSet;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{Error, ParameterGroup, Result};

/// Largest name of a tensor, in bytes: the header of a checkpoint file has room for about 15,000 such names.
const MAX_NAME_BYTES: usize = 1024;

/// The name under which a safetensors file keeps its metadata.
const METADATA: &str = "__metadata__";

/// Name, shape and position of one tensor in an arena.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TensorSpec {
    /// The tensor's name in errors and checkpoints, such as `3.weight`.
    pub name: String,
    /// Extents, slowest first; elements are stored row-major.
    pub shape: Vec<usize>,
    /// Index of the first element in the arena.
    pub offset: usize,
    /// How the tensor is trained.
    pub group: ParameterGroup,
}

impl TensorSpec {
    /// Number of elements: the product of the shape, 1 for a scalar. `usize::MAX` if the product overflows.
    pub fn len(&self) -> usize {
        self.shape.iter().fold(1, |len, extent| len.saturating_mul(*extent))
    }

    /// True for a tensor with an extent of zero.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The tensor's elements within the arena.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.end()
    }

    fn end(&self) -> usize {
        self.offset.saturating_add(self.len())
    }
}

/// The tensors of one arena, in the order in which they were added, contiguous except for alignment.
///
/// ```
/// let mut layout = mgpu::Layout::new();
/// let weight = layout.push("fc.weight", [10, 84]);
/// let bias = layout.push("fc.bias", [10]);
/// assert_eq!(layout.range(weight), 0..840);
/// assert_eq!(layout.range(bias), 840..850);
/// assert_eq!(layout.len(), 850);
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Layout {
    tensors: Vec<TensorSpec>,
}

impl Layout {
    /// A layout without tensors.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a tensor and returns its index.
    ///
    /// # Panics
    /// If a checkpoint could not store a tensor of this name: the name is empty, longer than 1,024 bytes,
    /// `__metadata__`, or already in use.
    pub fn push(&mut self, name: impl Into<String>, shape: impl Into<Vec<usize>>) -> usize {
        let (name, offset) = (self.checked_name(name.into()), self.len());
        self.tensors.push(TensorSpec { name, shape: shape.into(), offset, group: ParameterGroup::new() });
        self.tensors.len() - 1
    }

    /// As [`push`](Self::push), for names that come from outside.
    ///
    /// # Errors
    /// If a checkpoint could not store a tensor of this name.
    pub fn try_push(&mut self, name: &str, shape: impl Into<Vec<usize>>) -> Result<usize> {
        let is_taken = self.tensors.iter().any(|tensor| tensor.name == name);
        match problem_of_name(name, is_taken) {
            Some(problem) => Err(Error::InvalidArgument { operation: "layout", problem }),
            None => Ok(self.push(name, shape)),
        }
    }

    /// As [`push`](Self::push), but aligns the tensor's offset to a multiple of `alignment` elements, so that kernels
    /// can use whole vectors. The padding between two tensors belongs to none.
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
        let offset = self.len().checked_next_multiple_of(alignment.max(1)).unwrap_or(usize::MAX);
        let name = self.checked_name(name.into());
        self.tensors.push(TensorSpec { name, shape: shape.into(), offset, group: ParameterGroup::new() });
        self.tensors.len() - 1
    }

    /// Assigns `tensors` to `group`.
    ///
    /// # Panics
    /// If there is no such tensor.
    pub fn assign(&mut self, tensors: impl IntoIterator<Item = usize>, group: ParameterGroup) {
        for tensor in tensors {
            self.tensors[tensor].group = group;
        }
    }

    /// The tensors that are trained, in arena order.
    pub(crate) fn trained(&self) -> impl DoubleEndedIterator<Item = usize> {
        (0..self.tensors.len()).filter(|tensor| !self.tensors[*tensor].group.frozen)
    }

    /// First element after tensor `index` and the padding that follows it.
    pub(crate) fn padded_end(&self, index: usize) -> usize {
        self.tensors.get(index + 1).map_or_else(|| self.len(), |next| next.offset)
    }

    fn checked_name(&self, name: String) -> String {
        let is_taken = self.tensors.iter().any(|tensor| tensor.name == name);
        if let Some(problem) = problem_of_name(&name, is_taken) {
            panic!("{problem}");
        }
        name
    }

    /// Why a checkpoint cannot store these tensors, or `None` if it can. Needed for deserialised layouts, which did
    /// not pass the checks of [`push`](Self::push).
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
        self.tensors.last().map_or(0, TensorSpec::end)
    }

    /// True when the arena holds no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Checks that all tensors fit into memory and that their groups are valid.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] with the first tensor whose group has an invalid factor, or whose end exceeds the
    /// address space.
    pub(crate) fn check(&self, operation: &'static str) -> Result<()> {
        for TensorSpec { name, group, .. } in &self.tensors {
            if let Some(problem) = group.problem() {
                let problem = format!("tensor `{name}`: {problem}");
                return Err(Error::InvalidArgument { operation, problem });
            }
        }
        // Largest possible allocation, in elements: `isize::MAX` bytes.
        let most = isize::MAX as usize / size_of::<f32>();
        let Some(tensor) = self.tensors.iter().find(|tensor| tensor.end() > most) else { return Ok(()) };
        let TensorSpec { name, shape, .. } = tensor;
        let problem = format!("tensor `{name}` of shape {shape:?} is larger than any memory");
        Err(Error::InvalidArgument { operation, problem })
    }

    /// Describes the first difference to `other`, or returns `None` if the layouts are equal.
    pub fn difference(&self, other: &Layout) -> Option<String> {
        self.difference_between(other, ["here", "there"])
    }

    /// As [`difference`](Self::difference), with words that say where each of the two layouts is.
    pub(crate) fn difference_between(&self, other: &Layout, [here, there]: [&str; 2]) -> Option<String> {
        let pairs = self.tensors.iter().zip(&other.tensors);
        for (index, (mine, theirs)) in pairs.enumerate() {
            let name = &mine.name;
            if mine.name != theirs.name {
                return Some(format!("tensor {index} is `{name}` {here} and `{}` {there}", theirs.name));
            }
            if mine.shape != theirs.shape {
                let (mine, theirs) = (&mine.shape, &theirs.shape);
                return Some(format!("tensor `{name}` has shape {mine:?} {here} and {theirs:?} {there}"));
            }
            if mine.offset != theirs.offset {
                let (mine, theirs) = (mine.offset, theirs.offset);
                return Some(format!(
                    "tensor `{name}` begins at element {mine} {here} and at {theirs} {there}"
                ));
            }
            if mine.group != theirs.group {
                let (mine, theirs) = (mine.group, theirs.group);
                return Some(format!("tensor `{name}` is trained as {mine} {here} and as {theirs} {there}"));
            }
        }
        let (mine, theirs) = (self.tensors.len(), other.tensors.len());
        (mine != theirs).then(|| format!("{mine} tensors {here} and {theirs} {there}"))
    }
}

/// What is wrong with a tensor's name, if anything. `is_taken` says that another tensor has it.
fn problem_of_name(name: &str, is_taken: bool) -> Option<String> {
    match name {
        "" => Some("a tensor has an empty name".to_owned()),
        METADATA => {
            Some(format!("a tensor is called `{METADATA}`, which is not a tensor in a safetensors file"))
        }
        _ if name.len() > MAX_NAME_BYTES => {
            let begin: String = name.chars().take(40).collect();
            Some(format!(
                "the name of tensor `{begin}…` has {} bytes, more than {MAX_NAME_BYTES}",
                name.len()
            ))
        }
        _ if is_taken => Some(format!("two tensors are called `{name}`")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn push_rejects_names_that_a_checkpoint_cannot_store() {
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
        let mut layout = Layout::new();
        assert_eq!(layout.try_push("a", [2]).unwrap(), 0);
        assert_eq!(layout.try_push("a", [2]).unwrap_err().to_string(), "layout: two tensors are called `a`");
        assert_eq!(refused(""), "a tensor has an empty name");
        assert!(refused("__metadata__").starts_with("a tensor is called `__metadata__`"));
        assert!(refused(&"é".repeat(513)).ends_with("has 1026 bytes, more than 1024"));
        let mut layout = Layout::new();
        for name in ["\0", "a/../b", "__metadata", "dtype", "\"\n", "é", &"é".repeat(512)] {
            layout.push(name, [1]);
        }
        assert_eq!(layout.problem_of_names(), None);
        // As if it came from another rank.
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

    #[test]
    fn difference_names_offsets() {
        let (mut packed, mut aligned) = (Layout::new(), Layout::new());
        packed.push("a", [60]);
        packed.push("b", [10]);
        aligned.push("a", [60]);
        aligned.push_aligned("b", [10], 64);
        assert_eq!(
            packed.difference(&aligned).unwrap(),
            "tensor `b` begins at element 60 here and at 64 there"
        );
    }

    #[test]
    fn shapes_that_overflow_are_rejected() {
        for shape in [vec![1 << 32, 1 << 32], vec![usize::MAX, 2], vec![1 << 61], vec![3, usize::MAX]] {
            let mut layout = Layout::new();
            layout.push("a", [4]);
            layout.push_aligned("huge", shape, 64);
            layout.push_aligned("b", [1], 0);
            let error = layout.check("test").unwrap_err().to_string();
            assert!(error.starts_with("test: tensor `huge` of shape ["), "{error}");
        }
        let mut layout = Layout::new();
        layout.push("none", [1 << 32, 1 << 32, 0]);
        assert!(layout.check("test").is_ok() && layout.is_empty());
    }
}
