//! Checkpoints are kept on several hosts: a run survives the loss of host 0's disk.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use mgpu::checkpoint::{Checkpoint, ReplicatedWriter, Snapshot};
use mgpu::{DataParallel, DataParallelConfig, Result, World};
use mgpu_tests::checkpoints::{identify, snapshot};
use mgpu_tests::models::{layout, model, optimizers};
use mgpu_tests::threads::run_on_hosts;
use nix::sched::{CloneFlags, unshare};

/// Three hosts with one to two ranks, each with a folder of its own.
const HOSTS: [u32; 3] = [2, 1, 1];

/// A disk for each host.
struct Disks {
    root: tempfile::TempDir,
}

impl Disks {
    fn new() -> Self {
        Disks { root: tempfile::tempdir().unwrap() }
    }

    /// The checkpoint folder of a host.
    fn folder(&self, host: usize) -> PathBuf {
        self.root.path().join(format!("host {host}/checkpoints"))
    }

    fn names(&self, host: usize) -> Vec<String> {
        let entries = fs::read_dir(self.folder(host)).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn lose(&self, host: usize) {
        fs::remove_dir_all(self.folder(host)).unwrap();
    }

    /// Runs `body` on every rank, with a writer for `copies` copies of the newest two checkpoints.
    fn run<R: Send>(
        &self,
        copies: usize,
        body: impl Fn(&mut World, &mut ReplicatedWriter) -> Result<R> + Sync,
    ) -> Vec<Result<R>> {
        run_on_hosts(&HOSTS, |mut world| {
            let folder = self.folder(host_of(&world));
            let mut writer = ReplicatedWriter::new(&mut world, &folder, 2, copies)?;
            body(&mut world, &mut writer)
        })
    }

    /// Writes the checkpoints of these steps on `copies` hosts.
    fn save(&self, copies: usize, steps: &[u64]) {
        let results = self.run(copies, |world, writer| save(world, writer, steps));
        results.into_iter().for_each(|result| result.unwrap());
    }
}

fn host_of(world: &World) -> usize {
    world.hosts().iter().position(|ranks| ranks.contains(&world.rank())).unwrap()
}

fn save(world: &World, writer: &mut ReplicatedWriter, steps: &[u64]) -> Result<()> {
    for step in steps {
        writer.save((world.rank() == 0).then(|| snapshot(*step, 1)))?;
    }
    writer.finish().map(|_| ())
}

#[test]
fn each_checkpoint_is_on_as_many_hosts_as_asked_for() {
    for (copies, expected) in [(1, [2, 0, 0]), (2, [2, 2, 0]), (3, [2, 2, 2]), (9, [2, 2, 2])] {
        let disks = Disks::new();
        disks.save(copies, &[1, 20, 300]);
        for (host, count) in expected.into_iter().enumerate() {
            let names = ["step-00000020", "step-00000300"];
            assert_eq!(disks.names(host), names[..count], "{copies} copies, host {host}");
            for name in &names[..count] {
                let checkpoint = Checkpoint::open(disks.folder(host).join(name)).unwrap();
                checkpoint.verify().unwrap();
                identify(&checkpoint);
                let manifest = |host| fs::read(disks.folder(host).join(name).join("manifest.json")).unwrap();
                assert_eq!(manifest(host), manifest(0));
            }
        }
    }
}

/// Resumes from what any host has, trains to step `last`, and saves every step. Returns the step that it began at, and
/// the weights.
fn train(world: &mut World, writer: &mut ReplicatedWriter, last: u64) -> Result<(u64, Vec<f32>)> {
    let config = DataParallelConfig::new(optimizers()[2], 256);
    let mut model = model(world, &layout(&[&[331, 401], &[401]]), config)?;
    let newest = writer.find()?;
    if let Some(newest) = &newest {
        let checkpoint = writer.fetch(newest)?.checkpoint;
        model.restore(newest.manifest.step, |name, layout| match &checkpoint {
            Some(checkpoint) => checkpoint.load(name, layout),
            None => Ok(vec![0.0; layout.len()]),
        })?;
    }
    let rank = world.rank() as f32;
    for step in newest.as_ref().map_or(0, |newest| newest.manifest.step)..last {
        step_once(&mut model, rank, step)?;
        writer.save(Snapshot::of(&mut model)?)?;
    }
    writer.finish()?;
    Ok((newest.map_or(0, |newest| newest.manifest.step), model.parameters().to_vec()))
}

fn step_once(model: &mut DataParallel, rank: f32, step: u64) -> Result<()> {
    let ranges: Vec<_> = model.layout().tensors().iter().map(mgpu::TensorSpec::range).collect();
    model.step(|parameters, gradients| {
        for (tensor, range) in ranges.iter().enumerate().rev() {
            for (gradient, value) in gradients.gradient(tensor).iter_mut().zip(&parameters[range.clone()]) {
                *gradient = value * 0.3 + rank * 0.07 - step as f32 * 0.02;
            }
            gradients.ready(tensor)?;
        }
        Ok(())
    })?;
    Ok(())
}

#[test]
fn a_run_resumes_with_the_same_bits_when_host_0_has_lost_its_disk() {
    let (whole, parted) = (Disks::new(), Disks::new());
    let trained = |disks: &Disks, last| -> Vec<(u64, Vec<f32>)> {
        disks.run(2, |world, writer| train(world, writer, last)).into_iter().map(Result::unwrap).collect()
    };
    let expected = trained(&whole, 5);
    trained(&parted, 3);
    parted.lose(0);
    let resumed = trained(&parted, 5);
    for ((begun, weights), (_, expected)) in resumed.iter().zip(&expected) {
        assert_eq!(*begun, 3);
        assert!(weights.iter().map(|x| x.to_bits()).eq(expected.iter().map(|x| x.to_bits())));
    }
    assert_eq!((parted.names(0), parted.names(2).len()), (parted.names(1), 0));
}

#[test]
fn the_checkpoint_of_a_host_that_keeps_no_copies_any_more_is_sent_to_rank_0() {
    let disks = Disks::new();
    disks.save(3, &[1, 2]);
    disks.lose(0);
    disks.lose(1);
    let found = disks.run(1, |_, writer| {
        let newest = writer.find()?.unwrap();
        Ok((newest.host, writer.fetch(&newest)?.checkpoint.map(|checkpoint| identify(&checkpoint))))
    });
    let found: Vec<_> = found.into_iter().map(Result::unwrap).collect();
    assert_eq!(found, [(2, Some((2, 1))), (2, None), (2, None), (2, None)]);
    assert_eq!((disks.names(0), disks.names(1).len()), (vec!["step-00000002".to_owned()], 0));
}

#[test]
fn half_a_copy_is_not_taken_but_an_older_whole_one() {
    let disks = Disks::new();
    disks.save(2, &[1, 2]);
    disks.lose(0);
    let newest = disks.folder(1).join("step-00000002/weights.safetensors");
    fs::OpenOptions::new().write(true).open(newest).unwrap().set_len(2000).unwrap();
    let found = disks.run(2, |_, writer| {
        let newest = writer.find()?.unwrap();
        let fetched = writer.fetch(&newest)?;
        let aside = fetched.set_aside.iter().map(|(error, path)| format!("{error}; {}", path.display()));
        Ok((newest.manifest.step, fetched.checkpoint.map(|own| identify(&own)), aside.collect::<String>()))
    });
    let found: Vec<_> = found.into_iter().map(Result::unwrap).collect();
    assert_eq!((found[0].0, found[0].1), (1, Some((1, 1))));
    assert!(found[2].2.contains("weights.safetensors: damaged: 2000 bytes instead of"), "{found:?}");
    assert!(found[2].2.ends_with("damaged-step-00000002"), "{found:?}");
    // Only damaged ones: an error on all ranks, which names the host.
    disks.lose(0);
    fs::remove_file(disks.folder(1).join("step-00000001/manifest.json")).unwrap();
    for result in disks.run(2, |_, writer| writer.find()) {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("host 1/checkpoints: damaged: on host"), "{error}");
        assert!(error.contains("(node 1, rank 2): no intact checkpoint among 1; the newest: "), "{error}");
    }
}

