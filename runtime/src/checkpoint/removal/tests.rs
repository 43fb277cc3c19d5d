//! Files of others are placed everywhere, and must all survive whatever writers do.

use std::collections::BTreeMap;
use std::os::unix::fs::{MetadataExt, symlink};

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use proptest::prelude::*;

use super::super::folder::{Folder, list};
use super::super::snapshot::Snapshot;
use super::super::{Checkpoint, Writer, files, find};
use super::*;
use crate::Layout;

fn layout() -> Layout {
    let mut layout = Layout::new();
    layout.push("0.weight", [2, 3]);
    layout
}

fn snapshot(step: u64) -> Snapshot {
    let mut snapshot = Snapshot::new(step);
    for arena in ["weights", "exp_avg"] {
        snapshot.add(arena, &layout(), vec![step as f32; 6]);
    }
    snapshot
}

/// Folders in which users may place files.
const FOLDERS: [&str; 13] = [
    "",
    "step-00000001",
    "step-00000002",
    "step-00000003",
    "step-00000002.replaced",
    ".step-00000001.partial",
    ".step-00000002.partial",
    ".step-00000003.removed",
    ".step-00000002.replaced.removed",
    "damaged-step-00000001",
    "step-notes",
    "step-5",
    "runs/step-00000001",
];

const NAMES: [&str; 7] = [
    "notes.txt",
    "eval.safetensors",
    "weights.safetensors",
    "manifest.json",
    "step-00000002",
    ".step-00000002.partial",
    "damaged-step-00000002",
];

#[derive(Debug, Clone, Copy)]
enum Kind {
    File,
    /// Looks like a checkpoint file: a copy that the user keeps.
    Copy,
    Folder,
    LinkToFile,
    LinkToFolder,
    LinkToNothing,
    Fifo,
}

#[derive(Debug, Clone)]
enum Action {
    /// A user places a file of their own.
    Plant {
        folder: usize,
        name: usize,
        kind: Kind,
    },
    Save {
        step: u64,
        keep: usize,
    },
    /// The writer is dropped, and another one is created.
    Begin,
    /// A checkpoint file is truncated or removed.
    Damage {
        step: u64,
        name: &'static str,
        lost: bool,
    },
    /// As a resumed run does: damaged checkpoints are set aside.
    Resume,
    /// A writer is killed after it has written or removed this number of files.
    KilledWriting {
        step: u64,
        files: usize,
    },
    KilledRemoving {
        step: u64,
        files: usize,
    },
    KilledReplacing {
        step: u64,
    },
}

fn action() -> impl Strategy<Value = Action> {
    let kind = prop::sample::select(vec![
        Kind::File,
        Kind::Copy,
        Kind::Folder,
        Kind::LinkToFile,
        Kind::LinkToFolder,
        Kind::LinkToNothing,
        Kind::Fifo,
    ]);
    let part = prop::sample::select(vec!["weights.safetensors", "exp_avg.safetensors", MANIFEST]);
    prop_oneof![
        6 => (0..FOLDERS.len(), 0..NAMES.len(), kind).prop_map(|(folder, name, kind)| Action::Plant { folder, name, kind }),
        4 => (1..4u64, 1..3usize).prop_map(|(step, keep)| Action::Save { step, keep }),
        1 => Just(Action::Begin),
        1 => (1..4u64, part, any::<bool>()).prop_map(|(step, name, lost)| Action::Damage { step, name, lost }),
        1 => Just(Action::Resume),
        1 => (1..4u64, 0..4usize).prop_map(|(step, files)| Action::KilledWriting { step, files }),
        1 => (1..4u64, 0..4usize).prop_map(|(step, files)| Action::KilledRemoving { step, files }),
        1 => (1..4u64).prop_map(|step| Action::KilledReplacing { step }),
    ]
}

/// Everything below `folder` by inode: the path, and the content of a file or the target of a link. Links are not
/// followed.
fn inventory(folder: &Path) -> BTreeMap<u64, (PathBuf, String)> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let metadata = path.symlink_metadata().unwrap();
        let content = if metadata.is_symlink() {
            fs::read_link(&path).unwrap().display().to_string()
        } else if metadata.is_file() {
            String::from_utf8_lossy(&fs::read(&path).unwrap()).into_owned()
        } else {
            String::new()
        };
        if metadata.is_dir() {
            found.append(&mut inventory(&path));
        }
        found.insert(metadata.ino(), (path, content));
    }
    found
}

struct Scene {
    parent: tempfile::TempDir,
    writer: Option<Writer>,
    /// By inode: name and content of the files that were placed.
    planted: BTreeMap<u64, (String, String)>,
    /// What the links point to.
    elsewhere: BTreeMap<u64, (PathBuf, String)>,
}

impl Scene {
    fn new() -> Self {
        let parent = tempfile::tempdir().unwrap();
        let elsewhere = parent.path().join("elsewhere");
        fs::create_dir_all(elsewhere.join("weights.safetensors")).unwrap();
        fs::create_dir(parent.path().join("checkpoints")).unwrap();
        for name in ["thesis", "manifest.json", "weights.safetensors/thesis"] {
            fs::write(elsewhere.join(name), "years of work").unwrap();
        }
        let elsewhere = inventory(&elsewhere);
        Scene { parent, writer: None, planted: BTreeMap::new(), elsewhere }
    }

