//! Training data: MNIST files, a download, or generated digits.
//!
//! | source | function | needs |
//! |---|---|---|
//! | the four files of MNIST, gzipped or not | [`idx::read`] | a folder with them |
//! | the same files from a mirror, verified | [`download::mnist`] | a network, the first time |
//! | a generator | [`Mnist::generate`], [`digits`] | nothing |
//!
//! All three return a [`Mnist`]: two [`Dataset`]s and their [`Origin`], which programs print with every result, so
//! that an accuracy on generated digits is never mistaken for one on MNIST. Images stay bytes, as in the files;
//! [`Dataset::gather`] converts a batch to numbers from 0 to 1.

mod dataset;
pub mod digits;
pub mod download;
mod error;
pub mod idx;

pub use dataset::{CLASSES, Dataset, IMAGE_LEN, Mnist, Origin, SIDE, Split};
pub use error::{Attempt, DataError, Reason};
