//! `--evaluate` and `--predict`: runs that load a checkpoint, train nothing, and leave it as it is.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use mgpu::checkpoint::Checkpoint;
use mgpu_examples::nets::{Net, Spec};
use mgpu_tests::process::{Finished, run};
use serde_json::Value;

use super::{TRAIN, Tiny};

impl Tiny {
    /// Trains `net` for two epochs on two ranks, with a checkpoint after each. Returns the summary.
    fn trained(&self, net: &str) -> Value {
        let finished = self.saved(TRAIN.launched(2), &["--net", net, "--epochs", "2"]);
        finished.expect(0, &[]).json()
    }

    /// Evaluates `checkpoint` on `ranks` ranks.
    fn evaluate(&self, ranks: u32, checkpoint: &Path, arguments: &[&str]) -> Finished {
        let mut program = TRAIN.launched(ranks);
        program.arg("--evaluate").arg(checkpoint).args(["--json", "--threads", "1", "--batch", "4"]);
        if !arguments.contains(&"--skip-test") {
            program.arg("--data").arg(self.folder.path().join("data"));
        }
        run(program.args(arguments))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// Everything in a folder and below: names, contents and times.
fn tree(folder: &Path) -> BTreeMap<PathBuf, (Vec<u8>, SystemTime)> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let (path, metadata) = (entry.path(), entry.metadata().unwrap());
        if metadata.is_dir() {
            found.extend(tree(&path));
        }
        let content = fs::read(&path).unwrap_or_default();
        found.insert(path, (content, metadata.modified().unwrap()));
    }
    found
}

fn close(a: &Value, b: &Value) -> bool {
    a.as_f64().zip(b.as_f64()).is_some_and(|(a, b)| (a - b).abs() < 1e-6)
}

#[test]
fn an_evaluation_finds_what_the_training_has_found() {
    // keras has running statistics, deep a moving average and an L2 penalty.
    for net in ["keras", "deep"] {
        let tiny = Tiny::new();
        let trained = tiny.trained(net);
        let before = tree(&tiny.checkpoints());
        for ranks in [1, 3] {
            let finished = tiny.evaluate(ranks, &tiny.checkpoints(), &[]);
            finished.expect(0, &["after step 16: test ", "the same on"]);
            let json = finished.json();
            for key in ["net", "weights", "test_acc", "test_acc_average", "steps", "data", "seed", "impl"] {
                assert_eq!(json[key], trained[key], "{key} in {json:#}");
            }
            assert!(close(&json["test_loss"], &trained["test_loss"]), "{json:#}, {trained:#}");
            assert_eq!(json["rank_rss_mib"].as_array().unwrap().len(), ranks as usize);
            assert!(json["checkpoint"].as_str().unwrap().ends_with("step-00000016"), "{json:#}");
            if net == "deep" {
                assert!(close(&json["test_loss_average"], &trained["test_loss_average"]), "{json:#}");
                assert!(close(&json["l2_loss"], &trained["l2_loss"]), "{json:#}");
                finished.expect(0, &["(averaged weights ", "L2 penalty of the weights 0."]);
            }
        }
        assert!(tree(&tiny.checkpoints()) == before, "an evaluation has changed the folder");
    }
}

#[test]
fn the_l2_penalty_is_that_of_the_weights() {
    let tiny = Tiny::new();
    let metrics = tiny.path("metrics");
    let flags = ["--net", "deep", "--epochs", "1", "--skip-test", "--metrics", metrics.to_str().unwrap()];
    let finished = tiny.saved(TRAIN.launched(2), &flags);
    let net: Net = Net::new(&Spec::named("deep").unwrap(), 1, 1);
    let checkpoint = Checkpoint::open(tiny.checkpoints().join("step-00000008")).unwrap();
    let weights = checkpoint.load("weights", net.layout()).unwrap();
    let matrices = net.layout().tensors().iter().filter(|tensor| tensor.shape.len() > 1);
    let squares = matrices.flat_map(|tensor| &weights[tensor.range()]).map(|w| f64::from(*w).powi(2));
    let expected = Value::from(5e-4 / 2.0 * squares.sum::<f64>());
    let epoch: Value = serde_json::from_str(&fs::read_to_string(&metrics).unwrap()).unwrap();
    assert!(close(&epoch["l2_loss"], &expected), "{epoch:#}, {expected}");
    assert!(close(&finished.json()["l2_loss"], &expected), "{finished:#?}");
    finished.expect(0, &[&format!(" + {:.4} (L2) in ", expected.as_f64().unwrap())]);
    // A sum of gradients has another λ, and the same penalty.
    let summed = tiny.run(TRAIN.launched(2), &[&flags[..5], &["--reduction", "sum"]].concat());
    assert_eq!(summed.json()["l2_loss"], finished.json()["l2_loss"]);
    assert!(tiny.run(TRAIN.alone(), &["--steps", "1", "--skip-test"]).json()["l2_loss"].is_null());
}

