//! The file that keeps the results (`--out`), so that a sweep can be continued (`--resume`).
//!
//! Every run is appended as a line as soon as it has ended, and the line is flushed to the disk. A sweep that is killed
//! in between leaves an incomplete last line at most; that run is repeated.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use super::record::{Conditions, Record, Run};

/// An open results file.
#[derive(Debug)]
pub(super) struct ResultsFile {
    path: PathBuf,
    /// `None` after a write has failed: a later line would follow an incomplete one.
    file: Option<File>,
}

impl ResultsFile {
    /// Opens the file and locks it. Returns the runs that it contains, which must be of the same `conditions`.
    ///
    /// # Errors
    /// If the file cannot be opened or read, another sweep uses it, it has results and `resume` is false, or it is not
    /// a results file of this sweep. Nothing in it has changed then.
    pub(super) fn open(
        path: &Path,
        conditions: &Conditions,
        resume: bool,
    ) -> Result<(Self, Vec<Run>), String> {
        let name = path.display();
        let failed =
            |what: &str, error: &dyn std::fmt::Display| format!("cannot {what} --out {name}: {error}");
        let mut options = OpenOptions::new();
        let mut file = options
            .read(true)
            .append(true)
            .create(true)
            .open(path)
            .map_err(|error| failed("open", &error))?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => return Err(format!("another sweep is writing to --out {name}")),
            // Some file systems have no locks.
            Ok(()) | Err(TryLockError::Error(_)) => {}
        }
        let mut text = String::new();
        if file.metadata().is_ok_and(|metadata| metadata.is_file()) {
            file.read_to_string(&mut text).map_err(|error| failed("read", &error))?;
        }
        if !text.is_empty() && !resume {
            return Err(format!(
                "--out {name} has results already; continue with --resume, or choose another file"
            ));
        }
        // What follows the last line feed was cut off.
        let complete = text.rfind('\n').map_or(0, |end| end + 1);
        let runs = parse(&text[..complete], conditions)
            .map_err(|why| format!("--resume cannot continue {name}: {why}"))?;
        if complete < text.len() {
            file.set_len(complete as u64).map_err(|error| failed("shorten", &error))?;
        }
        let mut results = ResultsFile { path: path.to_owned(), file: Some(file) };
        if complete == 0 {
            results.append(&Record::Sweep(conditions.clone()))?;
        }
        Ok((results, runs))
    }

    /// Appends a line. Does nothing after an error.
    ///
    /// # Errors
    /// If it cannot be written, on a full disk for instance. Returned once.
    pub(super) fn append(&mut self, record: &Record) -> Result<(), String> {
        let Some(mut file) = self.file.take() else { return Ok(()) };
        let line = serde_json::to_string(record).expect("a record has strings and numbers only") + "\n";
        let flushed = |file: &File| match file.sync_data() {
            // A device or a pipe.
            Err(error) if error.kind() == ErrorKind::InvalidInput => Ok(()),
            other => other,
        };
        match file.write_all(line.as_bytes()).and_then(|()| flushed(&file)) {
            Ok(()) => {
                self.file = Some(file);
                Ok(())
            }
            Err(error) => Err(format!("cannot write to --out {}: {error}", self.path.display())),
        }
    }
}

