//! Gathering on the CPU: a copy, cheap compared to the work on the batch.

/// A data set and optionally an order of its samples.
#[derive(Debug, Clone, Copy)]
pub struct Samples<'a> {
    /// Pixels of all samples, one sample after the other.
    pub images: &'a [u8],
    /// One label for each sample.
    pub labels: &'a [u8],
    /// Indices of samples.
    pub order: Option<&'a [u32]>,
}

/// Overwrites `x` and `labels` with the batch at `position` of the order.
///
/// # Panics
/// If the lengths do not fit each other, or the order names a sample that does not exist.
pub fn batch(samples: &Samples<'_>, position: u64, x: &mut [f32], labels: &mut [u8]) {
    range(samples, position * labels.len() as u64, x, labels);
}

/// Overwrites `x` and `labels` with consecutive samples of the order, from index `first` on.
///
/// # Panics
/// As [`batch`].
pub fn range(samples: &Samples<'_>, first: u64, x: &mut [f32], labels: &mut [u8]) {
    let count = samples.labels.len();
    let len = samples.images.len() / count;
    assert_eq!(samples.images.len(), len * count, "pixels of {count} samples");
    assert_eq!(x.len(), len * labels.len(), "inputs of {} samples", labels.len());
    for ((x, label), place) in x.chunks_exact_mut(len).zip(labels).zip(first as usize..) {
        let sample = samples.order.map_or(place, |order| order[place] as usize);
        assert!(sample < count, "sample {sample} of {count}");
        for (x, pixel) in x.iter_mut().zip(&samples.images[sample * len..]) {
            *x = f32::from(*pixel) / 255.0;
        }
        *label = samples.labels[sample];
    }
}
