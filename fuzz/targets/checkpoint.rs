//! Opens a folder with arbitrary contents as a checkpoint. The result is values, or an error that names the file.
//! Memory stays within the size of the model and the bounds of headers and manifests.
#![no_main]

use std::fs;
use std::path::Path;

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use mgpu::Layout;
use mgpu::checkpoint::{Checkpoint, find};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

const ARENA: &str = "weights";
const FILE: &str = "weights.safetensors";

/// Bytes of `manifest.json`. Valid checksums let the fuzzer reach more code.
#[derive(Debug, Arbitrary)]
enum Manifest<'a> {
    /// Arbitrary bytes.
    Bytes(&'a [u8]),
    /// Arbitrary bytes after their checksum, starting with the byte after the comma.
    Sealed(&'a [u8]),
    /// A manifest that lists the existing file, with an arbitrary format, state and further entries.
    True {
        format: u8,
        step: u64,
        state: &'a str,
        more: Vec<(&'a str, &'a str)>,
        files: Vec<(&'a str, &'a str)>,
    },
}

/// Bytes of the arena's file.
#[derive(Debug, Arbitrary)]
enum Tensors<'a> {
    Missing,
    Bytes(&'a [u8]),
    /// A header after its length, followed by data.
    Header {
        header: &'a str,
        data: &'a [u8],
    },
    /// A valid header except for the offsets of its two tensors.
    Offsets {
        first: (u64, u64),
        second: (u64, u64),
        data: &'a [u8],
    },
}

fn layout() -> Layout {
    let mut layout = Layout::new();
    layout.push("0.weight", [2, 3]);
    layout.push("0.bias", [2]);
    layout
}

fn hexadecimal(bytes: &[u8]) -> String {
    format!("{:016x}", xxh3_64(bytes))
}

/// The JSON value of a text, or the text as a JSON string.
fn value(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| text.into())
}

fn sealed(rest: &[u8]) -> Vec<u8> {
    [b"{\n  \"checksum\": \"", hexadecimal(rest).as_bytes(), b"\",", rest].concat()
}

impl Manifest<'_> {
    fn bytes(&self, file: Option<&[u8]>) -> Vec<u8> {
        match self {
            Manifest::Bytes(bytes) => bytes.to_vec(),
            Manifest::Sealed(rest) => sealed(rest),
            Manifest::True { format, step, state, more, files } => {
                let checksum = hexadecimal(file.unwrap_or_default());
                let entry = match format {
                    1 => json!(checksum),
                    _ => json!({ "bytes": file.map(<[u8]>::len), "xxh3": checksum }),
                };
                let mut manifest = json!({ "format": format, "step": step, "state": value(state) });
                manifest["files"] =
                    files.iter().map(|(name, entry)| ((*name).to_owned(), value(entry))).collect();
                manifest["files"][FILE] = entry;
                more.iter().for_each(|(key, text)| manifest[*key] = value(text));
                let text = manifest.to_string();
                if *format == 1 { text.into_bytes() } else { sealed(&text.as_bytes()[1..]) }
            }
        }
    }
}

impl Tensors<'_> {
    fn bytes(&self) -> Option<Vec<u8>> {
        let with = |header: &str, data: &[u8]| {
            [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
        };
        match self {
            Tensors::Missing => None,
            Tensors::Bytes(bytes) => Some(bytes.to_vec()),
            Tensors::Header { header, data } => Some(with(header, data)),
            Tensors::Offsets { first, second, data } => {
                let header = json!({
                    "0.weight": { "dtype": "F32", "shape": [2, 3], "data_offsets": first },
                    "0.bias": { "dtype": "F32", "shape": [2], "data_offsets": second },
                });
                Some(with(&header.to_string(), data))
            }
        }
    }
}

/// The value, or `None` after an error, which must name `path`.
fn accepted<T>(result: mgpu::Result<T>, path: &Path) -> Option<T> {
    result
        .inspect_err(|error| {
            let text = error.to_string();
            assert!(text.contains(path.to_str().expect("a UTF-8 path")), "{text}");
        })
        .ok()
}

fuzz_target!(|input: (Manifest<'_>, Tensors<'_>)| {
    thread_local! {
        static FOLDER: tempfile::TempDir = tempfile::tempdir().expect("a folder");
    }
    FOLDER.with(|folder| {
        let (manifest, tensors) = (&input.0, input.1.bytes());
        let path = folder.path().join("step-00000007");
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).expect("a folder");
        fs::write(path.join("manifest.json"), manifest.bytes(tensors.as_deref())).expect("a file");
        if let Some(bytes) = &tensors {
            fs::write(path.join(FILE), bytes).expect("a file");
        }
        let found = accepted(find(folder.path()), &path).flatten();
        let Some(checkpoint) = accepted(Checkpoint::open(&path), &path) else {
            assert!(found.is_none());
            return;
        };
        let is_whole = accepted(checkpoint.verify(), &path).is_some();
        assert_eq!(found.is_some(), is_whole);
        let layout = layout();
        if let Some(values) = accepted(checkpoint.load(ARENA, &layout), &path.join(FILE)) {
            assert_eq!(values.len(), layout.len());
        }
    });
});