/// The runs in the complete lines of a results file; the last one counts if a run was repeated.
fn parse(text: &str, conditions: &Conditions) -> Result<Vec<Run>, String> {
    let mut runs: Vec<Run> = Vec::new();
    for (line, number) in text.lines().zip(1..) {
        match serde_json::from_str(line) {
            Ok(Record::Sweep(filed)) if number == 1 => {
                if let Some(difference) = conditions.difference(&filed) {
                    return Err(format!("it is of another sweep by {difference}; choose another --out"));
                }
            }
            Ok(Record::Run(run)) if number > 1 => {
                runs.retain(|earlier| !earlier.is_same_run(&run));
                runs.push(run);
            }
            Ok(_) => return Err(format!("line {number} is not in its place; choose another --out")),
            Err(error) => {
                return Err(format!("line {number} is no result of a sweep ({error}); choose another --out"));
            }
        }
    }
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::super::summary::tests::{failure, run};
    use super::*;

    fn conditions() -> Conditions {
        Conditions {
            command: vec!["prog".into(), "--a b".into()],
            scaling: "weak".into(),
            launch_options: vec!["--bind=core".into()],
            machine: "a processor, 2 cores".into(),
        }
    }

    fn resume(path: &Path) -> Result<Vec<Run>, String> {
        ResultsFile::open(path, &conditions(), true).map(|(_, runs)| runs)
    }

    #[test]
    fn runs_are_read_back_and_incomplete_lines_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a sweep.jsonl");
        let (mut file, none) = ResultsFile::open(&path, &conditions(), true).unwrap();
        assert!(none.is_empty());
        let first = run(1, &[("--p", "x")], 1, json!({"a_s": 0.1, "text": "ü\n"}));
        file.append(&Record::Run(failure(2, &[], "it\nfailed"))).unwrap();
        file.append(&Record::Run(first.clone())).unwrap();
        file.append(&Record::Run(run(2, &[], 1, json!({})))).unwrap();
        assert!(resume(&path).unwrap_err().contains("another sweep is writing"));
        drop(file);
        let runs = resume(&path).unwrap();
        assert_eq!(runs, [first, run(2, &[], 1, json!({}))]);
        let whole = fs::read_to_string(&path).unwrap();
        fs::write(&path, &whole[..whole.len() - 9]).unwrap();
        assert_eq!(resume(&path).unwrap().len(), 2);
        let error = ResultsFile::open(&path, &conditions(), false).unwrap_err();
        assert!(error.contains("has results already; continue with --resume"), "{error}");
        assert!(whole.starts_with(&fs::read_to_string(&path).unwrap()));
        // Killed within the first line.
        fs::write(&path, &whole[..20]).unwrap();
        assert_eq!(resume(&path).unwrap(), []);
        assert!(whole.starts_with(&fs::read_to_string(&path).unwrap()));
    }

    #[test]
    fn files_of_other_sweeps_are_refused_unchanged() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sweep.jsonl");
        let line = |record: &Record| serde_json::to_string(record).unwrap() + "\n";
        let of = |change: fn(&mut Conditions)| {
            let mut changed = conditions();
            change(&mut changed);
            line(&Record::Sweep(changed))
        };
        let run = line(&Record::Run(run(1, &[], 1, json!({}))));
        for (text, error) in [
            (of(|other| other.command[1] = "-c".into()), "by its command: `prog -c`, not `prog '--a b'`"),
            (of(|other| other.scaling = "strong".into()), "by its scaling: strong, not weak"),
            (
                of(|other| other.launch_options.clear()),
                "by its options of the launches: ``, not `--bind=core`",
            ),
            (of(|other| other.machine = "x".into()), "by its machine: x, not a processor, 2 cores"),
            (run.clone(), "line 1 is not in its place"),
            (of(|_| ()) + &of(|_| ()), "line 2 is not in its place"),
            (of(|_| ()) + &run + "{}\n", "line 3 is no result of a sweep"),
            ("epoch 1: 99%\n".into(), "line 1 is no result of a sweep"),
        ] {
            fs::write(&path, &text).unwrap();
            let found = resume(&path).unwrap_err();
            assert!(found.contains(error), "`{error}` should be in: {found}");
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        fs::write(&path, b"\xff\xfe\n").unwrap();
        assert!(resume(&path).unwrap_err().contains("cannot read --out"));
        assert!(resume(folder.path()).unwrap_err().starts_with("cannot open --out"));
    }

    #[test]
    fn a_full_disk_is_reported_once() {
        let open = |path: &str| ResultsFile::open(path.as_ref(), &conditions(), false);
        assert!(open("/dev/full").unwrap_err().contains("cannot write to --out /dev/full: No space left"));
        let (mut file, _) = open("/dev/null").unwrap();
        file.append(&Record::Sweep(conditions())).unwrap();
        file.file = Some(OpenOptions::new().append(true).open("/dev/full").unwrap());
        assert!(file.append(&Record::Sweep(conditions())).is_err());
        assert_eq!(file.append(&Record::Sweep(conditions())), Ok(()));
    }
}
