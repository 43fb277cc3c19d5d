//! Checkpoints: what a run needs to go on as if it had never stopped.
//!
//! A checkpoint is a folder `step-00001234` with one safetensors file for each arena (weights, optimizer state,
//! …) and `manifest.json`. It is written under a temporary name, every file and the folder are flushed to the
//! disk, and only then it gets its name: whatever is there under a final name is whole, and a kill at any instant
//! leaves the one before untouched.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, TensorView};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use crate::{Error, Layout, Result};

const FORMAT: u32 = 1;
const MANIFEST: &str = "manifest.json";

/// What a checkpoint says about itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of this format.
    format: u32,
    /// Training steps made.
    pub step: u64,
    /// Whatever else the program needs to go on: hyper-parameters, seed, position in the data.
    pub state: Value,
    /// XXH3 of each file, in hexadecimal.
    files: BTreeMap<String, String>,
}

/// One flat arena with its layout.
#[derive(Debug, Clone, Copy)]
pub struct Arena<'a> {
    /// Name of the file, without extension: `weights`.
    pub name: &'a str,
    /// The tensors.
    pub layout: &'a Layout,
    /// Their values.
    pub values: &'a [f32],
}

fn failed(path: &Path) -> impl Fn(&dyn std::fmt::Display) -> Error + '_ {
    |problem| Error::Checkpoint { path: path.to_owned(), problem: problem.to_string() }
}

/// Writes a checkpoint into `folder` and removes all but the newest `keep`. Returns the new one's path.
///
/// Called by one rank. A checkpoint of the same step is replaced.
///
/// # Errors
/// If something cannot be written; earlier checkpoints are untouched then.
pub fn save(folder: &Path, step: u64, state: Value, arenas: &[Arena<'_>], keep: usize) -> Result<PathBuf> {
    let target = folder.join(format!("step-{step:08}"));
    let temporary = folder.join(format!(".step-{step:08}.partial"));
    fs::create_dir_all(folder).map_err(|error| failed(folder)(&error))?;
    if temporary.exists() {
        fs::remove_dir_all(&temporary).map_err(|error| failed(&temporary)(&error))?;
    }
    fs::create_dir(&temporary).map_err(|error| failed(&temporary)(&error))?;
    let mut files = BTreeMap::new();
    for arena in arenas {
        let name = format!("{}.safetensors", arena.name);
        let path = temporary.join(&name);
        let bytes = serialize(arena).map_err(|problem| failed(&path)(&problem))?;
        write_durably(&path, &bytes)?;
        files.insert(name, format!("{:016x}", xxh3_64(&bytes)));
    }
    let manifest = Manifest { format: FORMAT, step, state, files };
    let text = serde_json::to_vec_pretty(&manifest).expect("a manifest holds nothing that JSON cannot");
    write_durably(&temporary.join(MANIFEST), &text)?;
    flush_folder(&temporary)?;
    if target.exists() {
        // Left by a run that went further before and was resumed from an older checkpoint.
        fs::remove_dir_all(&target).map_err(|error| failed(&target)(&error))?;
    }
    fs::rename(&temporary, &target).map_err(|error| failed(&target)(&error))?;
    flush_folder(folder)?;
    let mut all = list(folder)?;
    all.truncate(all.len().saturating_sub(keep.max(1)));
    for (_, old) in all {
        fs::remove_dir_all(&old).map_err(|error| failed(&old)(&error))?;
    }
    Ok(target)
}

fn serialize(arena: &Arena<'_>) -> Result<Vec<u8>, String> {
    let mut views = Vec::new();
    for tensor in arena.layout.tensors() {
        let bytes = bytemuck::cast_slice(&arena.values[tensor.range()]);
        let view =
            TensorView::new(Dtype::F32, tensor.shape.clone(), bytes).map_err(|error| error.to_string())?;
        views.push((tensor.name.as_str(), view));
    }
    safetensors::serialize(views, None).map_err(|error| error.to_string())
}

fn write_durably(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || -> std::io::Result<()> {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(|error| failed(path)(&error))
}

fn flush_folder(path: &Path) -> Result<()> {
    File::open(path).and_then(|folder| folder.sync_all()).map_err(|error| failed(path)(&error))
}

/// The checkpoints in `folder`, oldest first.
fn list(folder: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(|error| failed(folder)(&error))?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(|error| failed(folder)(&error))?.path();
        let name =
            path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix("step-"));
        if let Some(step) = name.and_then(|digits| digits.parse().ok()) {
            found.push((step, path));
        }
    }
    found.sort();
    Ok(found)
}

/// The newest checkpoint in `folder`, `None` if there is none.
///
/// # Errors
/// If the folder cannot be read.
pub fn latest(folder: &Path) -> Result<Option<PathBuf>> {
    Ok(list(folder)?.pop().map(|(_, path)| path))
}

