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
//!
//! A set that is too large for the memory stays in its file: [`Samples`] are a [`Dataset`] or such a file, and
//! [`ReadAhead`] reads the batches of later steps from them while a program computes.

mod dataset;
pub mod digit_files;
pub mod digits;
pub mod download;
mod error;
pub mod idx;
mod image_file;
mod read_ahead;
mod samples;

pub use dataset::{CLASSES, Dataset, IMAGE_LEN, Mnist, Origin, SIDE, Split};
pub use error::{Attempt, DataError, Reason};
pub use image_file::ImageFile;
pub use read_ahead::ReadAhead;
pub use samples::{FileSamples, MOST_CHECKED_IMAGES, Samples};
