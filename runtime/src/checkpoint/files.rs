//! The files of a checkpoint in the safetensors format, written and read in one pass with their size and checksum.
//!
//! A file is written tensor by tensor, without a copy of it in memory: the length of the header, a JSON header with
//! names, shapes and offsets, then the tensors in the layout's order.
//! (<https://github.com/huggingface/safetensors#format>)

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, BufWriter, ErrorKind, Read, Write};
use std::path::Path;

use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::Deserialize;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::manifest::{FileEntry, MANIFEST, Manifest, hexadecimal};
use super::snapshot::{Snapshot, SnapshotArena};
use super::{damaged, failed};
use crate::{Layout, Result};

/// Beginning of the header of every file that a writer writes: the mark by which writers recognise their own files
/// (`removal`).
pub(super) const MARK: &[u8] = br#"{"__metadata__":{"writer":"mgpu"}"#;

/// Buffer size of reads and writes, in bytes.
const CHUNK: usize = 1 << 20;

/// Writes all files of `snapshot` into the empty folder `path`. When this returns, the files and the folder are
/// flushed to disk.
pub(super) fn write(path: &Path, snapshot: Snapshot) -> Result<()> {
    let Snapshot { step, position, state, loss_scale, arenas } = snapshot;
    let mut files = BTreeMap::new();
    for arena in arenas {
        let name = format!("{}.safetensors", arena.name);
        let file = path.join(&name);
        if !is_file_name(&name) || files.contains_key(&name) {
            return Err(failed(
                &file,
                "the name of an arena must be a file name, and no other arena may have it",
            ));
        }
        files.insert(name, write_arena(&file, arena)?);
    }
    let manifest = Manifest::new(step, position, state, loss_scale, files).to_json();
    let file = path.join(MANIFEST);
    if manifest.len() > MAX_MANIFEST_BYTES {
        let problem = format!(
            "{} bytes, more than the limit of {MAX_MANIFEST_BYTES}: its state is too large",
            manifest.len()
        );
        return Err(failed(&file, problem));
    }
    write_manifest(path, &manifest)
}

/// Writes the text of a manifest, the last file of the checkpoint in folder `path`, and flushes both.
pub(super) fn write_manifest(path: &Path, text: &[u8]) -> Result<()> {
    let file = path.join(MANIFEST);
    create(&file, |output| output.write_all(text)).map_err(|error| failed(&file, error))?;
    flush_folder(path)
}

fn write_arena(path: &Path, SnapshotArena { layout, values, .. }: SnapshotArena) -> Result<FileEntry> {
    let values = values.make();
    if values.len() < layout.len() {
        return Err(failed(path, format!("{} values for tensors of {}", values.len(), layout.len())));
    }
    if let Some(problem) = layout.problem_of_names() {
        return Err(failed(path, problem));
    }
    check_finite(path, &layout, &values)?;
    let mut end = 0;
    let infos = layout.tensors().iter().map(|tensor| {
        let begin = end;
        end += tensor.len() * size_of::<f32>();
        let shape = tensor.shape.clone();
        (tensor.name.clone(), TensorInfo { dtype: Dtype::F32, shape, data_offsets: (begin, end) })
    });
    let mark = HashMap::from([("writer".to_owned(), "mgpu".to_owned())]);
    let header = Metadata::new(Some(mark), infos.collect()).map_err(|error| failed(path, error))?;
    let mut header = serde_json::to_vec(&header).map_err(|error| failed(path, error))?;
    // Tensors begin at a multiple of 8 bytes, counted with the length.
    header.resize(header.len().next_multiple_of(8), b' ');
    if header.len() > MAX_HEADER_BYTES {
        let problem =
            format!("a header of {} bytes, more than the limit of {MAX_HEADER_BYTES}", header.len());
        return Err(failed(path, problem));
    }
    let (mut hash, mut bytes) = (Xxh3::new(), 0);
    let written = create(path, |output| {
        let mut put = |part: &[u8]| {
            hash.update(part);
            bytes += part.len() as u64;
            output.write_all(part)
        };
        put(&(header.len() as u64).to_le_bytes())?;
        put(&header)?;
        // In chunks, so that the checksum and the write read them from the cache.
        let tensors = layout.tensors().iter().flat_map(|tensor| values[tensor.range()].chunks(CHUNK / 4));
        tensors.into_iter().try_for_each(|part| put(bytemuck::cast_slice(part)))
    });
    written.map_err(|error| failed(path, error))?;
    Ok(FileEntry { bytes, xxh3: hexadecimal(hash.digest()) })
}

