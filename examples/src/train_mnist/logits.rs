//! What a network says to some images, for other programs to compare with.

use std::error::Error;
use std::path::Path;

use mgpu::output_file;
use serde::Serialize;

use super::byproducts::{cannot_write, warn};
use super::engine::Engine;
use crate::data::{CLASSES, Dataset, IMAGE_LEN};

const FLAG: &str = "--logits";
/// Images of which the logits are written.
const IMAGES: usize = 100;

#[derive(Serialize)]
struct Logits<'a> {
    net: &'a str,
    /// Rows of 28×28 bytes, to be divided by 255.
    images: Vec<&'a [u8]>,
    labels: &'a [u8],
    logits: Vec<&'a [f32]>,
}

/// Writes the first images of `data`, and their logits in evaluation mode, as JSON to `path`. If the file cannot be written, that
/// is said.
pub(super) fn write(
    path: &Path,
    net: &str,
    engine: &mut dyn Engine,
    data: &Dataset,
) -> Result<(), Box<dyn Error>> {
    let count = IMAGES.min(data.len());
    let logits = engine.logits(data, count)?;
    let text = serde_json::to_vec(&Logits {
        net,
        images: data.images.chunks(IMAGE_LEN).take(count).collect(),
        labels: &data.labels[..count],
        logits: logits.chunks(CLASSES).collect(),
    })?;
    if let Err(error) = output_file::write(path, &text) {
        warn(&cannot_write(FLAG, path, &error));
    }
    Ok(())
}

/// Checks whether there can be such a file, so that this is not found out when all is over.
pub(super) fn check(path: &Path) -> Result<(), String> {
    output_file::check(path).map_err(|error| cannot_write(FLAG, path, &error))
}
