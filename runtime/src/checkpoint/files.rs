//! The files of a checkpoint: safetensors, written and read in one pass, with their size and checksum.
//!
//! A file is written tensor by tensor from where the values are, without a copy of it in memory: a JSON header with names,
//! shapes and offsets, its length before it, the tensors after it, in the layout's order.
//! (<https://github.com/huggingface/safetensors#format>)

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, ErrorKind, Read, Write};
use std::path::Path;

use safetensors::tensor::{Dtype, Metadata, SafeTensors, TensorInfo};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::manifest::{Entry, MANIFEST, Manifest, hexadecimal};
use super::snapshot::{Arena, Snapshot};
use super::{damaged, failed};
use crate::{Layout, Result};

/// Bytes that are gathered for one write, and read at a time.
const CHUNK: usize = 1 << 20;

/// Writes all files of `snapshot` into the empty folder `path`. All of them, and the folder, are on the disk when it returns.
pub(super) fn write(path: &Path, snapshot: Snapshot) -> Result<()> {
    let Snapshot { step, position, state, arenas } = snapshot;
    let mut files = BTreeMap::new();
    for arena in arenas {
        let name = format!("{}.safetensors", arena.name);
        let file = path.join(&name);
        if !is_file_name(&name) || files.contains_key(&name) {
            return Err(failed(&file, "an arena's name is a file's, and no other arena's"));
        }
        files.insert(name, write_arena(&file, arena)?);
    }
    let manifest = Manifest::new(step, position, state, files);
    let file = path.join(MANIFEST);
    create(&file, |output| output.write_all(&manifest.to_json())).map_err(|error| failed(&file, error))?;
    flush_folder(path)
}

fn write_arena(path: &Path, Arena { layout, values, .. }: Arena) -> Result<Entry> {
    let values = values.make();
    if values.len() < layout.len() {
        return Err(failed(path, format!("{} values for tensors of {}", values.len(), layout.len())));
    }
    let mut end = 0;
    let infos = layout.tensors().iter().map(|tensor| {
        let begin = end;
        end += tensor.len() * size_of::<f32>();
        let shape = tensor.shape.clone();
        (tensor.name.clone(), TensorInfo { dtype: Dtype::F32, shape, data_offsets: (begin, end) })
    });
    let header = Metadata::new(None, infos.collect()).map_err(|error| failed(path, error))?;
    let mut header = serde_json::to_vec(&header).map_err(|error| failed(path, error))?;
    // Tensors begin at a multiple of 8, the length included.
    header.resize(header.len().next_multiple_of(8), b' ');
    let (mut hash, mut bytes) = (Xxh3::new(), 0);
    let written = create(path, |output| {
        let mut put = |part: &[u8]| {
            hash.update(part);
            bytes += part.len() as u64;
            output.write_all(part)
        };
        put(&(header.len() as u64).to_le_bytes())?;
        put(&header)?;
        // In chunks, so that the checksum and the write find them in the cache.
        let tensors = layout.tensors().iter().flat_map(|tensor| values[tensor.range()].chunks(CHUNK / 4));
        tensors.into_iter().try_for_each(|part| put(bytemuck::cast_slice(part)))
    });
    written.map_err(|error| failed(path, error))?;
    Ok(Entry { bytes: Some(bytes), xxh3: hexadecimal(hash.digest()) })
}