#[test]
fn a_damaged_checkpoint_is_passed_over_and_keeps_its_name() {
    let tiny = Tiny::new();
    tiny.trained("lenet5");
    tiny.damage(16, "weights.safetensors");
    let before = tree(&tiny.checkpoints());
    let finished = tiny.evaluate(2, &tiny.checkpoints(), &[]);
    let warning = "it is left as it is; evaluating the previous checkpoint ";
    finished.expect(0, &["step-00000016/weights.safetensors", warning, "after step 8: test "]);
    // One that is asked for by name is not replaced by another.
    let newest = tiny.checkpoints().join("step-00000016");
    tiny.evaluate(2, &newest, &[]).expect(1, &["step-00000016/weights.safetensors"]);
    tiny.evaluate(1, &tiny.checkpoints().join("step-00000008"), &[]).expect(0, &["after step 8: test "]);
    assert!(tree(&tiny.checkpoints()) == before, "an evaluation has changed the folder");
    tiny.damage(8, "manifest.json");
    tiny.evaluate(2, &tiny.checkpoints(), &[]).expect(1, &["no intact checkpoint among 2"]);
}

#[test]
fn what_cannot_be_evaluated_is_named() {
    let tiny = Tiny::new();
    tiny.trained("lenet5");
    for (path, text) in [
        ("none", "--evaluate {}: No such file or directory"),
        ("data", "--evaluate {}: no checkpoint is there: give a folder step-…, or one with such folders"),
        ("data/train-labels-idx1-ubyte", "--evaluate {}: Not a directory"),
    ] {
        let path = tiny.path(path);
        let text = text.replace("{}", path.to_str().unwrap());
        tiny.evaluate(2, &path, &[]).expect(1, &[&text]);
    }
    let newest = tiny.checkpoints().join("step-00000016");
    let text = format!("--net keras: the checkpoint {} is of lenet5; leave --net out", newest.display());
    tiny.evaluate(2, &tiny.checkpoints(), &["--net", "keras"]).expect(1, &[&text]);
    tiny.evaluate(2, &newest, &["--net", "lenet5"]).expect(0, &["after step 16: test "]);

    // A checkpoint of another program.
    let other = tiny.path("other");
    let mut writer = mgpu::checkpoint::Writer::new(&other, 1).unwrap();
    writer.save(mgpu_tests::checkpoints::snapshot(3, 1)).unwrap();
    writer.finish().unwrap();
    tiny.evaluate(2, &other, &[]).expect(1, &["step-00000003: not a checkpoint of train_mnist: "]);
}

/// An IDX file of `count` images, all different.
fn write_images(path: &Path, count: u32) {
    let mut bytes = [0x803u32, count, 28, 28].map(u32::to_be_bytes).concat();
    bytes.extend((0..count * 784).map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8));
    fs::write(path, bytes).unwrap();
}

#[test]
fn predictions_do_not_depend_on_ranks_and_are_those_of_the_logits() {
    let tiny = Tiny::new();
    tiny.trained("keras");
    let (images, output, labels) = (tiny.path("my images"), tiny.path("my output"), tiny.path("labels.idx"));
    let [images_, output_, labels_] = [&images, &output, &labels].map(|path| path.to_str().unwrap());
    for count in [0, 1, 7] {
        write_images(&images, count);
        let mut texts = Vec::new();
        for ranks in [1, 2, 3] {
            let flags = ["--skip-test", "--predict", images_, "--output", output_];
            let finished = tiny.evaluate(ranks, &tiny.checkpoints(), &flags);
            finished.expect(0, &[&format!("{count} predictions in {output_}")]);
            let json = finished.json();
            assert_eq!((&json["predicted"], &json["test_acc"]), (&count.into(), &Value::Null));
            texts.push(fs::read_to_string(&output).unwrap());
        }
        assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
        let lines: Vec<Value> = texts[0].lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), count as usize);
        let mut classes = Vec::new();
        for (index, line) in lines.iter().enumerate() {
            let probabilities: Vec<f64> =
                line["probabilities"].as_array().unwrap().iter().map(|p| p.as_f64().unwrap()).collect();
            let class = line["class"].as_u64().unwrap();
            assert_eq!((line["index"].as_u64(), probabilities.len()), (Some(index as u64), 10));
            assert!((probabilities.iter().sum::<f64>() - 1.0).abs() < 1e-5, "{line}");
            assert!(probabilities.iter().all(|p| *p <= probabilities[class as usize]), "{line}");
            classes.push(class as u8);
        }
        let flags = ["--skip-test", "--predict", images_, "--output", labels_];
        tiny.evaluate(2, &tiny.checkpoints(), &flags).expect(0, &[]);
        let expected = [&[0, 0, 8, 1][..], &count.to_be_bytes(), &classes].concat();
        assert_eq!(fs::read(&labels).unwrap(), expected);
    }

    let (test, logits) = (tiny.path("data/t10k-images-idx3-ubyte"), tiny.path("logits.json"));
    let flags =
        ["--predict", test.to_str().unwrap(), "--output", output_, "--logits", logits.to_str().unwrap()];
    tiny.evaluate(2, &tiny.checkpoints(), &flags).expect(0, &["16 predictions in ", "after step 16: test "]);
    let logits: Value = serde_json::from_slice(&fs::read(logits).unwrap()).unwrap();
    let text = fs::read_to_string(&output).unwrap();
    for (line, logits) in text.lines().zip(logits["logits"].as_array().unwrap()) {
        let line: Value = serde_json::from_str(line).unwrap();
        let number = |values: &Value, index: usize| values[index].as_f64().unwrap();
        for class in 0..10 {
            let (ratio, difference) = (
                number(&line["probabilities"], class) / number(&line["probabilities"], 0),
                number(logits, class) - number(logits, 0),
            );
            assert!((ratio.ln() - difference).abs() < 1e-4, "{line} and {logits}");
        }
    }
}

