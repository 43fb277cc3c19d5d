//! The IDX format of the MNIST files, gzipped or not.
//!
//! A file consists of a magic number (two zero bytes, 8 for unsigned bytes, the number of dimensions), a big-endian
//! `u32` for each dimension, and the elements. The bytes are untrusted: memory is allocated only as data arrives,
//! never from the header alone, and every error names file and offset.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, ErrorKind, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use flate2::bufread::MultiGzDecoder;

use super::{DataError, Dataset, IMAGE_LEN, Mnist, Origin, Split};

/// Maximum number of images in a file: many times MNIST, and few enough that a small gzip file cannot fill the
/// memory.
const MOST_IMAGES: u64 = 1_000_000;
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// The original names of the images and labels of a set, without `.gz`.
pub const fn names(split: Split) -> [&'static str; 2] {
    match split {
        Split::Train => ["train-images-idx3-ubyte", "train-labels-idx1-ubyte"],
        Split::Test => ["t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"],
    }
}

/// Reads both sets from `folder`.
///
/// # Errors
/// If a file is missing, unreadable or damaged, or the files do not match each other; names file and offset.
pub fn read(folder: &Path) -> Result<Mnist, DataError> {
    // Look for all four first, so that the error lists all missing files.
    find_all(folder, &[names(Split::Train), names(Split::Test)].concat())?;
    let (train, test) = (read_split(folder, Split::Train)?, read_split(folder, Split::Test)?);
    Ok(Mnist { train, test, origin: Origin::Files(folder.to_owned()) })
}

/// Reads one set from `folder`.
///
/// # Errors
/// As [`read`].
pub fn read_split(folder: &Path, split: Split) -> Result<Dataset, DataError> {
    let [images, labels]: [PathBuf; 2] = find_all(folder, &names(split))?.try_into().expect("a path a name");
    let dataset = Dataset { images: read_images(&images)?, labels: read_labels(&labels)? };
    let (pictures, labels) = (dataset.images.len() / IMAGE_LEN, dataset.labels.len());
    if pictures != labels {
        let [of_images, of_labels] = names(split);
        let problem = format!("{pictures} images in {of_images} and {labels} labels in {of_labels}");
        return Err(DataError::Mismatch { folder: folder.to_owned(), problem });
    }
    if dataset.is_empty() {
        let problem = format!("{} holds no image", names(split)[0]);
        return Err(DataError::Mismatch { folder: folder.to_owned(), problem });
    }
    Ok(dataset)
}

/// The paths of the files called `names`.
fn find_all(folder: &Path, names: &[&str]) -> Result<Vec<PathBuf>, DataError> {
    let (mut paths, mut missing) = (Vec::new(), Vec::new());
    for name in names {
        match find(folder, name)? {
            Some(path) => paths.push(path),
            None => missing.push(format!("{name}[.gz]")),
        }
    }
    if missing.is_empty() {
        return Ok(paths);
    }
    match fs::metadata(folder) {
        Err(error) => Err(DataError::io(folder)(error)),
        Ok(metadata) if !metadata.is_dir() => Err(DataError::io(folder)(ErrorKind::NotADirectory.into())),
        Ok(_) => Err(DataError::Missing { folder: folder.to_owned(), missing, found: listing(folder) }),
    }
}

