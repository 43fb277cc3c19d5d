//! The reader with complete, damaged and hostile files.

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
    let mut lying = images(2);
    lying[4..8].fill(255);
    let zipped = gzip(&labels(&[1, 2, 3]));
    let mut bad_sum = zipped.clone();
    bad_sum[zipped.len() - 8] ^= 1;
    // 2⁹⁶ bytes according to the header.
    let vast = [&[0, 0, 8, 3][..], &[255; 12]].concat();
    for (result, texts) in [
        (parse_labels(&[]), ["at byte 0", "truncated"]),
        (parse_labels(&labels(&[1])[..6]), ["at byte 6", "truncated"]),
        (parse_labels(&labels(&[1, 2, 3])[..10]), ["at byte 10", "the file has 11 bytes"]),
        (parse_labels(&images(1)), ["at byte 3", "3 dimensions where 1 are expected"]),
        (parse_labels(&labels(&[1, 2, 10])), ["at byte 10", "label 10 of sample 2"]),
        (parse_labels(b"PNG file"), ["at byte 0", "not an IDX file"]),
        (parse_labels(&long), ["at byte 9", "more bytes than its header says"]),
        (parse_labels(&huge), ["at byte 9", "the file has 4278190089 bytes"]),
        (parse_labels(&gzip(&huge)), ["at byte 4 after", "4278190081 labels, more than the 1000000"]),
        (parse_images(&lying), ["at byte 1584", "the file has 3367254359296 bytes"]),
        (parse_images(&gzip(&lying)), ["at byte 4 after", "decompress it with gunzip"]),
        (parse_labels(&zipped[..zipped.len() - 6]), ["at byte 11 after decompression", "cannot be read"]),
        (parse_labels(&bad_sum), ["at byte 11 after decompression", "cannot be read"]),
        (parse_labels(&[&zipped[..], b"more"].concat()), ["after decompression", "cannot be read"]),
        (parse_labels(&gzip(&long)), ["at byte 9 after decompression", "more bytes"]),
        (parse_images(&vast), ["at byte 8", "pixels"]),
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
    assert!(error.contains("the folder has no files"), "{error}");
    let all = "missing train-images-idx3-ubyte[.gz], train-labels-idx1-ubyte[.gz], \
               t10k-images-idx3-ubyte[.gz], t10k-labels-idx1-ubyte[.gz]";
    assert!(error.contains(all), "{error}");
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
fn the_error_lists_the_files_of_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    for number in 0..10 {
        fs::write(folder.path().join(format!("cat{number}.jpg")), b"").unwrap();
    }
    fs::create_dir(folder.path().join("train-images")).unwrap();
    let error = read(folder.path()).unwrap_err().to_string();
    assert!(error.contains("missing train-images-idx3-ubyte[.gz]"), "{error}");
    assert!(error.contains("the folder has cat0.jpg, cat1.jpg"), "{error}");
    assert!(error.contains("and 3 more"), "{error}");
}

#[test]
fn all_spellings_are_found_and_the_name_does_not_decide_what_is_gzipped() {
    let bytes = labels(&[4, 2]);
    for (suffix, content) in [
        ("-idx1-ubyte", gzip(&bytes)),
        ("-idx1-ubyte.gz", bytes.clone()),
        (".idx1-ubyte", bytes.clone()),
        (".idx1-ubyte.gz", gzip(&bytes)),
    ] {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(format!("t10k-labels{suffix}")), content).unwrap();
        fs::write(folder.path().join("t10k-images-idx3-ubyte"), images(2)).unwrap();
        assert_eq!(read_split(folder.path(), Split::Test).unwrap().labels, [4, 2], "{suffix}");
    }
}

