//! The IDX format of the MNIST files, gzipped or not.
//!
//! A file consists of a magic number (two zero bytes, 8 for unsigned bytes, the number of dimensions), a big-endian
//! `u32` for each dimension, and the elements. The bytes are untrusted: every error names file and offset, and memory is
//! never allocated from the header alone. An uncompressed file must have the size that its header says; what is
//! decompressed has a limit, and is allocated as it arrives.
//!
//! The images of an uncompressed file need not be in memory: [`open`] leaves them in the file if they are many.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, ErrorKind, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use flate2::bufread::MultiGzDecoder;

use super::{DataError, Dataset, FileSamples, IMAGE_LEN, ImageFile, Mnist, Origin, Samples, Split};

/// Maximum number of images or labels in a gzip file: many times MNIST, and few enough that a small file cannot fill the
/// memory. An uncompressed file has no such limit, because its size cannot lie.
const MOST_GZIPPED: u64 = 1_000_000;
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// Where the images of a set are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepImages {
    /// In memory.
    InMemory,
    /// In their file, which must be uncompressed.
    InFile,
    /// In memory if they have at most so many bytes, else in their file.
    InMemoryUpTo(u64),
}

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
    // First, so that the error lists all missing files.
    check_names(folder)?;
    let (train, test) = (read_split(folder, Split::Train)?, read_split(folder, Split::Test)?);
    Ok(Mnist { train, test, origin: Origin::Files(folder.to_owned()) })
}

/// Checks that all four files are in `folder`.
///
/// # Errors
/// If one is missing or unreadable; lists all that are missing.
pub fn check_names(folder: &Path) -> Result<(), DataError> {
    find_all(folder, &[names(Split::Train), names(Split::Test)].concat()).map(|_| ())
}

/// Reads one set from `folder`.
///
/// # Errors
/// As [`read`].
pub fn read_split(folder: &Path, split: Split) -> Result<Dataset, DataError> {
    let [images, labels] = paths(folder, split)?;
    let dataset = Dataset { images: read_images(&images)?, labels: read_labels(&labels)? };
    check_counts(folder, split, dataset.images.len() / IMAGE_LEN, dataset.len())?;
    Ok(dataset)
}

/// Opens one set in `folder`. Its labels are in memory, its images where `keep` says.
///
/// # Errors
/// As [`read`]; if the images of a gzip file would have to stay in their file.
pub fn open(folder: &Path, split: Split, keep: KeepImages) -> Result<Samples, DataError> {
    let [images, labels] = paths(folder, split)?;
    let (images, labels) = (open_images(&images, keep)?, read_labels(&labels)?);
    check_counts(folder, split, images.len(), labels.len())?;
    Ok(images.with_labels(labels))
}

/// Opens an image file, as [`open`], for images without labels: their labels are 0.
///
/// # Errors
/// If the file is unreadable, damaged, or holds something else than images of 28×28 bytes; as [`open`].
pub fn open_unlabelled(path: &Path, keep: KeepImages) -> Result<Samples, DataError> {
    let images = open_images(path, keep)?;
    let labels = vec![0; images.len()];
    Ok(images.with_labels(labels))
}

/// The files of images and labels of a set.
fn paths(folder: &Path, split: Split) -> Result<[PathBuf; 2], DataError> {
    Ok(find_all(folder, &names(split))?.try_into().expect("a path a name"))
}

/// Checks that a set has as many labels as images, and at least one.
fn check_counts(folder: &Path, split: Split, images: usize, labels: usize) -> Result<(), DataError> {
    let [of_images, of_labels] = names(split);
    let problem = if images != labels {
        format!("{images} images in {of_images} and {labels} labels in {of_labels}")
    } else if images == 0 {
        format!("{of_images} holds no image")
    } else {
        return Ok(());
    };
    Err(DataError::Mismatch { folder: folder.to_owned(), problem })
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
    let mut reader = BufReader::with_capacity(1 << 16, open_regular(path)?);
    let gzip = reader.fill_buf()?.starts_with(&GZIP_MAGIC);
    Ok(if gzip { (Box::new(MultiGzDecoder::new(reader)), true) } else { (Box::new(reader), false) })
}

