//! A set of images that a program reads batch by batch, in memory or in its file.

use std::path::Path;
use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;

use super::{DataError, Dataset, IMAGE_LEN, ImageFile};

/// The largest number of images of which a [checksum](Samples::checksum) includes every one.
pub const MOST_CHECKED_IMAGES: usize = 1_000_000;
/// Number of images that the checksum of a larger set includes.
const CHECKED_IMAGES: usize = 4096;
/// Images that are read at once where all of them are needed.
const PIECE: usize = 8192;

/// The training or the test set. Clones share the data.
#[derive(Debug, Clone)]
pub enum Samples {
    /// Images and labels in memory.
    InMemory(Arc<Dataset>),
    /// Images in a file, labels in memory.
    InFile(Arc<FileSamples>),
}

/// The samples of a set whose images stay in their file.
#[derive(Debug)]
pub struct FileSamples {
    pub(super) images: ImageFile,
    pub(super) labels: Vec<u8>,
}

impl From<Dataset> for Samples {
    fn from(data: Dataset) -> Self {
        Samples::InMemory(Arc::new(data))
    }
}

impl Samples {
    /// Number of samples.
    pub fn len(&self) -> usize {
        self.labels().len()
    }

    /// True if there is no sample.
    pub fn is_empty(&self) -> bool {
        self.labels().is_empty()
    }

    /// One label for each image.
    pub fn labels(&self) -> &[u8] {
        match self {
            Samples::InMemory(data) => &data.labels,
            Samples::InFile(set) => &set.labels,
        }
    }

