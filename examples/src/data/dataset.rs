//! Images and labels in memory.

use std::fmt;
use std::path::PathBuf;

use xxhash_rust::xxh3::Xxh3;

use super::digits;

/// Rows and columns of an image.
pub const SIDE: usize = 28;
/// Pixels of an image.
pub const IMAGE_LEN: usize = SIDE * SIDE;
/// Labels are 0 to `CLASSES - 1`.
pub const CLASSES: usize = 10;

/// The training or the test set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// For training.
    Train,
    /// For evaluation.
    Test,
}

/// Images of 28×28 bytes, row by row, each with a label from 0 to 9.
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

    /// XXH3 checksum of images and labels, 64 bits.
    pub fn checksum(&self) -> u64 {
        let mut hash = Xxh3::new();
        hash.update(&self.images);
        hash.update(&self.labels);
        hash.digest()
    }

    /// The pixels of image `index`, row by row.
    ///
    /// # Panics
    /// If there is no such image.
    pub fn image(&self, index: usize) -> &[u8] {
        &self.images[index * IMAGE_LEN..][..IMAGE_LEN]
    }

    /// Copies `samples` into a batch: pixels scaled to [0, 1], and labels.
    ///
    /// ```
    /// use mgpu_examples::data::{Dataset, IMAGE_LEN};
    /// let data = Dataset { images: [vec![0; IMAGE_LEN], vec![255; IMAGE_LEN]].concat(), labels: vec![3, 7] };
    /// let (mut images, mut labels) = (vec![0.5; IMAGE_LEN], [0]);
    /// data.gather(&[1], &mut images, &mut labels);
    /// assert_eq!((images[0], labels), (1.0, [7]));
    /// ```
    ///
    /// # Panics
    /// If there is no such sample, or the slices do not have the size of the batch.
    pub fn gather(&self, samples: &[u32], images: &mut [f32], labels: &mut [u8]) {
        assert_eq!((images.len(), labels.len()), (samples.len() * IMAGE_LEN, samples.len()));
        for ((sample, image), label) in samples.iter().zip(images.chunks_exact_mut(IMAGE_LEN)).zip(labels) {
            let sample = *sample as usize;
            for (value, pixel) in image.iter_mut().zip(self.image(sample)) {
                *value = f32::from(*pixel) / 255.0;
            }
            *label = self.labels[sample];
        }
    }
}

/// The source of the digits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The four MNIST files in this folder.
    Files(PathBuf),
    /// The four MNIST files in this folder, downloaded and verified.
    Downloaded(PathBuf),
    /// Generated digits.
    Generated {
        /// Its seed.
        seed: u64,
    },
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Files(folder) => write!(f, "MNIST from {}", folder.display()),
            Origin::Downloaded(folder) => write!(f, "MNIST downloaded to {}", folder.display()),
            Origin::Generated { seed } => write!(f, "generated digits, not MNIST (seed {seed})"),
        }
    }
}

/// The training and the test set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mnist {
    /// 60,000 images in the original.
    pub train: Dataset,
    /// 10,000 images in the original.
    pub test: Dataset,
    /// The source of both sets.
    pub origin: Origin,
}

impl Mnist {
    /// Generates both sets on one thread. Ranks that share the work call [`digits::generate`] for one part each.
    pub fn generate(seed: u64) -> Self {
        let draw = |split| {
            let (images, labels) = digits::generate(seed, split, 0..digits::count(split));
            Dataset { images, labels }
        };
        Mnist { train: draw(Split::Train), test: draw(Split::Test), origin: Origin::Generated { seed } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_origin_says_plainly_what_it_is() {
        assert_eq!(Origin::Generated { seed: 7 }.to_string(), "generated digits, not MNIST (seed 7)");
        assert_eq!(Origin::Files("here".into()).to_string(), "MNIST from here");
        assert_eq!(Origin::Downloaded("there".into()).to_string(), "MNIST downloaded to there");
    }

    #[test]
    fn a_batch_has_its_samples_in_order() {
        let images = (0..3 * IMAGE_LEN).map(|index| (index / IMAGE_LEN * 100) as u8).collect();
        let data = Dataset { images, labels: vec![5, 6, 7] };
        let (mut images, mut labels) = (vec![9.0; 2 * IMAGE_LEN], [0; 2]);
        data.gather(&[2, 0], &mut images, &mut labels);
        assert_eq!((labels, images[0], images[IMAGE_LEN]), ([7, 5], 200.0 / 255.0, 0.0));
    }

    #[test]
    #[should_panic(expected = "assertion")]
    fn a_batch_of_another_size_is_refused() {
        Dataset { images: vec![0; IMAGE_LEN], labels: vec![1] }.gather(&[0], &mut [0.0; 3], &mut [0]);
    }
}
