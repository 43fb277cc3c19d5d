//! The IDX format of the MNIST files, gzipped or not.
//!
//! A file is a magic number (two zero bytes, 8 for unsigned bytes, the number of dimensions), a big-endian `u32` for
//! each extent, and the elements. The bytes come from outside: nothing is allocated because a header says so, but
//! only as data arrives, and every mistake names file and offset.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::bufread::MultiGzDecoder;

use super::{DataError, Dataset, IMAGE_LEN, Mnist, Origin, Split};

/// Most images a file may hold; more is a damaged header.
const MOST_IMAGES: u64 = 10_000_000;
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
/// If a file is missing, unreadable or damaged, or files do not belong together; names file and byte.
pub fn read(folder: &Path) -> Result<Mnist, DataError> {
    find_all(folder)?;
    let (train, test) = (read_split(folder, Split::Train)?, read_split(folder, Split::Test)?);
    Ok(Mnist { train, test, origin: Origin::Files(folder.to_owned()) })
}

/// Reads one set from `folder`.
///
/// # Errors
/// As [`read`].
pub fn read_split(folder: &Path, split: Split) -> Result<Dataset, DataError> {
    let [images, labels] = names(split).map(|name| find(folder, name));
    let missing: Vec<String> =
        [&images, &labels].into_iter().filter_map(|found| found.as_ref().err().cloned()).collect();
    let (Ok(images), Ok(labels)) = (images, labels) else {
        return Err(missing_in(folder, missing));
    };
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

/// Looks for all four files before any is read, so that the error lists all that are missing.
fn find_all(folder: &Path) -> Result<(), DataError> {
    let all = [Split::Train, Split::Test].into_iter().flat_map(names);
    let missing: Vec<String> = all.filter_map(|name| find(folder, name).err()).collect();
    if missing.is_empty() { Ok(()) } else { Err(missing_in(folder, missing)) }
}

fn missing_in(folder: &Path, missing: Vec<String>) -> DataError {
    match folder.metadata() {
        Err(error) => DataError::io(folder)(error),
        Ok(_) => DataError::Missing { folder: folder.to_owned(), missing },
    }
}

/// The file called `name`, in any of the spellings that are about.
fn find(folder: &Path, name: &str) -> Result<PathBuf, String> {
    let dotted = name.replace("-idx", ".idx");
    let spellings = [name.to_owned(), format!("{name}.gz"), dotted.clone(), format!("{dotted}.gz")];
    let path = spellings.iter().map(|spelling| folder.join(spelling)).find(|path| path.is_file());
    path.ok_or_else(|| format!("{name}[.gz]"))
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
    offset: u64,
}

impl<'a> Idx<'a> {
    /// Opens a file; whether it is gzipped is seen by its first bytes, not its name.
    fn open(path: &'a Path) -> Result<Self, DataError> {
        let file = File::open(path).map_err(DataError::io(path))?;
        let mut reader = BufReader::with_capacity(1 << 16, file);
        let gzip = reader.fill_buf().map_err(DataError::io(path))?.starts_with(&GZIP_MAGIC);
        let bytes: Box<dyn Read> =
            if gzip { Box::new(MultiGzDecoder::new(reader)) } else { Box::new(reader) };
        Ok(Idx { path, bytes, offset: 0 })
    }

    fn wrong(&self, offset: u64, problem: String) -> DataError {
        DataError::Format { path: self.path.to_owned(), offset, problem }
    }

    /// Reads up to `count` bytes.
    fn take(&mut self, count: u64) -> Result<Vec<u8>, DataError> {
        let mut bytes = Vec::new();
        let result = (&mut self.bytes).take(count).read_to_end(&mut bytes);
        self.offset += bytes.len() as u64;
        match result {
            Ok(_) => Ok(bytes),
            // The decoder's words for damaged compressed data.
            Err(error) => Err(self.wrong(self.offset, format!("cannot be read: {error}"))),
        }
    }

    /// The extents.
    fn header<const DIMENSIONS: usize>(&mut self) -> Result<[u64; DIMENSIONS], DataError> {
        let bytes = self.take(4 + 4 * DIMENSIONS as u64)?;
        let expected = [0, 0, 8, DIMENSIONS as u8];
        if let Some(magic) = bytes.get(..4)
            && magic != expected
        {
            let problem =
                format!("begins with {magic:02x?} where {expected:02x?} is expected: not this kind of file");
            return Err(self.wrong(0, problem));
        }
        if bytes.len() < 4 + 4 * DIMENSIONS {
            return Err(self.wrong(self.offset, format!("truncated: the header has {}", 4 + 4 * DIMENSIONS)));
        }
        let extent = |index: usize| {
            let start = 4 + 4 * index;
            u32::from_be_bytes([bytes[start], bytes[start + 1], bytes[start + 2], bytes[start + 3]]).into()
        };
        Ok(std::array::from_fn(extent))
    }

    /// Exactly `count` bytes and then the end.
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
mod tests {
    use std::fs;
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;
    use proptest::prelude::*;

    use super::*;

    fn labels(values: &[u8]) -> Vec<u8> {
        let mut bytes = [0x801, values.len() as u32].map(u32::to_be_bytes).concat();
        bytes.extend(values);
        bytes
    }

    fn images(count: u32) -> Vec<u8> {
        let mut bytes = [0x803, count, 28, 28].map(u32::to_be_bytes).concat();
        bytes.extend((0..count as usize * IMAGE_LEN).map(|index| index as u8));
        bytes
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn parse_labels(bytes: &[u8]) -> Result<Vec<u8>, DataError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), bytes).unwrap();
        read_labels(file.path())
    }

    fn parse_images(bytes: &[u8]) -> Result<Vec<u8>, DataError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), bytes).unwrap();
        read_images(file.path())
    }

    #[test]
    fn raw_and_gzipped_files_are_read() {
        let bytes = labels(&[3, 0, 9]);
        assert_eq!(parse_labels(&bytes).unwrap(), [3, 0, 9]);
        assert_eq!(parse_labels(&gzip(&bytes)).unwrap(), [3, 0, 9]);
        assert_eq!(parse_images(&gzip(&images(2))).unwrap().len(), 2 * IMAGE_LEN);
    }

    #[test]
    fn each_mistake_names_its_byte() {
        let mut wide = images(1);
        wide[15] = 29;
        let mut long = labels(&[1]);
        long.push(0);
        let mut huge = labels(&[1]);
        huge[4] = 255;
        let zipped = gzip(&labels(&[1, 2, 3]));
        for (result, texts) in [
            (parse_labels(&[]), ["at byte 0", "truncated"]),
            (parse_labels(&labels(&[1])[..6]), ["at byte 6", "truncated"]),
            (parse_labels(&labels(&[1, 2, 3])[..10]), ["at byte 10", "the file has 11 bytes"]),
            (parse_labels(&images(1)), ["at byte 0", "not this kind of file"]),
            (parse_labels(&labels(&[1, 2, 10])), ["at byte 10", "label 10 of sample 2"]),
            (parse_labels(&long), ["at byte 9", "more bytes than its header says"]),
            (parse_labels(&huge), ["at byte 4", "more than any such file has"]),
            (parse_labels(&zipped[..zipped.len() - 6]), ["at byte", "cannot be read"]),
            (parse_images(&wide), ["at byte 8", "images of 28×29 pixels"]),
            (parse_images(&images(3)[..1000]), ["at byte 1000", "truncated"]),
        ] {
            let error = result.unwrap_err().to_string();
            assert!(texts.iter().all(|text| error.contains(text)), "`{error}` should have {texts:?}");
        }
    }

    #[test]
    fn folders_are_checked_as_a_whole() {
        let folder = tempfile::tempdir().unwrap();
        let error = read(folder.path()).unwrap_err().to_string();
        let all = "missing train-images-idx3-ubyte[.gz], train-labels-idx1-ubyte[.gz], \
                   t10k-images-idx3-ubyte[.gz], t10k-labels-idx1-ubyte[.gz]";
        assert!(error.ends_with(all), "{error}");
        assert!(matches!(read(&folder.path().join("none")), Err(DataError::Io { .. })));
        let write = |name: &str, bytes: &[u8]| fs::write(folder.path().join(name), bytes).unwrap();
        write("train-images.idx3-ubyte", &images(2));
        write("train-labels-idx1-ubyte.gz", &gzip(&labels(&[1, 2])));
        write("t10k-images-idx3-ubyte", &images(1));
        write("t10k-labels-idx1-ubyte", &labels(&[1, 2]));
        let error = read(folder.path()).unwrap_err().to_string();
        assert!(error.contains("1 images in t10k-images-idx3-ubyte and 2 labels"), "{error}");
        write("t10k-labels-idx1-ubyte", &labels(&[5]));
        let mnist = read(folder.path()).unwrap();
        assert_eq!((mnist.train.len(), mnist.test.len()), (2, 1));
    }

    #[test]
    fn the_original_is_whole() {
        let Some(folder) = std::env::var_os("MGPU_DATA") else {
            println!("skipped: set MGPU_DATA to read the original files");
            return;
        };
        let mnist = read(Path::new(&folder)).unwrap();
        assert_eq!((mnist.train.len(), mnist.test.len()), (60_000, 10_000));
        assert_eq!(mnist.train.labels[..5], [5, 0, 4, 1, 9]);
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in any::<Vec<u8>>()) {
            let _ = (parse_labels(&bytes), parse_images(&bytes));
        }

        #[test]
        fn damaged_files_are_survived(at in 0usize..900, value: u8, cut in 0usize..900, zip: bool) {
            let mut bytes = if zip { gzip(&images(1)) } else { images(1) };
            let len = bytes.len();
            bytes[at % len] = value;
            bytes.truncate(cut % (len + 1));
            let _ = (parse_images(&bytes), parse_labels(&bytes));
        }
    }
}