/// Opens a regular file. Anything else could block a reader, or never end.
fn open_regular(path: &Path) -> io::Result<File> {
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
        match open_regular(&path) {
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
    let count = reader.image_header()?;
    reader.body(count * IMAGE_LEN as u64)
}

/// The images of a file, without their labels.
enum Images {
    InMemory(Vec<u8>),
    InFile(ImageFile),
}

impl Images {
    fn len(&self) -> usize {
        match self {
            Images::InMemory(pixels) => pixels.len() / IMAGE_LEN,
            Images::InFile(images) => images.len(),
        }
    }

    fn with_labels(self, labels: Vec<u8>) -> Samples {
        match self {
            Images::InMemory(images) => Dataset { images, labels }.into(),
            Images::InFile(images) => Samples::InFile(Arc::new(FileSamples { images, labels })),
        }
    }
}

fn open_images(path: &Path, keep: KeepImages) -> Result<Images, DataError> {
    let mut reader = Idx::open(path)?;
    let count = reader.image_header()?;
    let bytes = count * IMAGE_LEN as u64;
    let too_many = match keep {
        KeepImages::InMemoryUpTo(limit) => bytes > limit,
        KeepImages::InFile => true,
        KeepImages::InMemory => false,
    };
    if !too_many {
        return Ok(Images::InMemory(reader.body(bytes)?));
    }
    if reader.gzip {
        let mib = |bytes: u64| bytes >> 20;
        let problem = match keep {
            KeepImages::InMemoryUpTo(limit) => format!(
                "{} MiB of compressed images, where {} MiB of memory may be used; decompress the file with gunzip: \
                 then the images are read as they are needed",
                mib(bytes),
                mib(limit)
            ),
            _ => "compressed images cannot be read as they are needed: decompress the file with gunzip"
                .to_owned(),
        };
        return Err(reader.wrong(4, problem));
    }
    let begin = reader.offset;
    let file = open_regular(path).map_err(DataError::io(path))?;
    Ok(Images::InFile(ImageFile::new(path, file, begin, count as usize)))
}

/// The labels of a label file.
///
/// # Errors
/// If the file is unreadable, damaged, or a label is not from 0 to 9.
pub fn read_labels(path: &Path) -> Result<Vec<u8>, DataError> {
    let mut reader = Idx::open(path)?;
    let [count] = reader.header::<1>()?;
    reader.check_count(count, "labels", count)?;
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
    /// Bytes of the file.
    len: u64,
    offset: u64,
}

impl<'a> Idx<'a> {
    fn open(path: &'a Path) -> Result<Self, DataError> {
        let (bytes, gzip) = open_content(path).map_err(DataError::io(path))?;
        let len = fs::metadata(path).map_err(DataError::io(path))?.len();
        Ok(Idx { path, bytes, gzip, len, offset: 0 })
    }

    fn wrong(&self, offset: u64, problem: String) -> DataError {
        DataError::Format { path: self.path.to_owned(), offset, gzip: self.gzip, problem }
    }

    /// Reads up to `count` bytes.
    fn take(&mut self, count: u64) -> Result<Vec<u8>, DataError> {
        let mut bytes = Vec::new();
        if !self.gzip && count < self.len {
            // The file has that many bytes. Without this the memory would grow by doubling.
            let shortage = |_| self.wrong(self.offset, format!("no memory for {count} bytes"));
            bytes.try_reserve_exact(count as usize).map_err(shortage)?;
        }
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

    /// The number of images of an image file.
    fn image_header(&mut self) -> Result<u64, DataError> {
        let [count, rows, columns] = self.header::<3>()?;
        if (rows, columns) != (28, 28) {
            return Err(self.wrong(8, format!("images of {rows}×{columns} pixels where 28×28 are expected")));
        }
        self.check_count(count, "images", count * IMAGE_LEN as u64)?;
        Ok(count)
    }

    /// Checks that `count` elements of `bytes` bytes in total can follow the header.
    fn check_count(&self, count: u64, what: &str, bytes: u64) -> Result<(), DataError> {
        if !self.gzip {
            return self.check_end(self.len, self.offset + bytes);
        }
        if count > MOST_GZIPPED {
            let problem = format!(
                "{count} {what}, more than the {MOST_GZIPPED} of a compressed file: decompress it with gunzip"
            );
            return Err(self.wrong(4, problem));
        }
        Ok(())
    }

    /// Checks that the content, which ends at byte `end`, has the `whole` bytes that its header says.
    fn check_end(&self, end: u64, whole: u64) -> Result<(), DataError> {
        if end < whole {
            Err(self.wrong(end, format!("truncated: by its header the file has {whole} bytes")))
        } else if end > whole {
            Err(self.wrong(whole, "more bytes than its header says".to_owned()))
        } else {
            Ok(())
        }
    }

    /// Exactly `count` bytes, and then the end of the file.
    fn body(&mut self, count: u64) -> Result<Vec<u8>, DataError> {
        let whole = self.offset + count;
        let bytes = self.take(count)?;
        if self.offset == whole {
            self.take(1)?;
        }
        self.check_end(self.offset, whole)?;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests;