/// The sorted names of a folder's entries.
fn listing(folder: &Path) -> Vec<String> {
    let entries = folder.read_dir().into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// The content of a file, decompressed if it is gzipped, and whether it is. The first bytes decide, not the name.
pub(super) fn open_content(path: &Path) -> std::io::Result<(Box<dyn Read>, bool)> {
    let mut reader = BufReader::with_capacity(1 << 16, open(path)?);
    let gzip = reader.fill_buf()?.starts_with(&GZIP_MAGIC);
    Ok(if gzip { (Box::new(MultiGzDecoder::new(reader)), true) } else { (Box::new(reader), false) })
}

/// Opens a regular file. Anything else could block a reader, or never end.
fn open(path: &Path) -> io::Result<File> {
    let kind = fs::metadata(path)?.file_type();
    let what = match kind {
        _ if kind.is_file() => return File::open(path),
        _ if kind.is_dir() => "a folder",
        _ if kind.is_fifo() => "a named pipe",
        _ if kind.is_socket() => "a socket",
        _ => "a device",
    };
    Err(io::Error::new(ErrorKind::InvalidInput, format!("it is {what}, where a file is expected")))
}

/// The file called `name`, in any of the common spellings, or `None` if there is none. If none of the existing ones
/// can be read, the error is about the first.
fn find(folder: &Path, name: &str) -> Result<Option<PathBuf>, DataError> {
    let dotted = name.replace("-idx", ".idx");
    let spellings = [name.to_owned(), format!("{name}.gz"), dotted.clone(), format!("{dotted}.gz")];
    let mut unreadable = None;
    for path in spellings.map(|spelling| folder.join(spelling)) {
        // Does not follow links: a dangling link exists, and is the reason why the file cannot be read.
        if fs::symlink_metadata(&path).is_err() {
            continue;
        }
        match open(&path) {
            Ok(_) => return Ok(Some(path)),
            Err(error) => _ = unreadable.get_or_insert_with(|| DataError::io(path)(error)),
        }
    }
    unreadable.map_or(Ok(None), Err)
}

/// The pixels of an image file.
///
/// # Errors
/// If the file is unreadable, damaged, or holds something else than images of 28×28 bytes.
pub fn read_images(path: &Path) -> Result<Vec<u8>, DataError> {
    let mut reader = Idx::open(path)?;
    let [count, rows, columns] = reader.header::<3>()?;
    if (rows, columns) != (28, 28) {
        return Err(reader.wrong(8, format!("images of {rows}×{columns} pixels where 28×28 are expected")));
    }
    if count > MOST_IMAGES {
        return Err(reader.wrong(4, format!("{count} images, more than any such file has")));
    }
    reader.body(count * IMAGE_LEN as u64)
}

/// The labels of a label file.
///
/// # Errors
/// If the file is unreadable, damaged, or a label is not from 0 to 9.
pub fn read_labels(path: &Path) -> Result<Vec<u8>, DataError> {
    let mut reader = Idx::open(path)?;
    let [count] = reader.header::<1>()?;
    if count > MOST_IMAGES {
        return Err(reader.wrong(4, format!("{count} labels, more than any such file has")));
    }
    let labels = reader.body(count)?;
    match labels.iter().position(|label| *label > 9) {
        None => Ok(labels),
        Some(index) => {
            let problem = format!("label {} of sample {index} where 0 to 9 are expected", labels[index]);
            Err(reader.wrong(8 + index as u64, problem))
        }
    }
}

/// A file being read.
struct Idx<'a> {
    path: &'a Path,
    bytes: Box<dyn Read>,
    gzip: bool,
    offset: u64,
}

impl<'a> Idx<'a> {
    fn open(path: &'a Path) -> Result<Self, DataError> {
        let (bytes, gzip) = open_content(path).map_err(DataError::io(path))?;
        Ok(Idx { path, bytes, gzip, offset: 0 })
    }

    fn wrong(&self, offset: u64, problem: String) -> DataError {
        DataError::Format { path: self.path.to_owned(), offset, gzip: self.gzip, problem }
    }

    /// Reads up to `count` bytes.
    fn take(&mut self, count: u64) -> Result<Vec<u8>, DataError> {
        let mut bytes = Vec::new();
        let result = (&mut self.bytes).take(count).read_to_end(&mut bytes);
        self.offset += bytes.len() as u64;
        match result {
            Ok(_) => Ok(bytes),
            // The decoder reports damaged compressed data.
            Err(error) => {
                Err(self.wrong(self.offset, format!("cannot be read: {error}; fetch the file again")))
            }
        }
    }

    /// The dimensions.
    fn header<const DIMENSIONS: usize>(&mut self) -> Result<[u64; DIMENSIONS], DataError> {
        let bytes = self.take(4 + 4 * DIMENSIONS as u64)?;
        if let Some(&magic) = bytes.first_chunk() {
            self.check_magic(magic, DIMENSIONS as u8)?;
        }
        if bytes.len() < 4 + 4 * DIMENSIONS {
            return Err(
                self.wrong(self.offset, format!("truncated: the header has {} bytes", 4 + 4 * DIMENSIONS))
            );
        }
        let extent = |index: usize| {
            let start = 4 + 4 * index;
            u32::from_be_bytes([bytes[start], bytes[start + 1], bytes[start + 2], bytes[start + 3]]).into()
        };
        Ok(std::array::from_fn(extent))
    }

    /// Labels and images are easily swapped, so a wrong number of dimensions has its own message.
    fn check_magic(&self, magic: [u8; 4], dimensions: u8) -> Result<(), DataError> {
        let [expected, found] = [[0, 0, 8, dimensions], magic];
        if found == expected {
            Ok(())
        } else if found[..3] == expected[..3] {
            let problem = format!(
                "{} dimensions where {dimensions} are expected: are images and labels swapped?",
                found[3]
            );
            Err(self.wrong(3, problem))
        } else {
            let problem = format!(
                "begins with {found:02x?} where {expected:02x?} is expected: not an IDX file of bytes"
            );
            Err(self.wrong(0, problem))
        }
    }

    /// Exactly `count` bytes, and then the end of the file.
    fn body(&mut self, count: u64) -> Result<Vec<u8>, DataError> {
        let begin = self.offset;
        let bytes = self.take(count)?;
        if (bytes.len() as u64) < count {
            let whole = begin + count;
            return Err(
                self.wrong(self.offset, format!("truncated: by its header the file has {whole} bytes"))
            );
        }
        if !self.take(1)?.is_empty() {
            let problem = "more bytes than its header says".to_owned();
            return Err(self.wrong(begin + count, problem));
        }
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests;
