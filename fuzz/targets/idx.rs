//! Reads arbitrary bytes as an IDX file. The result is images or labels, or an error.
#![no_main]

use std::fs::File;
use std::io::Write;

use libfuzzer_sys::fuzz_target;
use mgpu_examples::data::idx;

fuzz_target!(|bytes: &[u8]| {
    thread_local! {
        static FOLDER: tempfile::TempDir = tempfile::tempdir().expect("a folder");
    }
    FOLDER.with(|folder| {
        let path = folder.path().join("file");
        File::create(&path).and_then(|mut file| file.write_all(bytes)).expect("a file");
        if let Ok(images) = idx::read_images(&path) {
            assert_eq!(images.len() % (28 * 28), 0);
        }
        let _ = idx::read_labels(&path);
    });
});
