//! Finding and reading checkpoints.

use std::path::{Path, PathBuf};

use super::files;
use super::folder::{NamedCheckpoint, list};
use super::{Manifest, damaged};
use crate::{Error, Layout, Result};

/// How often a search is repeated if the folder changes during it.
const MAX_ATTEMPTS: usize = 10;

/// A checkpoint on the disk.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
}

impl Checkpoint {
    /// Opens the checkpoint in folder `path` and reads its manifest, nothing else yet.
    ///
    /// # Errors
    /// [`Error::Damaged`] if the manifest is missing or damaged; [`Error::Checkpoint`] if it cannot be read or
    /// has a format that this version does not know.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let manifest = files::read_manifest(&path)?;
        Ok(Checkpoint { path, manifest })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Reads all files and compares their sizes and checksums with the manifest.
    ///
    /// # Errors
    /// [`Error::Damaged`] with the first file that differs or is missing; [`Error::Checkpoint`] if one cannot be read.
    pub fn verify(&self) -> Result<()> {
        self.manifest.files.iter().try_for_each(|(name, entry)| files::verify(&self.path, name, entry))
    }

    /// The values of arena `name`, which must hold exactly the tensors of `layout`, as f32 in the layout's order.
    ///
    /// # Errors
    /// [`Error::Damaged`] if the file is missing or damaged; [`Error::Checkpoint`] if there is no such arena, or if a
    /// tensor is missing or has another shape or type. The error names the file and the tensor.
    pub fn load(&self, name: &str, layout: &Layout) -> Result<Vec<f32>> {
        let file = format!("{name}.safetensors");
        match self.manifest.files.get(&file) {
            Some(entry) => files::load(&self.path, &file, entry, layout),
            None => Err(super::failed(&self.path.join(&file), "the manifest does not list this file")),
        }
    }
}

/// The result of [`find`].
#[derive(Debug, Clone)]
pub struct Found {
    /// The newest checkpoint that is intact.
    pub checkpoint: Checkpoint,
    /// Newer checkpoints that are damaged, newest first, each with its error.
    pub damaged: Vec<(PathBuf, Error)>,
}

/// Finds the newest checkpoint in `folder` whose files are all intact. `None` if there is no checkpoint, or no
/// folder.
///
/// The caller decides whether an older checkpoint in place of a damaged one is acceptable. A writer may run at the
/// same time: checkpoints that it removes do not count as damaged.
///
/// # Errors
/// [`Error::Damaged`] if there are checkpoints and all are damaged; [`Error::Checkpoint`] if one cannot be read for
/// another reason, such as an unknown format: silently using an older one would be a surprise.
pub fn find(folder: &Path) -> Result<Option<Found>> {
    let Survey { intact, damaged: bad } = survey(folder)?;
    match (intact, bad.first()) {
        (Some(checkpoint), _) => Ok(Some(Found { checkpoint, damaged: bad })),
        (None, None) => Ok(None),
        (None, Some(_)) => Err(all_damaged(folder, &bad)),
    }
}

/// What is in a folder.
#[derive(Debug, Default)]
pub(super) struct Survey {
    /// The newest checkpoint that is intact.
    pub(super) intact: Option<Checkpoint>,
    /// Newer checkpoints that are damaged, newest first, each with its error.
    pub(super) damaged: Vec<(PathBuf, Error)>,
}

/// As [`find`], where it is no error that all checkpoints are damaged.
pub(super) fn survey(folder: &Path) -> Result<Survey> {
    for _ in 0..MAX_ATTEMPTS {
        let listed = list(folder)?;
        let found = newest_intact(listed.clone());
        let is_damaged = found.as_ref().is_ok_and(|found| !found.damaged.is_empty());
        if !is_damaged || list(folder)? == listed {
            return found;
        }
    }
    Err(super::failed(folder, "checkpoints are added and removed faster than they can be read"))
}