#[test]
fn a_host_says_which_checkpoint_it_has_before_anything_is_changed() {
    let disks = Disks::new();
    disks.save(2, &[7]);
    disks.lose(0);
    for result in disks.run(2, |_, writer| Ok((writer.latest()?, writer.find()?.unwrap().path))) {
        let path = disks.folder(1).join("step-00000007");
        assert_eq!(result.unwrap(), (Some((1, path.clone())), path));
    }
    assert!(disks.names(0).is_empty());
}

/// Links the folder of each host to that of another.
fn link(disks: &Disks, links: &[(usize, usize)]) {
    for (host, to) in links {
        fs::create_dir_all(disks.folder(*to)).unwrap();
        fs::create_dir_all(disks.folder(*host).parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(disks.folder(*to), disks.folder(*host)).unwrap();
    }
}

#[test]
fn hosts_that_share_a_folder_keep_one_copy() {
    for (links, copies, expected) in [
        (&[(1, 0), (2, 0)][..], 3, [1, 1, 1]),
        (&[(1, 0)], 2, [1, 1, 1]),
        (&[(2, 1)], 3, [1, 1, 1]),
        (&[(2, 0)], 1, [1, 0, 1]),
    ] {
        let disks = Disks::new();
        link(&disks, links);
        let kept = disks.run(copies, |world, writer| {
            save(world, writer, &[4])?;
            Ok((writer.copies(), writer.find()?.unwrap().host))
        });
        let different = if copies == 1 || links.len() == 2 { 1 } else { 2 };
        for kept in kept {
            assert_eq!(kept.unwrap(), (different, 0), "{links:?}");
        }
        assert_eq!([0, 1, 2].map(|host| disks.names(host).len()), expected, "{links:?}");
    }
}

#[test]
fn a_folder_that_cannot_be_written_is_named_with_its_host() {
    let disks = Disks::new();
    fs::create_dir_all(disks.folder(2).parent().unwrap()).unwrap();
    fs::write(disks.folder(2), "a file").unwrap();
    for result in disks.run(3, |_, _| Ok(())) {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("host 2/checkpoints: on host "), "{error}");
        assert!(error.ends_with("(node 2, rank 3): not a folder: choose another name for the checkpoints"));
    }
}