    /// The file with the images, if they are not in memory.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Samples::InMemory(_) => None,
            Samples::InFile(set) => Some(set.images.path()),
        }
    }

    /// Replaces `batch` by `samples`, in their order. Reuses its memory.
    ///
    /// # Errors
    /// If a file cannot be read; names file and offset.
    ///
    /// # Panics
    /// If there is no such sample.
    pub fn read(&self, samples: &[u32], batch: &mut Dataset) -> Result<(), DataError> {
        let labels = self.labels();
        batch.labels.clear();
        batch.labels.extend(samples.iter().map(|sample| labels[*sample as usize]));
        batch.images.resize(samples.len() * IMAGE_LEN, 0);
        self.read_images(samples, &mut batch.images)
    }

    /// Copies the images `samples` to `pixels`, in their order.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    ///
    /// # Panics
    /// If there is no such sample, or `pixels` has not the size of `samples`.
    pub fn read_images(&self, samples: &[u32], pixels: &mut [u8]) -> Result<(), DataError> {
        match self {
            Samples::InMemory(data) => {
                assert_eq!(pixels.len(), samples.len() * IMAGE_LEN, "pixels of {} images", samples.len());
                for (sample, image) in samples.iter().zip(pixels.chunks_exact_mut(IMAGE_LEN)) {
                    image.copy_from_slice(data.image(*sample as usize));
                }
                Ok(())
            }
            Samples::InFile(set) => set.images.read(samples, pixels),
        }
    }

    /// Lets the system begin to read the images `samples`, if they are in a file.
    ///
    /// # Panics
    /// If there is no such sample.
    pub fn will_need(&self, samples: &[u32]) {
        if let Samples::InFile(set) = self {
            set.images.will_need(samples);
        }
    }

    /// Calls `use_piece` with all of `samples`, in their order: at once with the whole set if it is in memory, else with
    /// sets of at most `len` samples that are read one after the other. The second argument are the indices of the
    /// samples in the set.
    ///
    /// # Errors
    /// As [`read`](Self::read), and those of `use_piece`.
    ///
    /// # Panics
    /// If there is no such sample, or `len` is 0.
    pub fn in_pieces<E: From<DataError>>(
        &self,
        samples: &[u32],
        len: usize,
        mut use_piece: impl FnMut(&Dataset, &[u32]) -> Result<(), E>,
    ) -> Result<(), E> {
        if let Samples::InMemory(data) = self {
            return use_piece(data, samples);
        }
        let (mut piece, indices): (_, Vec<u32>) = (Dataset::default(), (0..len as u32).collect());
        samples.chunks(len).try_for_each(|samples| {
            self.read(samples, &mut piece)?;
            use_piece(&piece, &indices[..samples.len()])
        })
    }

    /// XXH3 checksum, 64 bits, the same in memory and in a file.
    ///
    /// It includes all images and labels of up to [`MOST_CHECKED_IMAGES`] images. For a larger set it includes the number
    /// of images, every label and 4,096 images at equal distances, because a rank would read for minutes otherwise.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn checksum(&self) -> Result<u64, DataError> {
        self.checksum_of_up_to(MOST_CHECKED_IMAGES)
    }

    fn checksum_of_up_to(&self, most: usize) -> Result<u64, DataError> {
        let (mut hash, count) = (Xxh3::new(), self.len());
        if let Samples::InMemory(data) = self
            && count <= most
        {
            return Ok(data.checksum());
        }
        let checked: Vec<u32> = if count <= most {
            (0..count as u32).collect()
        } else {
            hash.update(&(count as u64).to_le_bytes());
            let checked = CHECKED_IMAGES.min(count);
            (0..checked).map(|index| (index * (count - 1) / (checked - 1).max(1)) as u32).collect()
        };
        let mut pixels = vec![0; PIECE.min(checked.len()) * IMAGE_LEN];
        for samples in checked.chunks(PIECE) {
            if count > most {
                self.will_need(samples);
            }
            let pixels = &mut pixels[..samples.len() * IMAGE_LEN];
            self.read_images(samples, pixels)?;
            hash.update(pixels);
        }
        hash.update(self.labels());
        Ok(hash.digest())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use super::*;
    use crate::data::{Split, digits};

    /// The same samples in memory and in a file.
    fn samples(count: usize) -> (tempfile::NamedTempFile, [Samples; 2]) {
        let (images, labels) = digits::generate(3, Split::Train, 0..count);
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), &images).unwrap();
        let in_file = ImageFile::new(file.path(), File::open(file.path()).unwrap(), 0, count);
        let in_file = Samples::InFile(Arc::new(FileSamples { images: in_file, labels: labels.clone() }));
        (file, [Dataset { images, labels }.into(), in_file])
    }

    #[test]
    fn batches_and_pieces_are_the_same_in_memory_and_in_a_file() {
        let (_kept, both) = samples(20);
        let chosen = [3, 4, 5, 19, 0, 7, 7];
        let [in_memory, in_file] = both.each_ref().map(|samples| {
            let (mut batch, mut pieces) = (Dataset::default(), Dataset::default());
            samples.read(&chosen, &mut batch).unwrap();
            samples
                .in_pieces(&chosen, 3, |piece, indices| {
                    for index in indices {
                        pieces.images.extend(piece.image(*index as usize));
                        pieces.labels.push(piece.labels[*index as usize]);
                    }
                    Ok::<_, DataError>(())
                })
                .unwrap();
            assert_eq!(batch, pieces);
            batch
        });
        assert_eq!(in_memory, in_file);
        assert_eq!(in_memory.labels.len(), chosen.len());
    }

    #[test]
    fn checksums_are_the_same_in_memory_and_in_a_file() {
        let (kept, both) = samples(5000);
        let whole = both.each_ref().map(|samples| samples.checksum_of_up_to(5000).unwrap());
        let sparse = both.each_ref().map(|samples| samples.checksum_of_up_to(4999).unwrap());
        let Samples::InMemory(data) = &both[0] else { panic!("it is in memory") };
        assert_eq!(whole, [data.checksum(); 2]);
        assert!(sparse[0] == sparse[1] && sparse[0] != whole[0]);
        // A large set of which the last image is another one.
        let mut bytes = fs::read(kept.path()).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(kept.path(), bytes).unwrap();
        assert_ne!(both[1].checksum_of_up_to(4999).unwrap(), sparse[0]);
    }
}
