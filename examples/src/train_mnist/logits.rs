//! The logits of some images, as a file for comparison with other programs.

use std::error::Error;
use std::path::Path;

use mgpu::output_file;
use serde::Serialize;

use super::byproducts::{cannot_write, warn};
use super::engine::Engine;
use crate::data::{CLASSES, Dataset, IMAGE_LEN, Samples};

const FLAG: &str = "--logits";
/// Number of images whose logits are written.
const IMAGES: usize = 100;

#[derive(Serialize)]
struct Logits<'a> {
    net: &'a str,
    /// 28×28 bytes each, row by row; divide by 255 for the network's input.
    images: Vec<&'a [u8]>,
    labels: &'a [u8],
    logits: Vec<&'a [f32]>,
}

/// Writes the first images of `data` and their logits in evaluation mode to `path`, as JSON, on rank 0. Warns if the file
/// cannot be written, and says that `run`, a training or an evaluation, continues. All ranks call it.
pub(super) fn write(
    run: &str,
    path: &Path,
    net: &str,
    engine: &mut dyn Engine,
    data: &Samples,
) -> Result<(), Box<dyn Error>> {
    // The ranks of the first replica of the network compute together.
    if engine.replica().0 > 0 {
        return Ok(());
    }
    let count = IMAGES.min(data.len());
    let mut first = Dataset::default();
    data.read(&(0..count as u32).collect::<Vec<_>>(), &mut first)?;
    let logits = engine.logits(&first)?;
    if engine.comm().rank() > 0 {
        return Ok(());
    }
    let text = serde_json::to_vec(&Logits {
        net,
        images: first.images.chunks(IMAGE_LEN).collect(),
        labels: &first.labels,
        logits: logits.chunks(CLASSES).collect(),
    })?;
    if let Err(error) = output_file::write(path, &text) {
        warn(run, &cannot_write(FLAG, path, &error));
    }
    Ok(())
}

/// Checks that the file can be written, so that the error comes before training.
pub(super) fn check(path: &Path) -> Result<(), String> {
    output_file::check(path).map_err(|error| cannot_write(FLAG, path, &error))
}