    fn folder(&self) -> PathBuf {
        self.parent.path().join("checkpoints")
    }

    fn plant(&mut self, folder: &str, name: &str, kind: Kind) {
        let folder = self.folder().join(folder);
        let path = folder.join(name);
        let is_in_the_way = folder.exists() && !is_folder(&folder);
        // A copy in a partial checkpoint is indistinguishable from a writer's own file.
        let is_begun =
            matches!(kind, Kind::Copy) && folder.extension().is_some_and(|suffix| suffix == "partial");
        if is_in_the_way || is_taken(&path) || is_begun || fs::create_dir_all(&folder).is_err() {
            return;
        }
        let elsewhere = self.parent.path().join("elsewhere");
        let content = format!("{}", self.planted.len());
        match kind {
            Kind::File => fs::write(&path, &content).unwrap(),
            Kind::Copy => fs::write(&path, [&[b' '; 8], MARK, content.as_bytes()].concat()).unwrap(),
            Kind::Folder => {
                fs::create_dir(&path).unwrap();
                fs::write(path.join("weights.safetensors"), &content).unwrap();
            }
            Kind::LinkToFile => symlink(elsewhere.join("thesis"), &path).unwrap(),
            Kind::LinkToFolder => symlink(&elsewhere, &path).unwrap(),
            Kind::LinkToNothing => symlink("nowhere", &path).unwrap(),
            Kind::Fifo => mkfifo(&path, Mode::S_IRWXU).unwrap(),
        }
        for (inode, (found, content)) in inventory(&folder) {
            // An empty folder itself may be lost, as long as its files survive.
            if found.starts_with(&path) && !is_folder(&found) {
                let name = found.file_name().unwrap().to_str().unwrap().to_owned();
                self.planted.insert(inode, (name, content));
            }
        }
    }

    fn damage(&self, step: u64, name: &str, lost: bool) {
        let path = self.folder().join(format!("step-{step:08}"));
        let file = path.join(name);
        if is_ours(&path, step) && file.symlink_metadata().is_ok_and(|metadata| metadata.is_file()) {
            match lost {
                true => fs::remove_file(file).unwrap(),
                false => {
                    let bytes = fs::read(&file).unwrap();
                    fs::write(file, &bytes[..bytes.len() / 2]).unwrap();
                }
            }
        }
    }

    fn killed_writing(&self, step: u64, count: usize) {
        let partial = self.folder().join(format!(".step-{step:08}.partial"));
        if is_taken(&partial) {
            return;
        }
        fs::create_dir(&partial).unwrap();
        files::write(&partial, snapshot(step)).unwrap();
        let names = [MANIFEST, "weights.safetensors", "exp_avg.safetensors"];
        names.iter().rev().skip(count).for_each(|name| fs::remove_file(partial.join(name)).unwrap());
    }

    fn killed_removing(&self, step: u64, count: usize) {
        let path = self.folder().join(format!("step-{step:08}"));
        let removed = self.folder().join(format!(".step-{step:08}.removed"));
        if !is_ours(&path, step) || is_taken(&removed) {
            return;
        }
        let stage = LeftoverState::of(&path);
        fs::rename(path, &removed).unwrap();
        for name in ["exp_avg.safetensors", "weights.safetensors"].into_iter().take(count) {
            let file = removed.join(name);
            if was_written(&file, &stage) {
                fs::remove_file(file).unwrap();
            }
        }
    }

    /// Killed between the exchange of names and the removal of the old checkpoint.
    fn killed_replacing(&self, step: u64) {
        let (path, partial) = (format!("step-{step:08}"), format!(".step-{step:08}.partial"));
        let [path, partial] = [path, partial].map(|name| self.folder().join(name));
        if is_ours(&path, step) && !is_taken(&partial) {
            fs::rename(&path, &partial).unwrap();
            fs::create_dir(&path).unwrap();
            files::write(&path, snapshot(step)).unwrap();
        }
    }

    fn writer(&mut self, keep: usize) -> &mut Writer {
        self.writer = None;
        let folder = self.folder();
        self.writer.insert(Writer::new(&folder, keep).unwrap())
    }

