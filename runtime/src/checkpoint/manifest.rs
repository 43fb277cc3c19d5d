//! The manifest of a checkpoint.
//!
//! It begins with a checksum of everything after it, because a flipped bit in a step or a learning rate would
//! otherwise go unnoticed. The checksum covers bytes and not values, because serialising the JSON again may give
//! other bytes.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use super::{damaged, failed};
use crate::Result;
use crate::optimizer::LossScale;

/// The version of this crate.
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Version of the format. Format 1 was never released.
const FORMAT: u64 = 2;
/// Name of the file.
pub(super) const MANIFEST: &str = "manifest.json";
/// Bytes before and after the checksum at the beginning of the file.
pub(super) const BEFORE: &[u8] = b"{\n  \"checksum\": \"";
const AFTER: &[u8] = b"\",";

/// Position of a run in its data: the batch of the next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// Seed of the shuffling and of all other random numbers.
    pub seed: u64,
    /// Complete passes over the data: the epoch of [`Sampler::batch`](crate::Sampler::batch).
    pub epoch: u64,
    /// Steps made in this epoch.
    pub step: u64,
}

/// The manifest of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Manifest {
    /// Version of this format.
    format: u64,
    /// Training steps made.
    pub step: u64,
    /// The position in the data, if the program saved it.
    pub position: Option<Position>,
    /// Any other state of the program, such as hyper-parameters, number of ranks, precision.
    pub state: Value,
    /// The loss scale, if gradients are scaled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    loss_scale: Option<SavedLossScale>,
    /// Version of this crate that wrote it.
    pub version: String,
    /// Size and checksum of each file.
    pub(super) files: BTreeMap<String, FileEntry>,
}

/// A [`LossScale`]. The scale is an f64, whose text is exact.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct SavedLossScale {
    scale: f64,
    good_steps: u32,
    skipped: u64,
}

/// Size and checksum of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FileEntry {
    /// Its size.
    pub(super) bytes: u64,
    /// XXH3 (64 bits) of its bytes, in hexadecimal.
    pub(super) xxh3: String,
}

impl Manifest {
    pub(super) fn new(
        step: u64,
        position: Option<Position>,
        state: Value,
        loss_scale: Option<LossScale>,
        files: BTreeMap<String, FileEntry>,
    ) -> Self {
        let loss_scale = loss_scale.map(|LossScale { scale, good_steps, skipped }| SavedLossScale {
            scale: scale.into(),
            good_steps,
            skipped,
        });
        Manifest { format: FORMAT, step, position, state, loss_scale, version: VERSION.to_owned(), files }
    }

    /// The loss scale of the next step, and what it depends on, if gradients were scaled; for
    /// [`DataParallel::restore_loss_scale`](crate::DataParallel::restore_loss_scale).
    pub fn loss_scale(&self) -> Option<LossScale> {
        self.loss_scale.map(|SavedLossScale { scale, good_steps, skipped }| LossScale {
            scale: scale as f32,
            good_steps,
            skipped,
        })
    }

    /// The text of the file.
    pub(super) fn to_json(&self) -> Vec<u8> {
        let text = serde_json::to_vec_pretty(self).expect("a manifest holds nothing that JSON cannot");
        // Without the opening brace.
        let rest = &text[1..];
        [BEFORE, hexadecimal(xxh3_64(rest)).as_bytes(), AFTER, rest].concat()
    }

    /// Reads the text of the file at `path`.
    pub(super) fn parse(path: &Path, text: &[u8]) -> Result<Self> {
        let not = |problem: &dyn std::fmt::Display| damaged(path, format!("not a manifest: {problem}"));
        let value: Value = serde_json::from_slice(text).map_err(|error| not(&error))?;
        match value.get("format").map(Value::as_u64) {
            Some(Some(FORMAT)) if has_checksum(text) => {}
            Some(Some(FORMAT)) => return Err(damaged(path, "its content does not match its checksum")),
            Some(Some(other)) => {
                let text =
                    format!("format {other} is not supported: version {VERSION} reads format {FORMAT}");
                return Err(failed(path, text));
            }
            _ => return Err(not(&"it has no format")),
        }
        serde_json::from_value(value).map_err(|error| not(&error))
    }
}

/// Whether the text begins with the checksum of the rest.
fn has_checksum(text: &[u8]) -> bool {
    let Some((expected, text)) = text.strip_prefix(BEFORE).and_then(|text| text.split_at_checked(16)) else {
        return false;
    };
    text.strip_prefix(AFTER).is_some_and(|rest| hexadecimal(xxh3_64(rest)).as_bytes() == expected)
}

/// How checksums are written.
pub(super) fn hexadecimal(checksum: u64) -> String {
    format!("{checksum:016x}")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::Error;

    fn parse(text: &[u8]) -> Result<Manifest> {
        Manifest::parse(Path::new("m"), text)
    }

    fn manifest() -> Manifest {
        let entry = FileEntry { bytes: 120, xxh3: hexadecimal(7) };
        let position = Position { seed: u64::MAX, epoch: 3, step: 14 };
        let state = json!({"lr": 0.1, "nets": ["a"], "third": 1.0 / 3.0});
        let loss_scale = LossScale { scale: 0.1, good_steps: 1999, skipped: u64::MAX };
        let files = BTreeMap::from([("weights.safetensors".to_owned(), entry)]);
        Manifest::new(45, Some(position), state, Some(loss_scale), files)
    }

    #[test]
    fn manifests_round_trip() {
        let parsed = parse(&manifest().to_json()).unwrap();
        assert_eq!(parsed, manifest());
        let expected = LossScale { scale: 0.1, good_steps: 1999, skipped: u64::MAX };
        assert_eq!(parsed.loss_scale(), Some(expected));
        let without = Manifest { loss_scale: None, ..manifest() };
        let text = without.to_json();
        assert!(!String::from_utf8_lossy(&text).contains("loss_scale"));
        assert_eq!(parse(&text).unwrap().loss_scale(), None);
    }

    #[test]
    fn any_flipped_bit_is_detected() {
        let text = manifest().to_json();
        for (at, bit) in (0..text.len()).flat_map(|at| (0..8).map(move |bit| (at, bit))) {
            let mut changed = text.clone();
            changed[at] ^= 1 << bit;
            assert!(parse(&changed).is_err(), "bit {bit} of byte {at}");
        }
        for length in 0..text.len() {
            assert!(matches!(parse(&text[..length]), Err(Error::Damaged { .. })), "{length} bytes");
        }
    }

    #[test]
    fn unknown_formats_are_rejected() {
        for format in [1, 3] {
            let text = format!(r#"{{"format": {format}, "step": 9, "state": null, "files": {{}}}}"#);
            let error = parse(text.as_bytes()).unwrap_err().to_string();
            let expected =
                format!("checkpoint m: format {format} is not supported: version {VERSION} reads format 2");
            assert_eq!(error, expected);
        }
        for text in ["{}", "[]", "7", r#"{"format": "1"}"#] {
            let error = parse(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains("not a manifest"), "{text}: {error}");
        }
    }
}
