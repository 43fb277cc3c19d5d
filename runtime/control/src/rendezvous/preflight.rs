//! Preflight check: are the ranks compatible? They are compared before any of them starts its own work.
//!
//! A run whose ranks were built from different sources, or share a GPU by mistake, fails sooner or later with an error
//! that does not point to the cause. Here it fails at once, with one line that names both ranks.

use std::fmt;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::message::Manifest;
use crate::digest;

/// How two ranks, or a rank and the launcher, are incompatible.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PreflightFault {
    /// A rank uses another version of the protocol than the launcher.
    Protocol,
    /// Ranks run different programs.
    Program,
    /// A rank expects another world size.
    WorldSize,
    /// Two ranks use one GPU.
    Gpu,
    /// Ranks use different versions of the driver or of NCCL.
    Versions,
}

/// A rank that wants to join.
#[derive(Debug, Clone)]
pub(super) struct JoiningRank {
    pub(super) rank: u32,
    pub(super) manifest: Manifest,
    pub(super) program: Option<Program>,
}

/// The executable file of a process. Ranks of one machine nearly always run the same file, and then its contents need not
/// be read.
#[derive(Debug, Clone)]
pub(super) struct Program {
    /// `/proc/PID/exe`: refers to the original file as long as the process lives, even if the file is replaced.
    link: String,
    path: String,
    file: (u64, u64),
    size: u64,
}

impl Program {
    /// The program of process `pid`; `None` if `/proc` does not tell.
    pub(super) fn of(pid: u32) -> Option<Self> {
        let link = format!("/proc/{pid}/exe");
        let metadata: Metadata = std::fs::metadata(&link).ok()?;
        let path = std::fs::read_link(&link).map_or_else(|_| link.clone(), |path| path.display().to_string());
        Some(Program { link, path, file: (metadata.dev(), metadata.ino()), size: metadata.size() })
    }

    pub(super) fn hash(&self) -> io::Result<u64> {
        digest::of_file(Path::new(&self.link))
    }

    /// True unless the programs are known to differ.
    fn is_same(&self, other: &Program) -> bool {
        self.file == other.file
            || self.size == other.size
                && match (self.hash(), other.hash()) {
                    (Ok(own), Ok(other)) => own == other,
                    // A process that has just ended has no executable any more; its end is noticed elsewhere.
                    _ => true,
                }
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.path)
    }
}

/// Checks that `new` is compatible with `old`, which joined before. Their programs are compared if they should run the
/// same one.
pub(super) fn compare(
    old: &JoiningRank,
    new: &JoiningRank,
    same_program: bool,
) -> Result<(), (PreflightFault, String)> {
    let (first, second) = (old.rank, new.rank);
    if same_program
        && let (Some(ours), Some(theirs)) = (&old.program, &new.program)
        && !ours.is_same(theirs)
    {
        let why = if ours.path == theirs.path {
            format!(
                "rank {first} and rank {second} run different versions of {ours}: the file was replaced while the run started"
            )
        } else {
            format!("rank {first} runs {ours} and rank {second} runs {theirs}: all ranks run one program")
        };
        return Err((PreflightFault::Program, why));
    }
    if let (Some(ours), Some(theirs)) = (&old.manifest.gpu, &new.manifest.gpu)
        && ours == theirs
        && !(old.manifest.shares_gpu && new.manifest.shares_gpu)
    {
        let why = format!(
            "rank {first} and rank {second} both use {ours}: give each rank a GPU of its own (device LOCAL_RANK, or --isolate-gpus); for tests, --share-gpus allows it"
        );
        return Err((PreflightFault::Gpu, why));
    }
    let versions = [
        ("NVIDIA driver", &old.manifest.driver, &new.manifest.driver),
        ("NCCL", &old.manifest.nccl, &new.manifest.nccl),
    ];
    for (what, ours, theirs) in versions {
        if ours != theirs {
            let name = |version: &Option<String>| version.clone().unwrap_or_else(|| "none".into());
            let why = format!(
                "rank {first} uses {what} {} and rank {second} {}: check LD_LIBRARY_PATH for a second installation",
                name(ours),
                name(theirs)
            );
            return Err((PreflightFault::Versions, why));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::process::{Child, Command};

    use super::*;

    fn joining(rank: u32, gpu: &str, driver: &str, nccl: &str) -> JoiningRank {
        let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        let manifest = Manifest { gpu: some(gpu), driver: some(driver), nccl: some(nccl), shares_gpu: false };
        JoiningRank { rank, manifest, program: None }
    }

    #[test]
    fn an_incompatibility_names_both_ranks() {
        let first = joining(0, "GPU-aa", "570.1", "2.27.3");
        let fault = |new: JoiningRank| compare(&first, &new, true).unwrap_err();
        assert_eq!(compare(&first, &joining(3, "GPU-bb", "570.1", "2.27.3"), true), Ok(()));
        let (kind, why) = fault(joining(3, "GPU-aa", "570.1", "2.27.3"));
        assert_eq!(kind, PreflightFault::Gpu);
        assert!(why.starts_with("rank 0 and rank 3 both use GPU-aa"), "{why}");
        let sharing = |mut joining: JoiningRank| {
            joining.manifest.shares_gpu = true;
            joining
        };
        let second = joining(3, "GPU-aa", "570.1", "2.27.3");
        assert!(compare(&first, &sharing(second.clone()), true).is_err(), "both have to");
        assert_eq!(compare(&sharing(first.clone()), &sharing(second), true), Ok(()));
        let (kind, why) = fault(joining(1, "GPU-bb", "570.2", "2.27.3"));
        assert_eq!(kind, PreflightFault::Versions);
        assert!(why.starts_with("rank 0 uses NVIDIA driver 570.1 and rank 1 570.2"), "{why}");
        let (kind, why) = fault(joining(1, "", "570.1", ""));
        assert_eq!(kind, PreflightFault::Versions);
        assert!(why.starts_with("rank 0 uses NCCL 2.27.3 and rank 1 none"), "{why}");
        // Ranks on the CPU have nothing to compare.
        assert_eq!(compare(&joining(0, "", "", ""), &joining(1, "", "", ""), true), Ok(()));
    }

    struct Sleeper(Child);

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn programs_are_compared_by_content() {
        let folder = tempfile::tempdir().unwrap();
        let sleep = ["/bin/sleep", "/usr/bin/sleep"]
            .into_iter()
            .find(|path| std::fs::File::open(path).is_ok())
            .unwrap();
        let start = |name: &str, more: &[u8]| {
            let path = folder.path().join(name);
            let bytes = [std::fs::read(sleep).unwrap(), more.to_vec()].concat();
            std::fs::write(&path, bytes).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
            let child = Sleeper(Command::new(&path).arg("1000").spawn().unwrap());
            let program = Program::of(child.0.id()).unwrap();
            (child, JoiningRank { program: Some(program), ..joining(0, "", "", "") })
        };
        let (first, one) = start("one", b"");
        let (_second, copy) = start("copy", b"");
        let (_third, other) = start("other", b"x");
        assert_eq!(compare(&one, &one, true), Ok(()));
        assert_eq!(compare(&one, &copy, true), Ok(()));
        let (kind, why) = compare(&one, &other, true).unwrap_err();
        assert_eq!(kind, PreflightFault::Program);
        assert!(why.contains("/one and rank 0 runs ") && why.contains("/other"), "{why}");
        assert_eq!(compare(&one, &other, false), Ok(()));
        drop(first);
        assert_eq!(compare(&one, &copy, true), Ok(()));
    }
}