    fn act(&mut self, action: &Action) {
        match *action {
            Action::Plant { folder, name, kind } => self.plant(FOLDERS[folder], NAMES[name], kind),
            Action::Save { step, keep } => {
                let writer = self.writer(keep);
                writer.save(snapshot(step)).unwrap();
                let path = writer.finish().unwrap().unwrap();
                let checkpoint = Checkpoint::open(path).unwrap();
                checkpoint.verify().unwrap();
                assert_eq!(checkpoint.load("weights", &layout()).unwrap(), [step as f32; 6]);
                let named = list(&self.folder()).unwrap().into_iter();
                let ours: Vec<_> = named.filter(|named| named.step <= step && named.is_ours()).collect();
                assert!(ours.len() <= keep, "{keep} are kept: {ours:?}");
                self.assert_nothing_is_left();
            }
            Action::Begin => {
                self.writer(1);
                self.assert_nothing_is_left();
            }
            Action::Damage { step, name, lost } => self.damage(step, name, lost),
            Action::Resume => {
                if let Ok(Some(found)) = find(&self.folder()) {
                    let writer = self.writer(1);
                    for (path, _) in found.damaged {
                        writer.set_aside(&path).unwrap();
                    }
                }
            }
            Action::KilledWriting { step, files } => self.killed_writing(step, files),
            Action::KilledRemoving { step, files } => self.killed_removing(step, files),
            Action::KilledReplacing { step } => self.killed_replacing(step),
        }
    }

    /// Asserts that a writer has removed all checkpoints without a final name.
    fn assert_nothing_is_left(&self) {
        for (path, content) in inventory(&self.folder()).into_values() {
            let step = path.strip_prefix(self.folder()).unwrap().to_string_lossy().into_owned();
            let is_hidden = step.starts_with(".step-") && path.is_dir() && !path.is_symlink();
            let is_planted = |(name, _): &(String, String)| path.ends_with(name);
            assert!(!is_hidden || self.planted.values().any(is_planted), "{step} is left: {content}");
        }
    }

    fn assert_all_is_there(&self) {
        let found = inventory(&self.folder());
        for (inode, (name, content)) in &self.planted {
            let (path, there) = found.get(inode).unwrap_or_else(|| panic!("{name} is gone: {found:#?}"));
            assert!(
                path.file_name().unwrap().to_str().unwrap().contains(name.as_str()),
                "{name} is {path:?}"
            );
            assert_eq!(there, content, "{name}");
        }
        assert_eq!(inventory(&self.parent.path().join("elsewhere")), self.elsewhere);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn files_of_others_survive_any_sequence_of_actions(actions in prop::collection::vec(action(), 1..25)) {
        let mut scene = Scene::new();
        for action in &actions {
            scene.act(action);
            scene.assert_all_is_there();
        }
    }
}

#[test]
fn notes_in_a_checkpoint_survive_its_removal_and_replacement() {
    let folder = tempfile::tempdir().unwrap();
    let notes = folder.path().join("step-00000001/notes.txt");
    let mut writer = Writer::new(folder.path(), 1).unwrap();
    let mut save = |step| {
        writer.save(snapshot(step)).unwrap();
        writer.finish().unwrap();
    };
    save(1);
    fs::write(&notes, "mine").unwrap();
    // Replaced, removed, and written again.
    for (step, files) in [(1, 4), (2, 1), (1, 4)] {
        save(step);
        assert_eq!(fs::read_to_string(&notes).unwrap(), "mine");
        assert_eq!(fs::read_dir(notes.parent().unwrap()).unwrap().count(), files);
    }
    assert_eq!(find(folder.path()).unwrap().unwrap().checkpoint.manifest().step, 2);
}

#[test]
fn checkpoints_without_a_mark_are_removed_by_their_checksums() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = Writer::new(folder.path(), 1).unwrap();
    writer.save(snapshot(1)).unwrap();
    let path = writer.finish().unwrap().unwrap();
    let mut entries = BTreeMap::new();
    for name in ["weights.safetensors", "exp_avg.safetensors"] {
        let mut bytes = fs::read(path.join(name)).unwrap();
        bytes[8..8 + MARK.len()].fill(b' ');
        fs::write(path.join(name), &bytes).unwrap();
        let xxh3 = format!("{:016x}", xxhash_rust::xxh3::xxh3_64(&bytes));
        entries.insert(name.to_owned(), FileEntry { bytes: bytes.len() as u64, xxh3 });
    }
    let manifest = Manifest::new(1, None, serde_json::Value::Null, None, entries).to_json();
    fs::write(path.join(MANIFEST), manifest).unwrap();
    // A file of the same size with other content.
    let changed = path.join("exp_avg.safetensors");
    let mut bytes = fs::read(&changed).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&changed, bytes).unwrap();
    writer.save(snapshot(2)).unwrap();
    writer.finish().unwrap();
    let left: Vec<_> = fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(left, [changed]);
}

#[test]
fn a_foreign_folder_is_moved_aside_and_kept() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = Folder::open(temporary.path()).unwrap();
    let target = folder.target(7);
    for round in 0..2 {
        fs::create_dir(&target).unwrap();
        fs::write(target.join("weights.safetensors"), [&[b' '; 8], MARK].concat()).unwrap();
        super::super::publish::publish(&folder, snapshot(7), 1).unwrap();
        Checkpoint::open(&target).unwrap().verify().unwrap();
        let aside = ["other-step-00000007", "other-step-00000007-2"][round];
        assert!(temporary.path().join(aside).join("weights.safetensors").is_file());
        fs::rename(&target, temporary.path().join(format!("moved-{round}"))).unwrap();
    }
}
