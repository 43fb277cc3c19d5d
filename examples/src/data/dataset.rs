//! Images and labels in memory.

use std::fmt;
use std::path::PathBuf;

/// Rows of an image, and columns.
pub const SIDE: usize = 28;
/// Pixels of an image.
pub const IMAGE_LEN: usize = SIDE * SIDE;
/// Labels run from 0 to one less.
pub const CLASSES: usize = 10;

/// The training or the test set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// To learn from.
    Train,
    /// To be judged by.
    Test,
}

/// Images of 28×28 bytes, row by row, with a label from 0 to 9 each.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Dataset {
    /// `len() * IMAGE_LEN` pixels.
    pub images: Vec<u8>,
    /// One label for each image.
    pub labels: Vec<u8>,
}

impl Dataset {
    /// Number of images.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// True if there is no image.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// Copies `samples` into a batch: pixels scaled to [0, 1], and labels.
    ///
    /// # Panics
    /// If there is no such sample, or the batch has another size.
    pub fn gather(&self, samples: &[u32], images: &mut [f32], labels: &mut [u8]) {
        assert_eq!((images.len(), labels.len()), (samples.len() * IMAGE_LEN, samples.len()));
        for ((sample, image), label) in samples.iter().zip(images.chunks_exact_mut(IMAGE_LEN)).zip(labels) {
            let sample = *sample as usize;
            let pixels = &self.images[sample * IMAGE_LEN..(sample + 1) * IMAGE_LEN];
            for (value, pixel) in image.iter_mut().zip(pixels) {
                *value = f32::from(*pixel) / 255.0;
            }
            *label = self.labels[sample];
        }
    }
}

/// Where the digits come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The four MNIST files in this folder.
    Files(PathBuf),
    /// Drawn by the generator.
    Generated {
        /// Its seed.
        seed: u64,
    },
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Files(folder) => write!(f, "MNIST from {}", folder.display()),
            Origin::Generated { seed } => write!(f, "generated digits, not MNIST (seed {seed})"),
        }
    }
}

/// The training and the test set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mnist {
    /// 60,000 images, in the original.
    pub train: Dataset,
    /// 10,000 images, in the original.
    pub test: Dataset,
    /// Where they come from.
    pub origin: Origin,
}