/// A file whose content `fill` writes, on the disk when this returns.
fn create(path: &Path, fill: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> io::Result<()> {
    let mut output = BufWriter::with_capacity(CHUNK, File::create(path)?);
    fill(&mut output)?;
    output.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
}

/// Bytes of a manifest that are read; none has as many.
const LONGEST_MANIFEST: u64 = 16 << 20;

/// Brings the entries of a folder to the disk: which names there are, and what they stand for.
pub(super) fn flush_folder(path: &Path) -> Result<()> {
    File::open(path).and_then(|folder| folder.sync_all()).map_err(|error| failed(path, error))
}

/// Whether `name` stands for something in a folder, and not for something elsewhere.
fn is_file_name(name: &str) -> bool {
    Path::new(name).file_name().is_some_and(|last| last == name)
}

/// The manifest of the checkpoint at `path`.
pub(super) fn read_manifest(path: &Path) -> Result<Manifest> {
    let file = path.join(MANIFEST);
    let mut text = Vec::new();
    let read = File::open(&file).and_then(|file| file.take(LONGEST_MANIFEST).read_to_end(&mut text));
    read.map_err(|error| unreadable(&file, &error))?;
    let manifest = Manifest::parse(&file, &text)?;
    match manifest.files.keys().find(|name| !is_file_name(name)) {
        Some(name) => Err(damaged(&file, format!("{name:?} is not the name of a file"))),
        None => Ok(manifest),
    }
}

/// A file that is not there was there once: a checkpoint is whole when it gets its name.
fn unreadable(path: &Path, error: &io::Error) -> crate::Error {
    match error.kind() {
        ErrorKind::NotFound => damaged(path, "there is no such file"),
        _ => failed(path, error),
    }
}

/// Compares file `name` of the checkpoint at `path` with what the manifest knows of it.
pub(super) fn verify(path: &Path, name: &str, entry: &Entry) -> Result<()> {
    let path = path.join(name);
    let read = || -> io::Result<(u64, u64)> {
        let (mut file, mut chunk) = (File::open(&path)?, vec![0; CHUNK]);
        let (mut hash, mut bytes) = (Xxh3::new(), 0);
        loop {
            match file.read(&mut chunk) {
                Ok(0) => return Ok((bytes, hash.digest())),
                Ok(count) => {
                    hash.update(&chunk[..count]);
                    bytes += count as u64;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    };
    let (bytes, checksum) = read().map_err(|error| unreadable(&path, &error))?;
    compare(&path, entry, bytes, checksum)
}

fn compare(path: &Path, entry: &Entry, bytes: u64, checksum: u64) -> Result<()> {
    if let Some(expected) = entry.bytes.filter(|expected| *expected != bytes) {
        return Err(damaged(path, format!("{bytes} bytes instead of {expected}")));
    }
    let (found, expected) = (hexadecimal(checksum), &entry.xxh3);
    if found != *expected {
        return Err(damaged(path, format!("checksum {found} instead of {expected}")));
    }
    Ok(())
}

/// The values of the arena in file `name` of the checkpoint at `path`, which must hold exactly the tensors of `layout`.
pub(super) fn load(path: &Path, name: &str, entry: &Entry, layout: &Layout) -> Result<Vec<f32>> {
    let path = path.join(name);
    let found = fs::metadata(&path).map_err(|error| unreadable(&path, &error))?.len();
    if let Some(expected) = entry.bytes.filter(|expected| *expected != found) {
        return Err(damaged(&path, format!("{found} bytes instead of {expected}")));
    }
    let bytes = fs::read(&path).map_err(|error| unreadable(&path, &error))?;
    compare(&path, entry, bytes.len() as u64, xxh3_64(&bytes))?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(|error| failed(&path, error))?;
    if tensors.len() != layout.tensors().len() {
        let counts = format!("{} tensors where the model has {}", tensors.len(), layout.tensors().len());
        return Err(failed(&path, counts));
    }
    let mut values = vec![0.0; layout.len()];
    for tensor in layout.tensors() {
        let view = tensors.tensor(&tensor.name).map_err(|error| failed(&path, error))?;
        if view.dtype() != Dtype::F32 || view.shape() != tensor.shape {
            let (dtype, shape) = (view.dtype(), view.shape());
            let (name, expected) = (&tensor.name, &tensor.shape);
            let text = format!(
                "tensor `{name}` is {dtype:?} of shape {shape:?} where the model has F32 of shape {expected:?}"
            );
            return Err(failed(&path, text));
        }
        bytemuck::cast_slice_mut::<f32, u8>(&mut values[tensor.range()]).copy_from_slice(view.data());
    }
    Ok(values)
}