#[test]
fn images_stay_in_an_uncompressed_file_if_they_are_too_many() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| fs::write(folder.path().join(name), bytes).unwrap();
    let [images_name, labels_name] = names(Split::Train);
    write(images_name, &images(3));
    write(labels_name, &gzip(&labels(&[1, 2, 3])));
    let open = |keep| super::open(folder.path(), Split::Train, keep);
    let exactly = 3 * IMAGE_LEN as u64;
    let in_memory = open(KeepImages::InMemoryUpTo(exactly)).unwrap();
    assert_eq!((in_memory.file(), in_memory.len()), (None, 3));
    for keep in [KeepImages::InFile, KeepImages::InMemoryUpTo(exactly - 1)] {
        let in_file = open(keep).unwrap();
        assert_eq!(in_file.file(), Some(&*folder.path().join(images_name)));
        let (mut here, mut there) = (Dataset::default(), Dataset::default());
        in_memory.read(&[2, 0, 1], &mut here).unwrap();
        in_file.read(&[2, 0, 1], &mut there).unwrap();
        assert_eq!(here, there);
        assert_eq!(in_memory.checksum().unwrap(), in_file.checksum().unwrap());
    }

    // A header that lies is found before any image is read.
    write(images_name, &images(3)[..1000]);
    let error = open(KeepImages::InFile).unwrap_err().to_string();
    assert!(error.contains("at byte 1000: truncated: by its header the file has 2368 bytes"), "{error}");
    write(labels_name, &labels(&[1, 2]));
    write(images_name, &images(3));
    let error = open(KeepImages::InFile).unwrap_err().to_string();
    assert!(error.contains("3 images in train-images-idx3-ubyte and 2 labels"), "{error}");

    write(images_name, &gzip(&images(2)));
    for (keep, text) in [
        (
            KeepImages::InFile,
            "at byte 4 after decompression: compressed images cannot be read as they are needed",
        ),
        (KeepImages::InMemoryUpTo(1), "0 MiB of compressed images, where 0 MiB of memory may be used"),
    ] {
        let error = open(keep).unwrap_err().to_string();
        assert!(error.contains(text) && error.contains("gunzip"), "{error}");
    }
    assert_eq!(open(KeepImages::InMemory).unwrap().len(), 2);
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
    fn arbitrary_bytes_do_not_panic(bytes in any::<Vec<u8>>()) {
        let _ = (parse_labels(&bytes), parse_images(&bytes));
    }

    #[test]
    fn damaged_files_do_not_panic(at in 0usize..900, value: u8, cut in 0usize..900, zip: bool) {
        let mut bytes = if zip { gzip(&images(1)) } else { images(1) };
        let len = bytes.len();
        bytes[at % len] = value;
        bytes.truncate(cut % (len + 1));
        let _ = (parse_images(&bytes), parse_labels(&bytes));
    }
}

#[test]
fn non_regular_files_are_errors_and_never_block() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("train-images-idx3-ubyte");
    let of_images = |problem: &str| {
        let error = read(folder.path()).unwrap_err().to_string();
        assert_eq!(error, format!("{}: {problem}", path.display()));
        assert_eq!(read_images(&path).unwrap_err().to_string(), error);
        fs::remove_file(&path).or_else(|_| fs::remove_dir(&path)).unwrap();
    };
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    of_images("it is a named pipe, where a file is expected");
    fs::create_dir(&path).unwrap();
    of_images("it is a folder, where a file is expected");
    for (target, problem) in [
        ("train-images-idx3-ubyte", "Too many levels of symbolic links (os error 40)"),
        ("nowhere", "No such file or directory (os error 2)"),
        ("/dev/zero", "it is a device, where a file is expected"),
    ] {
        std::os::unix::fs::symlink(target, &path).unwrap();
        of_images(problem);
    }
    // A folder of that name does not matter if the file exists in another spelling.
    fs::create_dir(&path).unwrap();
    fs::write(path.with_extension("gz"), images(2)).unwrap();
    assert_eq!(find(folder.path(), "train-images-idx3-ubyte").unwrap(), Some(path.with_extension("gz")));
    let error = read(&path.with_extension("gz")).unwrap_err().to_string();
    assert_eq!(error, format!("{}: not a directory", path.with_extension("gz").display()));
}