#[test]
fn many_images_are_predicted_in_rounds() {
    let tiny = Tiny::new();
    tiny.trained("lenet5");
    let (images, output) = (tiny.path("images"), tiny.path("output"));
    write_images(&images, 4100);
    // Two rounds, and one.
    let texts = [1, 2].map(|ranks| {
        let [images, output] = [&images, &output].map(|path| path.to_str().unwrap());
        let flags = ["--skip-test", "--predict", images, "--output", output];
        tiny.evaluate(ranks, &tiny.checkpoints(), &flags).expect(0, &["4100 predictions in "]);
        fs::read_to_string(output).unwrap()
    });
    assert!(texts[0] == texts[1]);
    let last: Value = serde_json::from_str(texts[0].lines().nth(4099).unwrap()).unwrap();
    assert_eq!((&last["index"], texts[0].lines().count()), (&4099.into(), 4100));
}

#[test]
fn logits_that_cannot_be_written_do_not_end_an_evaluation() {
    let tiny = Tiny::new();
    tiny.trained("lenet5");
    let finished = tiny.evaluate(2, &tiny.checkpoints(), &["--logits", "/dev/full"]);
    let warning =
        "cannot write --logits /dev/full: No space left on device (os error 28); evaluation continues";
    finished.expect(0, &["after step 16: test ", warning]);
    assert!(!finished.stderr.contains("training"), "{finished:#?}");
}

#[test]
fn what_cannot_be_predicted_is_named_and_leaves_the_output_alone() {
    let tiny = Tiny::new();
    tiny.trained("lenet5");
    let (images, output) = (tiny.path("images.idx"), tiny.path("output.jsonl"));
    let [images_, output_] = [&images, &output].map(|path| path.to_str().unwrap().to_owned());
    fs::write(&output, "mine").unwrap();
    let predict = |output: &str| {
        let flags = ["--skip-test", "--predict", &images_, "--output", output];
        tiny.evaluate(2, &tiny.checkpoints(), &flags)
    };
    predict(&output_).expect(1, &[&format!("--predict: {images_}: No such file or directory")]);
    write_images(&images, 3);
    let good = fs::read(&images).unwrap();
    for (bytes, text) in [
        (&good[..1000], "at byte 1000: truncated: by its header the file has 2368 bytes"),
        (&good[..9], "at byte 9: truncated: the header has 16 bytes"),
        (&[&good[..15], &[32], &good[16..]].concat(), "at byte 8: images of 28×32 pixels where 28×28"),
        (&[&good[..], &[0]].concat(), "at byte 2368: more bytes than its header says"),
        (b"\x00\x00\x08\x01\x00\x00\x00\x00", "at byte 3: 1 dimensions where 3 are expected"),
    ] {
        fs::write(&images, bytes).unwrap();
        predict(&output_).expect(1, &[&format!("train_mnist: --predict: {images_} {text}")]);
    }
    fs::write(&images, good).unwrap();
    assert_eq!(fs::read_to_string(&output).unwrap(), "mine");

    predict("/dev/full").expect(1, &["cannot write --output /dev/full: No space left on device"]);
    predict("/nonexistent/x").expect(1, &["cannot write --output /nonexistent/x: No such file"]);
    predict(&images_).expect(1, &["is the file of --predict, which it would replace"]);
    predict("x.jsonl.gz").expect(1, &["--output x.jsonl.gz: predictions are not compressed"]);
    let folder = tiny.folder.path().to_str().unwrap();
    predict(folder).expect(1, &[&format!("cannot write --output {folder}: it is a folder")]);
    predict(&output_).expect(0, &["3 predictions in "]);
    assert_eq!(fs::read_to_string(&output).unwrap().lines().count(), 3);
}
