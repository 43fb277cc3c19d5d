//! `--predict`: the classes of the images of an IDX file, written to `--output`.
//!
//! Every rank classifies its part of the images, and rank 0 writes one file: JSON lines, or an IDX file of labels. A
//! regular file is replaced atomically. The predictions are what the run was started for, so unlike a by-product
//! file, an output that cannot be written is an error.

use std::error::Error;
use std::ops::Range;
use std::path::Path;

use mgpu::replicate::verify_settings;
use mgpu::{Communicator, World, evaluation_shard, output_file};
use serde::Serialize;

use super::args::Args;
use super::byproducts::cannot_write;
use super::engine::Engine;
use super::source::keep_images;
use crate::data::{CLASSES, Dataset, Samples, idx};

const FLAG: &str = "--output";

/// Images of each rank between two exchanges of logits: few enough that no rank waits for another one for long.
const ROUND: usize = 4096;

/// The first bytes of an IDX file of labels: unsigned bytes in one dimension.
const LABELS: [u8; 4] = [0, 0, 8, 1];

/// A line of JSON.
#[derive(Debug, Serialize)]
struct Prediction {
    /// Index of the image in its file, from 0.
    index: usize,
    /// The class with the largest logit, the first one of equals.
    class: usize,
    /// Softmax of the logits.
    probabilities: Vec<f32>,
}

impl Prediction {
    fn new(index: usize, logits: &[f32]) -> Self {
        let class =
            (0..logits.len()).fold(0, |best, class| if logits[class] > logits[best] { class } else { best });
        let largest = f64::from(logits[class]);
        let exponentials: Vec<f64> = logits.iter().map(|logit| (f64::from(*logit) - largest).exp()).collect();
        let sum: f64 = exponentials.iter().sum();
        let probabilities = exponentials.iter().map(|exponential| (exponential / sum) as f32).collect();
        Prediction { index, class, probabilities }
    }
}

/// Checks that `output` can be written, so that the error comes first, and is not the file of `images`.
pub(super) fn check(images: &Path, output: &Path) -> Result<(), String> {
    if output.extension().is_some_and(|suffix| suffix == "gz") {
        let path = output.display();
        return Err(format!("{FLAG} {path}: predictions are not compressed; choose a name without .gz"));
    }
    if let (Ok(images), Ok(output)) = (images.canonicalize(), output.canonicalize())
        && images == output
    {
        let path = output.display();
        return Err(format!("{FLAG} {path} is the file of --predict, which it would replace"));
    }
    output_file::check(output).map_err(|error| cannot_write(FLAG, output, &error))
}

/// The images of the IDX file `path`, the same on all ranks, without their labels. Collective.
pub(super) fn read(
    path: &Path,
    args: &Args,
    world: &World,
    comm: &mut Communicator,
) -> Result<Samples, Box<dyn Error>> {
    let images = idx::open_unlabelled(path, keep_images(args, world));
    let images = images.map_err(|error| format!("--predict: {error}"))?;
    let found = format!("{} images with checksum {:016x}", images.len(), images.checksum()?);
    verify_settings(comm, &[("in --predict", found)])?;
    Ok(images)
}

/// Classifies the images of `data` and writes the predictions to `output`. Collective.
pub(super) fn write(data: &Samples, output: &Path, engine: &mut dyn Engine) -> Result<(), Box<dyn Error>> {
    let (_, replicas) = engine.replica();
    let round = ROUND * replicas as usize;
    let mut logits = Vec::with_capacity(data.len() * CLASSES);
    for begin in (0..data.len()).step_by(round) {
        logits.extend(logits_of(data, begin..data.len().min(begin + round), engine)?);
    }
    if engine.comm().rank() == 0 {
        let lines = logits.chunks(CLASSES).enumerate().map(|(index, logits)| Prediction::new(index, logits));
        let name = output.file_name().unwrap_or_default().to_string_lossy();
        let content = if name.ends_with(".idx") || name.ends_with("-ubyte") {
            idx_labels(lines)
        } else {
            json_lines(lines)?
        };
        output_file::write(output, &content).map_err(|error| cannot_write(FLAG, output, &error))?;
    }
    Ok(())
}

/// The logits of the images `part` of `data`; each replica of the network computes its share. Collective.
fn logits_of(data: &Samples, part: Range<usize>, engine: &mut dyn Engine) -> mgpu::Result<Vec<f32>> {
    let ((replica, replicas), count) = (engine.replica(), part.len());
    let shard = |replica| evaluation_shard(count, replica, replicas);
    let (mut own, samples) = (Dataset::default(), shard(replica)?);
    let samples: Vec<u32> = samples.map(|sample| (part.start + sample) as u32).collect();
    data.read(&samples, &mut own)?;
    let mut logits = if own.is_empty() { Vec::new() } else { engine.logits(&own)? };
    // Equal lengths for the all-gather.
    let share = count.div_ceil(replicas as usize) * CLASSES;
    logits.resize(share, 0.0);
    let all = engine.comm().all_gather_slice(&logits)?;
    let mut whole = Vec::with_capacity(count * CLASSES);
    // All ranks of a replica, which follow each other, have the same logits.
    let ranks = (engine.comm().size() / replicas) as usize;
    for replica in 0..replicas {
        let begin = replica as usize * ranks * share;
        whole.extend_from_slice(&all[begin..begin + shard(replica)?.len() * CLASSES]);
    }
    Ok(whole)
}

fn json_lines(predictions: impl Iterator<Item = Prediction>) -> serde_json::Result<Vec<u8>> {
    let mut text = Vec::new();
    for prediction in predictions {
        serde_json::to_writer(&mut text, &prediction)?;
        text.push(b'\n');
    }
    Ok(text)
}

fn idx_labels(predictions: impl Iterator<Item = Prediction>) -> Vec<u8> {
    let classes: Vec<u8> = predictions.map(|prediction| prediction.class as u8).collect();
    [&LABELS[..], &(classes.len() as u32).to_be_bytes(), &classes].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_are_the_softmax_of_any_finite_logits() {
        let Prediction { index, class, probabilities } = Prediction::new(3, &[0.0, 1000.0, -3e38, 1000.0]);
        assert_eq!((index, class, probabilities), (3, 1, vec![0.0, 0.5, 0.0, 0.5]));
        let probabilities = Prediction::new(0, &[0.5f32.ln(), 0.25f32.ln(), 0.25f32.ln()]).probabilities;
        assert!(
            probabilities
                .iter()
                .zip([0.5, 0.25, 0.25])
                .all(|(found, expected)| (found - expected).abs() < 1e-6)
        );
    }

    #[test]
    fn predictions_are_written_as_lines_or_as_labels() {
        let predictions = || [[0.0, 9.0], [9.0, 0.0]].iter().map(|logits| Prediction::new(7, logits));
        assert_eq!(idx_labels(predictions()), [0, 0, 8, 1, 0, 0, 0, 2, 1, 0]);
        let text = String::from_utf8(json_lines(predictions()).unwrap()).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 2);
        assert!(lines[0].starts_with(r#"{"index":7,"class":1,"probabilities":[0.0001"#), "{text}");
    }
}
