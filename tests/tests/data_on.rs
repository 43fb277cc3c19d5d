//! `--data-on`: images that stay in their file give the weights of images in memory, and a file that becomes damaged
//! is an error that names it.

use std::fs::{self, OpenOptions};
use std::path::Path;
use std::process::{Command, Stdio};

use mgpu_tests::mnist::write_digits;
use mgpu_tests::process::{self, Finished, Program, run, until};

const TRAIN: Program =
    Program { launcher: env!("CARGO_BIN_EXE_t-mgpurun"), path: env!("CARGO_BIN_EXE_t-train_mnist") };
const IMAGES: &str = "train-images-idx3-ubyte";

fn train(mut program: Command, data: &Path, data_on: &str, arguments: &[&str]) -> Finished {
    program.args(["--json", "--threads", "1", "--data-on", data_on, "--data"]).arg(data);
    run(program.args(arguments))
}

#[test]
fn images_in_a_file_give_the_weights_of_images_in_memory() {
    let folder = tempfile::tempdir().unwrap();
    write_digits(folder.path(), 47, 16);
    // Epochs of 9, 5 and 3 steps; ranks and micro-batches of different sizes; the layers cut over ranks.
    for (ranks, more) in [
        (1, &["--batch", "5"][..]),
        (2, &["--global-batch", "9", "--accumulate", "2"]),
        (2, &["--batch", "12", "--accumulate", "3", "--placement", "layers", "--cut", "7"]),
    ] {
        let more = [&["--epochs", "3"], more].concat();
        let [memory, file] =
            ["host", "disk"].map(|on| train(TRAIN.launched(ranks), folder.path(), on, &more));
        assert_eq!(memory.weights(), file.weights(), "{ranks} ranks, {more:?}");
        for key in ["test_loss", "test_acc"] {
            assert_eq!(memory.json()[key], file.json()[key], "{ranks} ranks, {more:?}");
        }
        file.expect(0, &["images read as they are needed"]);
        assert!(!memory.stdout.contains("images read as they are needed"), "{memory:#?}");
        // Small sets are kept in memory.
        let auto = train(TRAIN.launched(ranks), folder.path(), "auto", &more);
        assert!(!auto.stdout.contains("images read as they are needed"), "{auto:#?}");
    }
}

#[test]
fn a_run_continues_with_its_images_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    write_digits(&data, 47, 16);
    let kept = folder.path().join("checkpoints");
    let kept = ["--schedule", "constant", "--resume", "--checkpoint-dir", kept.to_str().unwrap()];
    let go_on = |on, steps| {
        train(TRAIN.launched(2), &data, on, &[&kept[..], &["--batch", "5", "--steps", steps]].concat())
    };
    go_on("disk", "6").expect(0, &[]);
    let resumed = go_on("host", "11").expect(0, &["after step 6"]).weights();
    let whole =
        train(TRAIN.launched(2), &data, "disk", &["--schedule", "constant", "--batch", "5", "--steps", "11"]);
    assert_eq!(resumed, whole.weights());
}

#[test]
fn an_evaluation_and_predictions_read_files() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    write_digits(&data, 20, 16);
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    train(TRAIN.alone(), &data, "disk", &["--steps", "3", "--checkpoint-dir", &path("c")]).expect(0, &[]);
    let found = ["host", "disk"].map(|on| {
        let (images, output) = (data.join(IMAGES), path(on));
        let flags = ["--evaluate", &path("c"), "--predict", images.to_str().unwrap(), "--output", &output];
        let logits = path(&format!("{on}-logits"));
        let mut program = TRAIN.launched(2);
        program.args(["--json", "--threads", "1", "--data-on", on, "--data"]).arg(&data);
        let json = run(program.args(flags).args(["--logits", &logits])).expect(0, &[]).json();
        (fs::read(output).unwrap(), fs::read(logits).unwrap(), json["test_loss"].clone())
    });
    assert_eq!(found[0], found[1]);
}

#[test]
fn a_file_that_becomes_shorter_is_an_error_with_its_name_and_offset() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    write_digits(&data, 200, 16);
    let metrics = folder.path().join("metrics");
    let mut program = TRAIN.launched(2);
    program.args(["--threads", "1", "--batch", "5", "--skip-test", "--epochs", "1000000"]);
    program.args(["--data-on", "disk", "--data"]).arg(&data).arg("--metrics").arg(&metrics);
    let mut child = program.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    until(|| fs::read_to_string(&metrics).is_ok_and(|text| text.contains('\n')));
    let images = data.join(IMAGES);
    OpenOptions::new().write(true).open(&images).unwrap().set_len(16 + 50 * 784 + 7).unwrap();
    let finished = process::finish(&mut child);
    finished.expect(1, &[IMAGES, "at byte", "truncated while it was in use: it had 156816 bytes"]);
    assert!(!finished.stderr.contains("panicked"), "{finished:#?}");
}

#[test]
fn what_cannot_be_read_from_a_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    write_digits(folder.path(), 20, 16);
    let refused = |arguments: &[&str], texts: &[&str]| {
        let mut program = TRAIN.alone();
        run(program.args(["--steps", "1", "--data-on", "disk"]).args(arguments)).expect(1, texts);
    };
    refused(
        &["--synthetic"],
        &["--data-on disk needs --data DIR with uncompressed files, not generated digits"],
    );
    let images = folder.path().join(IMAGES);
    // A header that lies: more images than the file has, and than could be.
    let mut bytes = fs::read(&images).unwrap();
    bytes[4..8].fill(255);
    fs::write(&images, &bytes).unwrap();
    let data = folder.path().to_str().unwrap();
    refused(
        &["--data", data],
        &[IMAGES, "at byte 15696", "truncated: by its header the file has 3367254359296 bytes"],
    );
    train(TRAIN.alone(), folder.path(), "auto", &["--steps", "1"]).expect(1, &[IMAGES, "truncated"]);
}

#[test]
fn digits_are_written_as_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("digits");
    let write = || {
        let mut program = TRAIN.alone();
        run(program.args(["--images", "30", "--seed", "1", "--write-digits"]).arg(&path))
    };
    write().expect(0, &[]);
    let expected = tempfile::tempdir().unwrap();
    write_digits(expected.path(), 30, 16);
    assert_eq!(fs::read(path.join(IMAGES)).unwrap(), fs::read(expected.path().join(IMAGES)).unwrap());
    train(TRAIN.alone(), &path, "disk", &["--steps", "2"]).expect(0, &[]);
    write().expect(1, &["train-images-idx3-ubyte: File exists"]);
}