/// Rejects non-finite values: the checkpoint of a diverged training must not replace one that a run can resume from.
fn check_finite(path: &Path, layout: &Layout, values: &[f32]) -> Result<()> {
    // No branch per value, so that the compiler can vectorise it.
    let is_finite = |part: &[f32]| part.iter().fold(true, |all, value| all & value.is_finite());
    for tensor in layout.tensors() {
        let values = &values[tensor.range()];
        if !values.chunks(CHUNK / 4).all(is_finite) {
            let at = values.iter().position(|value| !value.is_finite()).unwrap_or_default();
            let problem = format!(
                "tensor `{}` is not finite, {} at element {at}: the training has diverged, and this checkpoint is not written; \
                 try a lower learning rate",
                tensor.name, values[at]
            );
            return Err(failed(path, problem));
        }
    }
    Ok(())
}

/// Creates a file whose content `fill` writes, and flushes it to disk.
fn create(path: &Path, fill: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> io::Result<()> {
    let mut output = BufWriter::with_capacity(CHUNK, File::create(path)?);
    fill(&mut output)?;
    output.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
}

/// Largest manifest in bytes: parsed, JSON values can take a hundred times as much memory.
const MAX_MANIFEST_BYTES: usize = 1 << 20;

/// Largest header of a safetensors file in bytes: enough for about 100,000 tensors.
const MAX_HEADER_BYTES: usize = 16 << 20;

/// Flushes the directory entries of a folder to disk.
pub(super) fn flush_folder(path: &Path) -> Result<()> {
    File::open(path).and_then(|folder| folder.sync_all()).map_err(|error| failed(path, error))
}

/// Whether `name` is a plain file name, without any path components.
fn is_file_name(name: &str) -> bool {
    Path::new(name).file_name().is_some_and(|last| last == name)
}

/// The manifest of the checkpoint at `path`.
pub(super) fn read_manifest(path: &Path) -> Result<Manifest> {
    parse_manifest(path, &read_manifest_text(path)?)
}

/// The text of that manifest.
pub(super) fn read_manifest_text(path: &Path) -> Result<Vec<u8>> {
    let file = path.join(MANIFEST);
    let (mut input, bytes) = open(&file)?;
    if bytes > MAX_MANIFEST_BYTES as u64 {
        return Err(damaged(
            &file,
            format!("{bytes} bytes, where a manifest has at most {MAX_MANIFEST_BYTES}"),
        ));
    }
    let mut text = Vec::new();
    input.read_to_end(&mut text).map_err(|error| unreadable(&file, &error))?;
    Ok(text)
}

/// The manifest of the checkpoint at `path` from its text.
pub(super) fn parse_manifest(path: &Path, text: &[u8]) -> Result<Manifest> {
    let file = path.join(MANIFEST);
    let manifest = Manifest::parse(&file, text)?;
    match manifest.files.keys().find(|name| !is_file_name(name)) {
        Some(name) => Err(damaged(&file, format!("{name:?} is not the name of a file"))),
        None => Ok(manifest),
    }
}

/// Opens a regular file and returns its length. Reading anything else could block, or never end.
pub(super) fn open(path: &Path) -> Result<(io::Take<File>, u64)> {
    let metadata = fs::metadata(path).map_err(|error| unreadable(path, &error))?;
    if !metadata.is_file() {
        return Err(damaged(path, "not a file"));
    }
    let file = File::open(path).map_err(|error| unreadable(path, &error))?;
    // Ignore what is appended in the meantime.
    Ok((file.take(metadata.len()), metadata.len()))
}

/// A missing file means damage: a checkpoint is complete before it gets its name.
pub(super) fn unreadable(path: &Path, error: &io::Error) -> crate::Error {
    match error.kind() {
        ErrorKind::NotFound => damaged(path, "there is no such file"),
        _ => failed(path, error),
    }
}

/// Whether the file at `path` has the listed checksum.
pub(super) fn has_checksum(path: &Path, entry: &FileEntry) -> bool {
    open(path).and_then(|(file, _)| compare(path, file, entry)).is_ok()
}

/// Compares size and checksum of file `name` of the checkpoint at `path` with the manifest.
pub(super) fn verify(path: &Path, name: &str, entry: &FileEntry) -> Result<()> {
    let path = path.join(name);
    let (file, bytes) = open(&path)?;
    check_size(&path, entry, bytes)?;
    compare(&path, file, entry)
}

fn compare(path: &Path, mut file: impl Read, entry: &FileEntry) -> Result<()> {
    let (mut hash, mut chunk) = (Xxh3::new(), vec![0; CHUNK]);
    loop {
        match file.read(&mut chunk) {
            Ok(0) => return check_checksum(path, entry, hash.digest()),
            Ok(count) => hash.update(&chunk[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(unreadable(path, &error)),
        }
    }
}

pub(super) fn check_size(path: &Path, entry: &FileEntry, bytes: u64) -> Result<()> {
    if entry.bytes != bytes {
        return Err(damaged(path, format!("{bytes} bytes instead of {}", entry.bytes)));
    }
    Ok(())
}

pub(super) fn check_checksum(path: &Path, entry: &FileEntry, checksum: u64) -> Result<()> {
    let (found, expected) = (hexadecimal(checksum), &entry.xxh3);
    if found != *expected {
        return Err(damaged(path, format!("checksum {found} instead of {expected}")));
    }
    Ok(())
}

/// The values of the arena in file `name` of the checkpoint at `path`, which must hold exactly the tensors of `layout`.
pub(super) fn load(path: &Path, name: &str, entry: &FileEntry, layout: &Layout) -> Result<Vec<f32>> {
    let path = path.join(name);
    let (mut file, size) = open(&path)?;
    check_size(&path, entry, size)?;
    let needed = size_of::<f32>() * layout.tensors().iter().map(|tensor| tensor.len()).sum::<usize>();
    if size > (needed + MAX_HEADER_BYTES + size_of::<u64>()) as u64 {
        return Err(failed(&path, format!("{size} bytes, where the model's tensors have {needed}")));
    }
    let mut bytes = Vec::with_capacity(size as usize);
    file.read_to_end(&mut bytes).map_err(|error| unreadable(&path, &error))?;
    check_checksum(&path, entry, xxh3_64(&bytes))?;
    let (header, data) = split(&bytes).map_err(|problem| failed(&path, problem))?;
    if header.tensors.len() != layout.tensors().len() {
        let counts =
            format!("{} tensors where the model has {}", header.tensors.len(), layout.tensors().len());
        return Err(failed(&path, counts));
    }
    let mut values = vec![0.0; layout.len()];
    for tensor in layout.tensors() {
        let name = &tensor.name;
        let info =
            header.tensors.get(name).ok_or_else(|| failed(&path, format!("there is no tensor `{name}`")))?;
        if info.dtype != Dtype::F32 || info.shape != tensor.shape {
            let (dtype, shape, expected) = (info.dtype, &info.shape, &tensor.shape);
            let text = format!(
                "tensor `{name}` is {dtype:?} of shape {shape:?} where the model has F32 of shape {expected:?}"
            );
            return Err(failed(&path, text));
        }
        let into: &mut [u8] = bytemuck::cast_slice_mut(&mut values[tensor.range()]);
        let (begin, end) = info.data_offsets;
        let from = data.get(begin..end).filter(|from| from.len() == into.len());
        let problem = || format!("tensor `{name}` is not within bytes {begin} to {end} of {}", data.len());
        into.copy_from_slice(from.ok_or_else(|| failed(&path, problem()))?);
    }
    Ok(values)
}

/// The header of a safetensors file. The crate's own reader adds offsets unchecked, which panics on overflow in debug
/// builds.
#[derive(Deserialize)]
struct Header {
    #[serde(rename = "__metadata__")]
    _metadata: Option<HashMap<String, String>>,
    #[serde(flatten)]
    tensors: HashMap<String, TensorInfo>,
}

/// Splits a safetensors file into header and tensor data.
fn split(bytes: &[u8]) -> std::result::Result<(Header, &[u8]), String> {
    let parts = bytes.split_first_chunk().and_then(|(length, rest)| {
        let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
        rest.split_at_checked(length)
    });
    let (header, data) = parts.ok_or("not a safetensors file: it ends within its header")?;
    if header.len() > MAX_HEADER_BYTES {
        return Err(format!("not a safetensors file: a header of {} bytes", header.len()));
    }
    let header =
        serde_json::from_slice(header).map_err(|error| format!("not a safetensors header: {error}"))?;
    Ok((header, data))
}
