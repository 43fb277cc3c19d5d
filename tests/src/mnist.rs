//! A small data set in MNIST's file format.

use std::fs;
use std::path::Path;

use mgpu_examples::data::digit_files;

/// Number of training images.
pub const TRAIN: u32 = 64;

/// Writes the four files to `folder`: 64 training images and 16 test images.
///
/// # Panics
/// If they cannot be written.
pub fn write_tiny(folder: &Path) {
    write(folder, TRAIN);
}

/// As [`write_tiny`], with another number of training images.
///
/// # Panics
/// If they cannot be written.
pub fn write(folder: &Path, train: u32) {
    write_sets(folder, train, 16);
}

/// As [`write_tiny`], with other numbers of training and test images.
///
/// # Panics
/// If they cannot be written.
pub fn write_sets(folder: &Path, train: u32, test: u32) {
    for (prefix, count) in [("train", train), ("t10k", test)] {
        let mut images = [0x803u32, count, 28, 28].map(u32::to_be_bytes).concat();
        images.resize(16 + count as usize * 784, 7);
        fs::write(folder.join(format!("{prefix}-images-idx3-ubyte")), images).expect("a file of images");
        let mut labels = [0x801u32, count].map(u32::to_be_bytes).concat();
        labels.extend((0..count).map(|i| (i % 10) as u8));
        fs::write(folder.join(format!("{prefix}-labels-idx1-ubyte")), labels).expect("a file of labels");
    }
}

/// Writes generated digits: `train` training images, no two of them equal, and `test` test images.
///
/// # Panics
/// If they cannot be written.
pub fn write_digits(folder: &Path, train: u32, test: u32) {
    digit_files::write(folder, 1, (train, test), 1).expect("files of digits");
}