/// Reads the manifest of the checkpoint at `path`.
///
/// # Errors
/// If there is none or it is of another format.
pub fn manifest(path: &Path) -> Result<Manifest> {
    let path = path.join(MANIFEST);
    let bytes = fs::read(&path).map_err(|error| failed(&path)(&error))?;
    let manifest: Manifest =
        serde_json::from_slice(&bytes).map_err(|error| failed(&path)(&format!("not a manifest: {error}")))?;
    if manifest.format != FORMAT {
        return Err(failed(&path)(&format!("format {} where this version reads {FORMAT}", manifest.format)));
    }
    Ok(manifest)
}

/// Reads arena `name` of the checkpoint at `path`, which must hold exactly the tensors of `layout`.
///
/// # Errors
/// If the file is missing or damaged (its checksum differs from the manifest's), or a tensor is missing, has
/// another shape or type. Names the file and the tensor.
pub fn load(path: &Path, manifest: &Manifest, name: &str, layout: &Layout) -> Result<Vec<f32>> {
    let file = format!("{name}.safetensors");
    let path = path.join(&file);
    let wrong = failed(&path);
    let bytes = fs::read(&path).map_err(|error| wrong(&error))?;
    let expected = manifest.files.get(&file).ok_or_else(|| wrong(&"the manifest does not list this file"))?;
    let found = format!("{:016x}", xxh3_64(&bytes));
    if *expected != found {
        return Err(wrong(&format!("damaged: checksum {found} instead of {expected}")));
    }
    let tensors = safetensors::SafeTensors::deserialize(&bytes).map_err(|error| wrong(&error))?;
    if tensors.len() != layout.tensors().len() {
        let counts = format!("{} tensors where the model has {}", tensors.len(), layout.tensors().len());
        return Err(wrong(&counts));
    }
    let mut values = vec![0.0; layout.len()];
    for tensor in layout.tensors() {
        let view = tensors.tensor(&tensor.name).map_err(|error| wrong(&error))?;
        if view.dtype() != Dtype::F32 || view.shape() != tensor.shape {
            return Err(wrong(&format!(
                "tensor `{}` is {:?} of shape {:?} where the model has F32 of shape {:?}",
                tensor.name,
                view.dtype(),
                view.shape(),
                tensor.shape
            )));
        }
        bytemuck::cast_slice_mut::<f32, u8>(&mut values[tensor.range()]).copy_from_slice(view.data());
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn layout() -> Layout {
        let mut layout = Layout::new();
        layout.push("0.weight", [2, 3]);
        layout.push("0.bias", [2]);
        layout
    }

    fn save_step(folder: &Path, step: u64) -> PathBuf {
        let values: Vec<f32> = (0..8).map(|i| i as f32 + step as f32).collect();
        let arena = Arena { name: "weights", layout: &layout(), values: &values };
        save(folder, step, json!({"epoch": 2}), &[arena], 2).unwrap()
    }

    #[test]
    fn what_was_saved_is_loaded_and_old_ones_go() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(latest(&folder.path().join("none")).unwrap(), None);
        for step in [5, 20, 100] {
            save_step(folder.path(), step);
        }
        let path = latest(folder.path()).unwrap().unwrap();
        assert!(path.ends_with("step-00000100"));
        let manifest = manifest(&path).unwrap();
        assert_eq!((manifest.step, &manifest.state), (100, &json!({"epoch": 2})));
        assert_eq!(load(&path, &manifest, "weights", &layout()).unwrap()[7], 107.0);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn damage_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = save_step(folder.path(), 1);
        let manifest = manifest(&path).unwrap();
        let mut other = layout();
        other.push("extra", [1]);
        let error = load(&path, &manifest, "weights", &other).unwrap_err().to_string();
        assert!(error.ends_with("weights.safetensors: 2 tensors where the model has 3"), "{error}");
        let mut other = Layout::new();
        other.push("0.weight", [3, 2]);
        other.push("0.bias", [2]);
        let error = load(&path, &manifest, "weights", &other).unwrap_err().to_string();
        assert!(error.contains("`0.weight` is F32 of shape [2, 3] where the model has F32 of shape [3, 2]"));
        let file = path.join("weights.safetensors");
        let mut bytes = fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&file, &bytes).unwrap();
        let error = load(&path, &manifest, "weights", &layout()).unwrap_err().to_string();
        assert!(error.contains("damaged: checksum"), "{error}");
        fs::write(path.join(MANIFEST), b"{}").unwrap();
        assert!(super::manifest(&path).unwrap_err().to_string().contains("not a manifest"));
    }
}
