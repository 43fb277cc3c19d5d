//! Properties of the generator: the same bytes for ever, balanced classes, and images that depend only on seed, split
//! and index.

use std::collections::HashSet;

use proptest::prelude::*;
use sha2::{Digest, Sha256};

use super::*;
use crate::data::{Mnist, Origin};

#[test]
fn the_first_hundred_images_never_change() {
    let (images, labels) = generate(1, Split::Train, 0..100);
    let sum: String =
        Sha256::digest([images, labels].concat()).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(
        sum, "ddd2edc749cf92373d7a7d88ad9049cf9e53c95efcbb39f6e92abc52087c9d10",
        "the generator has changed: accuracies cannot be compared with earlier ones"
    );
}

#[test]
fn classes_are_balanced() {
    let mut counts = [0; CLASSES];
    let (_, labels) = generate(3, Split::Test, 0..count(Split::Test));
    labels.iter().for_each(|&label| counts[usize::from(label)] += 1);
    // Expected 1,000 with a standard deviation of 30.
    assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
}

#[test]
fn no_two_images_are_the_same() {
    let mut seen = HashSet::new();
    for (seed, split) in [(1, Split::Train), (1, Split::Test), (2, Split::Train), (u64::MAX, Split::Train)] {
        let (images, _) = generate(seed, split, 0..200);
        for (index, image) in images.chunks(IMAGE_LEN).enumerate() {
            assert!(seen.insert(image.to_vec()), "seed {seed}, {split:?}, image {index}");
        }
    }
}

#[test]
fn every_image_shows_something() {
    let (images, _) = generate(4, Split::Train, 0..2000);
    for (index, image) in images.chunks(IMAGE_LEN).enumerate() {
        let bright = image.iter().filter(|&&pixel| pixel > 100).count();
        assert!((8..IMAGE_LEN / 2).contains(&bright), "image {index} has {bright} bright pixels");
    }
}

#[test]
fn strokes_fit_their_path() {
    for stroke in GLYPHS.iter().flat_map(|ways| ways.iter()).flat_map(|glyph| glyph.iter()) {
        assert!((2..=MAX_POINTS).contains(&stroke.len()));
        assert!(stroke.iter().all(|point| point.0.abs() <= 0.7 && point.1.abs() <= 1.0), "{stroke:?}");
    }
}

#[test]
fn both_sets_have_the_size_of_mnist() {
    let mnist = Mnist::generate(9);
    assert_eq!((mnist.train.len(), mnist.test.len()), (60_000, 10_000));
    assert_eq!(mnist.origin, Origin::Generated { seed: 9 });
    let (images, labels) = generate(9, Split::Train, 59_999..60_000);
    assert_eq!((mnist.train.image(59_999), mnist.train.labels[59_999]), (&images[..], labels[0]));
}

proptest! {
    #[test]
    fn adjacent_ranges_concatenate(seed: u64, start in 0usize..1_000_000, cut in 0usize..20) {
        let (images, labels) = generate(seed, Split::Train, start..start + 20);
        let (first_images, first_labels) = generate(seed, Split::Train, start..start + cut);
        let (last_images, last_labels) = generate(seed, Split::Train, start + cut..start + 20);
        prop_assert_eq!(images, [first_images, last_images].concat());
        prop_assert_eq!(labels, [first_labels, last_labels].concat());
    }
}
