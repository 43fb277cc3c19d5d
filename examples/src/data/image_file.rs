//! Images that stay in their file.
//!
//! They are read by their position (`pread`) and not through a memory mapping: a file that is truncated while a program
//! uses it then gives an error with its name and the byte, where a mapping gives a SIGBUS.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use super::{DataError, IMAGE_LEN};

/// An uncompressed IDX file of images, open for reading.
#[derive(Debug)]
pub struct ImageFile {
    path: PathBuf,
    file: File,
    /// Offset of the first image.
    begin: u64,
    count: usize,
}

impl ImageFile {
    /// `count` images from byte `begin` on. The caller has checked that the file is that long.
    pub(super) fn new(path: &Path, file: File, begin: u64, count: usize) -> Self {
        ImageFile { path: path.to_owned(), file, begin, count }
    }

    /// Number of images.
    pub fn len(&self) -> usize {
        self.count
    }

    /// True if there is no image.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the images `samples` to `pixels`. Consecutive images are read at once.
    ///
    /// # Errors
    /// If the file has become shorter, or cannot be read; names file and offset.
    ///
    /// # Panics
    /// If there is no such image, or `pixels` has not the size of `samples`.
    pub fn read(&self, samples: &[u32], pixels: &mut [u8]) -> Result<(), DataError> {
        assert_eq!(pixels.len(), samples.len() * IMAGE_LEN, "pixels of {} images", samples.len());
        let mut rest = pixels;
        for run in runs(samples) {
            let (pixels, others) = rest.split_at_mut(run.len() * IMAGE_LEN);
            self.read_from(self.offset(run), pixels)?;
            rest = others;
        }
        Ok(())
    }

    /// Lets the system begin to read the images `samples` into its cache, and does not wait for that.
    ///
    /// # Panics
    /// If there is no such image.
    pub fn will_need(&self, samples: &[u32]) {
        for run in runs(samples) {
            let (offset, len) = (self.offset(run), run.len() * IMAGE_LEN);
            // Only advice: a file system that does not take it reads later.
            let advice = PosixFadviseAdvice::POSIX_FADV_WILLNEED;
            let _ = posix_fadvise(&self.file, offset.cast_signed(), len as i64, advice);
        }
    }

    /// Offset of a run of images.
    fn offset(&self, run: &[u32]) -> u64 {
        let (first, last) = (run[0] as usize, run[run.len() - 1] as usize);
        assert!(last < self.count, "image {last} of {}", self.count);
        self.begin + (first * IMAGE_LEN) as u64
    }

    fn read_from(&self, mut offset: u64, mut pixels: &mut [u8]) -> Result<(), DataError> {
        while !pixels.is_empty() {
            match self.file.read_at(pixels, offset) {
                Ok(0) => {
                    let whole = self.begin + (self.count * IMAGE_LEN) as u64;
                    let problem = format!(
                        "truncated while it was in use: it had {whole} bytes when it was opened; do not change the \
                         files of a data set during a run"
                    );
                    return Err(self.wrong(offset, problem));
                }
                Ok(read) => {
                    offset += read as u64;
                    pixels = &mut pixels[read..];
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(self.wrong(offset, format!("cannot be read: {error}"))),
            }
        }
        Ok(())
    }

    fn wrong(&self, offset: u64, problem: String) -> DataError {
        DataError::Format { path: self.path.clone(), offset, gzip: false, problem }
    }
}

/// The runs of consecutive numbers in `samples`.
fn runs(samples: &[u32]) -> impl Iterator<Item = &[u32]> {
    samples.chunk_by(|before, after| before.checked_add(1) == Some(*after))
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;

    use proptest::prelude::*;

    use super::*;

    /// Image i has the bytes i.
    fn file(count: u8) -> (tempfile::NamedTempFile, ImageFile) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let bytes: Vec<u8> =
            [9; 16].into_iter().chain((0..count).flat_map(|image| [image; IMAGE_LEN])).collect();
        std::fs::write(file.path(), bytes).unwrap();
        let images = ImageFile::new(file.path(), File::open(file.path()).unwrap(), 16, count as usize);
        (file, images)
    }

    proptest! {
        #[test]
        fn any_samples_are_read_in_their_order(samples in prop::collection::vec(0u32..20, 0..40)) {
            let (_kept, images) = file(20);
            let mut pixels = vec![77; samples.len() * IMAGE_LEN];
            images.will_need(&samples);
            images.read(&samples, &mut pixels).unwrap();
            for (sample, image) in samples.iter().zip(pixels.chunks(IMAGE_LEN)) {
                prop_assert!(image.iter().all(|pixel| u32::from(*pixel) == *sample));
            }
        }
    }

    #[test]
    fn consecutive_samples_form_a_run() {
        let found: Vec<&[u32]> = runs(&[3, 4, 5, 9, 8, 9, u32::MAX, 0]).collect();
        assert_eq!(found, [&[3, 4, 5][..], &[9], &[8, 9], &[u32::MAX], &[0]]);
    }

    #[test]
    fn a_truncated_file_is_an_error_with_name_and_offset() {
        let (kept, images) = file(4);
        let len = 16 + 2 * IMAGE_LEN as u64 + 100;
        OpenOptions::new().write(true).open(kept.path()).unwrap().set_len(len).unwrap();
        let mut pixels = vec![0; 2 * IMAGE_LEN];
        images.read(&[0, 1], &mut pixels).unwrap();
        let error = images.read(&[0, 2], &mut pixels).unwrap_err().to_string();
        let begin = format!("{} at byte {len}: truncated while it was in use", kept.path().display());
        assert!(error.starts_with(&begin), "{error}");
        assert!(images.read(&[3, 0], &mut pixels).is_err());
    }
}
