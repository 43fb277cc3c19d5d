//! TensorBoard's event files: scalars over steps.
//!
//! A file is a sequence of records, each framed by its length and by checksums of both (`TFRecord`). A record is one
//! `Event` message of protocol buffers. Scalars need only a few fields of that schema
//! (tensorflow/core/util/event.proto, framework/summary.proto), which are encoded here:
//!
//! ```text
//! record   length (u64) · masked CRC-32C of it · event · masked CRC-32C of it, all little-endian
//! Event    1: wall time, seconds (double)   2: step (varint)   3: version of the file (string)   5: Summary
//! Summary  1: Value, repeated               Value  1: tag (string)   2: value (float)
//! ```

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use crc::{CRC_32_ISCSI, Crc};

use super::super::byproducts::{AppendedFile, cannot_write};

const CRC: Crc<u32> = Crc::<u32>::new(&CRC_32_ISCSI);
const FLAG: &str = "--tensorboard";
/// Appended data is written after this time, so that a viewer can follow.
const FLUSH: Duration = Duration::from_secs(2);

/// Wire types of protocol buffers.
const VARINT: u8 = 0;
const FIXED64: u8 = 1;
const BYTES: u8 = 2;
const FIXED32: u8 = 5;

/// An open event file.
#[derive(Debug)]
pub(super) struct EventFile {
    file: AppendedFile,
    flushed: Instant,
}

impl EventFile {
    /// Creates a new file in `folder`, which is created if needed.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(super) fn create(folder: &Path) -> Result<Self, String> {
        fs::create_dir_all(folder).map_err(|error| cannot_write(FLAG, folder, &error))?;
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let host = if host.trim().is_empty() { "localhost" } else { host.trim() };
        // Viewers look for this name.
        let name = format!("events.out.tfevents.{}.{host}.{}", seconds() as u64, std::process::id());
        let file = AppendedFile::create(FLAG, &free_name(&folder.join(name)))?;
        let mut events = EventFile { file, flushed: Instant::now() };
        let mut event = Message::default();
        event.double(1, seconds()).bytes(3, b"brain.Event:2");
        events.record(&event.0)?;
        // A full disk is not an error yet: it may have space when there is data to write.
        let _ = events.flush();
        Ok(events)
    }

    /// Appends the values of some scalars after `step` steps.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(super) fn append(&mut self, step: u64, scalars: &[(&str, f64)]) -> Result<(), String> {
        let mut summary = Message::default();
        for (tag, value) in scalars {
            let mut scalar = Message::default();
            scalar.bytes(1, tag.as_bytes()).float(2, *value as f32);
            summary.bytes(1, &scalar.0);
        }
        let mut event = Message::default();
        event.double(1, seconds()).varint(2, step).bytes(5, &summary.0);
        self.record(&event.0)?;
        if self.flushed.elapsed() > FLUSH {
            self.flush()?;
        }
        Ok(())
    }

    /// Writes all appended data.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(super) fn flush(&mut self) -> Result<(), String> {
        self.flushed = Instant::now();
        self.file.flush()
    }

    fn record(&mut self, event: &[u8]) -> Result<(), String> {
        let length = (event.len() as u64).to_le_bytes();
        self.file.push(&[&length[..], &masked_crc(&length), event, &masked_crc(event)].concat())
    }
}

/// `path`, or `path.2`, … if it exists: a process in another container can have the same process ID.
fn free_name(path: &Path) -> PathBuf {
    let numbered = |number: u64| {
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".{number}"));
        PathBuf::from(name)
    };
    let names = std::iter::once(path.to_owned()).chain((2..).map(numbered));
    names.into_iter().find(|name| name.symlink_metadata().is_err()).expect("no folder has so many entries")
}