/// Finds the newest intact checkpoint in `listed`.
fn newest_intact(listed: Vec<NamedCheckpoint>) -> Result<Survey> {
    let mut survey = Survey::default();
    for named in listed.into_iter().rev() {
        let whole = Checkpoint::open(&named.path).and_then(|checkpoint| {
            checkpoint.verify()?;
            Ok(checkpoint)
        });
        match whole {
            Ok(checkpoint) => return Ok(Survey { intact: Some(checkpoint), ..survey }),
            Err(error @ Error::Damaged { .. }) => survey.damaged.push((named.path, error)),
            Err(error) => return Err(error),
        }
    }
    Ok(survey)
}

/// The error of a folder with these checkpoints and no others.
pub(super) fn all_damaged(folder: &Path, checkpoints: &[(PathBuf, Error)]) -> Error {
    let newest = checkpoints.first().map_or(String::new(), |(_, error)| error.to_string());
    damaged(folder, format!("no intact checkpoint among {}; the newest: {newest}", checkpoints.len()))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs::{self, File};

    use serde_json::json;

    use super::*;
    use crate::checkpoint::manifest::{FileEntry, hexadecimal};
    use crate::checkpoint::{Position, Snapshot, Writer};

    fn layout() -> Layout {
        let mut layout = Layout::new();
        layout.push("0.weight", [2, 3]);
        layout.push_aligned("0.bias", [2], 16);
        layout
    }

    const POSITION: Position = Position { seed: 3, epoch: 1, step: 2 };

    /// Checkpoints of steps 10 and 20.
    fn save_two(folder: &Path) {
        let mut writer = Writer::new(folder, 2).unwrap();
        for step in [10, 20] {
            let values: Vec<f32> = (0..18).map(|i| i as f32 + step as f32).collect();
            let mut snapshot = Snapshot::new(step).with_position(POSITION).with_state(json!({"lr": 0.1}));
            snapshot.add("weights", &layout(), &values[..]);
            snapshot.add_deferred("momentum", &layout(), move || values);
            writer.save(snapshot).unwrap();
        }
        writer.finish().unwrap();
    }

    #[test]
    fn checkpoints_round_trip() {
        let folder = tempfile::tempdir().unwrap();
        assert!(find(&folder.path().join("none")).unwrap().is_none());
        save_two(folder.path());
        let Found { checkpoint, damaged } = find(folder.path()).unwrap().unwrap();
        assert!(checkpoint.path().ends_with("step-00000020") && damaged.is_empty());
        let manifest = checkpoint.manifest();
        assert_eq!(
            (manifest.step, manifest.position, &manifest.state),
            (20, Some(POSITION), &json!({"lr": 0.1}))
        );
        assert_eq!(manifest.version, env!("CARGO_PKG_VERSION"));
        for name in ["weights", "momentum"] {
            let values = checkpoint.load(name, &layout()).unwrap();
            // Padding between tensors is not saved.
            assert_eq!((values[5], values[6], values[16], values[17]), (25.0, 0.0, 36.0, 37.0));
        }
        let error = checkpoint.load("average", &layout()).unwrap_err().to_string();
        assert!(error.ends_with("average.safetensors: the manifest does not list this file"), "{error}");
    }

    #[test]
    fn all_valid_tensor_names_are_loaded_by_us_and_by_the_safetensors_crate() {
        let folder = tempfile::tempdir().unwrap();
        let long = "é".repeat(512);
        let names = ["\0", "a/../b", "__metadata", "dtype", "\"\n", "\u{ffff}", &long];
        let mut layout = Layout::new();
        names.iter().for_each(|name| _ = layout.push(*name, [1]));
        let values: Vec<f32> = (0..names.len()).map(|value| value as f32).collect();
        let mut snapshot = Snapshot::new(1);
        snapshot.add("weights", &layout, &values[..]);
        let mut writer = Writer::new(folder.path(), 1).unwrap();
        writer.save(snapshot).unwrap();
        let path = writer.finish().unwrap().unwrap();
        assert_eq!(Checkpoint::open(&path).unwrap().load("weights", &layout).unwrap(), values);
        let bytes = fs::read(path.join("weights.safetensors")).unwrap();
        let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        for (name, value) in names.iter().zip(values) {
            assert_eq!(read.tensor(name).unwrap().data(), value.to_le_bytes());
        }
    }

    #[test]
    fn errors_name_the_tensor_of_a_different_model() {
        let folder = tempfile::tempdir().unwrap();
        save_two(folder.path());
        let checkpoint = find(folder.path()).unwrap().unwrap().checkpoint;
        let mut other = layout();
        other.push("extra", [1]);
        let error = checkpoint.load("weights", &other).unwrap_err().to_string();
        assert!(error.ends_with("weights.safetensors: 2 tensors where the model has 3"), "{error}");
        let mut other = Layout::new();
        other.push("0.weight", [3, 2]);
        other.push("0.bias", [2]);
        let error = checkpoint.load("weights", &other).unwrap_err().to_string();
        assert!(error.contains("`0.weight` is F32 of shape [2, 3] where the model has F32 of shape [3, 2]"));
    }

    #[test]
    fn damage_of_any_byte_is_detected_and_skipped() {
        let folder = tempfile::tempdir().unwrap();
        save_two(folder.path());
        let newest = folder.path().join("step-00000020");
        for name in ["weights.safetensors", "momentum.safetensors", "manifest.json"] {
            let file = newest.join(name);
            let good = fs::read(&file).unwrap();
            let cut = [good[..good.len() - 1].to_vec(), Vec::new(), [&good[..], b" "].concat()];
            let flipped = (0..good.len()).map(|at| {
                let mut bad = good.clone();
                bad[at] ^= 0x10;
                bad
            });
            for bad in flipped.chain(cut) {
                fs::write(&file, &bad).unwrap();
                match find(folder.path()) {
                    Ok(found) => {
                        let Found { checkpoint, damaged } = found.unwrap();
                        assert!(checkpoint.path().ends_with("step-00000010"));
                        assert_eq!(damaged[0].0, newest);
                        assert!(damaged[0].1.to_string().contains(name), "{}", damaged[0].1);
                    }
                    // The flipped bit changed the format to another digit.
                    Err(error) => assert!(error.to_string().contains("manifest.json: format"), "{error}"),
                }
            }
            fs::remove_file(&file).unwrap();
            let damaged = find(folder.path()).unwrap().unwrap().damaged;
            assert!(damaged[0].1.to_string().ends_with(&format!("{name}: damaged: there is no such file")));
            fs::write(&file, good).unwrap();
            assert!(find(folder.path()).unwrap().unwrap().damaged.is_empty());
        }
    }

    #[test]
    fn only_damaged_checkpoints_are_an_error() {
        let folder = tempfile::tempdir().unwrap();
        save_two(folder.path());
        for step in [10, 20] {
            fs::remove_file(folder.path().join(format!("step-{step:08}/weights.safetensors"))).unwrap();
        }
        let error = find(folder.path()).unwrap_err().to_string();
        assert!(error.contains("no intact checkpoint among 2; the newest: checkpoint"), "{error}");
        assert!(
            error.contains("step-00000020/weights.safetensors: damaged: there is no such file"),
            "{error}"
        );
    }

    /// Writes a manifest at `path` that lists the weights with this size and checksum.
    fn list(path: &Path, bytes: u64, xxh3: u64) {
        let entry = FileEntry { bytes, xxh3: hexadecimal(xxh3) };
        let files = BTreeMap::from([("weights.safetensors".to_owned(), entry)]);
        let manifest = Manifest::new(20, None, json!(null), None, files);
        fs::write(path.join("manifest.json"), manifest.to_json()).unwrap();
    }

    /// Loads `bytes` as the weights of a checkpoint that has their size and checksum.
    fn load_forged(bytes: &[u8]) -> Result<Vec<f32>> {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("weights.safetensors"), bytes).unwrap();
        list(folder.path(), bytes.len() as u64, xxhash_rust::xxh3::xxh3_64(bytes));
        Checkpoint::open(folder.path())?.load("weights", &layout())
    }

    #[test]
    fn forged_headers_are_rejected() {
        let file = |header: &str, data: usize| {
            [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; data]].concat()
        };
        let tensors = |weight: (u64, u64), bias: (u64, u64)| {
            let tensor = |shape: &[u64], (begin, end)| json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, end]});
            json!({"0.weight": tensor(&[2, 3], weight), "0.bias": tensor(&[2], bias)}).to_string()
        };
        assert_eq!(load_forged(&file(&tensors((0, 24), (24, 32)), 32)).unwrap(), vec![0.0; 18]);
        let lie = "is not within bytes";
        for (bytes, problem) in [
            (file(&tensors((0, 24), (24, 32)), 31), lie),
            (file(&tensors((24, 0), (24, 32)), 32), lie),
            (file(&tensors((0, 25), (24, 32)), 32), lie),
            (file(&tensors((0, 24), (u64::MAX - 8, u64::MAX)), 32), lie),
            (file(&tensors((0, 24), (24, 32)).replace("0.bias", "bias"), 32), "no tensor `0.bias`"),
            (file(&tensors((0, 24), (24, 32)).replacen("F32", "I32", 1), 32), "is I32 of shape [2]"),
            (file("{}", 0), "0 tensors where the model has 2"),
            (file("[", 0), "not a safetensors header"),
            (file(&" ".repeat((16 << 20) + 1), 0), "a header of 16777217 bytes"),
            (u64::MAX.to_le_bytes().to_vec(), "it ends within its header"),
            (b"short".to_vec(), "it ends within its header"),
        ] {
            let error = load_forged(&bytes).unwrap_err().to_string();
            assert!(error.contains("weights.safetensors: ") && error.contains(problem), "{problem}: {error}");
        }
    }

    #[test]
    fn oversized_and_irregular_files_are_rejected_unread() {
        let folder = tempfile::tempdir().unwrap();
        save_two(folder.path());
        let path = folder.path().join("step-00000020");
        // Sparse files use no disk space; a terabyte of zeros would not fit into memory.
        let lengthen = |name: &str| File::options().write(true).open(path.join(name))?.set_len(1 << 40);
        for name in ["weights.safetensors", "manifest.json"] {
            lengthen(name).unwrap();
            let damaged = find(folder.path()).unwrap().unwrap().damaged;
            assert!(damaged[0].1.to_string().contains(&format!("{name}: damaged: 1099511627776 bytes")));
        }
        // A manifest with that size does not help: the model's size is checked, too.
        list(&path, 1 << 40, 0);
        let error = Checkpoint::open(&path).unwrap().load("weights", &layout()).unwrap_err().to_string();
        let expected = "weights.safetensors: 1099511627776 bytes, where the model's tensors have 32";
        assert!(error.ends_with(expected), "{error}");
        // Nobody writes into this pipe: opening it would block forever.
        fs::remove_file(path.join("manifest.json")).unwrap();
        nix::unistd::mkfifo(&path.join("manifest.json"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let error = Checkpoint::open(&path).unwrap_err().to_string();
        assert!(error.ends_with("manifest.json: damaged: not a file"), "{error}");
    }

    #[test]
    fn oversized_manifests_are_not_written() {
        let folder = tempfile::tempdir().unwrap();
        save_two(folder.path());
        let mut writer = Writer::new(folder.path(), 2).unwrap();
        writer.save(Snapshot::new(30).with_state("x".repeat(2 << 20).into())).unwrap();
        let error = writer.finish().unwrap_err().to_string();
        assert!(error.contains("manifest.json: ") && error.ends_with("its state is too large"), "{error}");
        assert_eq!(find(folder.path()).unwrap().unwrap().checkpoint.manifest().step, 20);
    }
}