/// Mounts a file system of this size, which only this thread and its children see. False if that is forbidden.
fn mount_small_disk(folder: &Path, size: &str) -> bool {
    fs::create_dir_all(folder).unwrap();
    let run = |arguments: &[&str]| Command::new("mount").args(arguments).arg(folder).status().unwrap();
    unshare(CloneFlags::CLONE_NEWNS).is_ok()
        && Command::new("mount").args(["--make-rprivate", "/"]).status().unwrap().success()
        && run(&["-t", "tmpfs", "-o", &format!("size={size}"), "none"]).success()
}

#[test]
fn a_full_disk_of_another_host_is_named_and_loses_no_earlier_copy() {
    let disks = Disks::new();
    let results = run_on_hosts(&HOSTS, |mut world| {
        let host = host_of(&world);
        let folder = disks.folder(host);
        // Room for one checkpoint of five pages.
        let is_mounted = host != 1 || mount_small_disk(&folder, "32k");
        let mut writer = ReplicatedWriter::new(&mut world, &folder, 2, 2)?;
        let result = save(&world, &mut writer, &[1, 2, 3]);
        let names = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name());
        Ok((is_mounted, result, names.collect::<Vec<_>>()))
    });
    let results: Vec<_> = results.into_iter().map(|result: Result<_>| result.unwrap()).collect();
    if results.iter().any(|(is_mounted, ..)| !is_mounted) {
        eprintln!("skipped: this environment forbids mounting");
        return;
    }
    for (_, result, _) in &results {
        let error = result.as_ref().unwrap_err().to_string();
        assert!(error.contains("host 1/checkpoints/.step-00000002.partial/"), "{error}");
        assert!(error.ends_with("(node 1, rank 2): No space left on device (os error 28)"), "{error}");
    }
    assert_eq!(results[2].2, ["step-00000001"]);
    // Rank 0 had its own.
    identify(&Checkpoint::open(disks.folder(0).join("step-00000002")).unwrap());
}