/// Seconds since 1970.
fn seconds() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// The CRC of `bytes`, rotated and offset, because the file format checksums data that itself contains CRCs.
fn masked_crc(bytes: &[u8]) -> [u8; 4] {
    CRC.checksum(bytes).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

/// A message of protocol buffers, field by field.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn key(&mut self, field: u8, wire: u8) {
        self.0.push(field << 3 | wire);
    }

    fn number(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn varint(&mut self, field: u8, value: u64) -> &mut Self {
        self.key(field, VARINT);
        self.number(value);
        self
    }

    fn double(&mut self, field: u8, value: f64) -> &mut Self {
        self.key(field, FIXED64);
        self.0.extend(value.to_le_bytes());
        self
    }

    fn float(&mut self, field: u8, value: f32) -> &mut Self {
        self.key(field, FIXED32);
        self.0.extend(value.to_le_bytes());
        self
    }

    fn bytes(&mut self, field: u8, value: &[u8]) -> &mut Self {
        self.key(field, BYTES);
        self.number(value.len() as u64);
        self.0.extend(value);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fields of a message: number and content; varints as 8 bytes.
    fn fields(mut bytes: &[u8]) -> Vec<(u8, Vec<u8>)> {
        fn varint(bytes: &mut &[u8]) -> u64 {
            let mut value = 0;
            for shift in (0..).step_by(7) {
                let (first, rest) = bytes.split_first().expect("a byte of a number");
                *bytes = rest;
                value |= u64::from(first & 0x7f) << shift;
                if first & 0x80 == 0 {
                    break;
                }
            }
            value
        }
        let mut found = Vec::new();
        while !bytes.is_empty() {
            let key = varint(&mut bytes);
            let len = match (key & 7) as u8 {
                VARINT => {
                    found.push(((key >> 3) as u8, varint(&mut bytes).to_le_bytes().to_vec()));
                    continue;
                }
                FIXED64 => 8,
                FIXED32 => 4,
                BYTES => varint(&mut bytes) as usize,
                wire => panic!("wire type {wire}"),
            };
            let (content, rest) = bytes.split_at(len);
            found.push(((key >> 3) as u8, content.to_vec()));
            bytes = rest;
        }
        found
    }

    /// The events of a file. Checks their checksums.
    fn read(path: &Path) -> Vec<Vec<(u8, Vec<u8>)>> {
        let bytes = fs::read(path).unwrap();
        let (mut rest, mut events) = (&bytes[..], Vec::new());
        while !rest.is_empty() {
            let (length, after) = rest.split_at(8);
            assert_eq!(after[..4], masked_crc(length));
            let (event, after) = after[4..].split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
            assert_eq!(after[..4], masked_crc(event));
            events.push(fields(event));
            rest = &after[4..];
        }
        events
    }

    #[test]
    fn scalars_are_found_again_at_their_steps() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = EventFile::create(&folder.path().join("new/run")).unwrap();
        file.append(7, &[("train/loss", 0.5), ("test/accuracy", 0.25)]).unwrap();
        file.append(70_000, &[("train/loss", 0.125)]).unwrap();
        file.flush().unwrap();
        let path = fs::read_dir(folder.path().join("new/run")).unwrap().next().unwrap().unwrap().path();
        let events = read(&path);
        assert_eq!(events[0][1], (3, b"brain.Event:2".to_vec()));
        let scalars = |event: &[(u8, Vec<u8>)]| {
            let summary = &event.iter().find(|(field, _)| *field == 5).unwrap().1;
            let values = fields(summary).into_iter().map(|(field, value)| {
                assert_eq!(field, 1);
                let value = fields(&value);
                let number = f32::from_le_bytes(value[1].1[..].try_into().unwrap());
                (String::from_utf8(value[0].1.clone()).unwrap(), number)
            });
            values.collect::<Vec<_>>()
        };
        assert_eq!(scalars(&events[1]), [("train/loss".to_owned(), 0.5), ("test/accuracy".to_owned(), 0.25)]);
        assert_eq!(scalars(&events[2]), [("train/loss".to_owned(), 0.125)]);
        let steps: Vec<_> = events[1..].iter().map(|event| event[1].clone()).collect();
        assert_eq!(steps, [(2, 7u64.to_le_bytes().to_vec()), (2, 70_000u64.to_le_bytes().to_vec())]);
        assert_eq!(events.len(), 3);
    }

    #[test]
    fn checksums_are_those_of_the_format() {
        // The check value of the CRC-32C standard, masked.
        assert_eq!(CRC.checksum(b"123456789"), 0xe306_9283);
        let expected = 0xe306_9283u32.rotate_right(15).wrapping_add(0xa282_ead8);
        assert_eq!(masked_crc(b"123456789"), expected.to_le_bytes());
    }
}
