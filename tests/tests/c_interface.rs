//! The C interface: header and library agree, wrong calls are errors, and programs in C and C++ train.

use std::collections::BTreeSet;
use std::fs;
use std::mem::offset_of;
use std::path::{Path, PathBuf};
use std::process::Command;

use mgpu_c::{ReducerOptions, WorldInfo};
use mgpu_tests::c_library::{Workshop, compiler, shared_library, source};
use mgpu_tests::fake_gpu;
use mgpu_tests::process::{Finished, command, run};

const MGPURUN: &str = env!("CARGO_BIN_EXE_t-mgpurun");

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/c").join(name)
}

fn example(name: &str) -> PathBuf {
    source().join("examples").join(name)
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn launch(ranks: u32, program: &[&Path], arguments: &[&str]) -> Finished {
    let mut launcher = command(MGPURUN);
    launcher.args(["-n", &ranks.to_string(), "--backend", "cpu", "--no-prefix"]);
    run(launcher.args(program).args(arguments))
}

/// The names that follow `before` in a text and are followed by `(`.
fn functions(text: &str, before: &str) -> BTreeSet<String> {
    let prefix = format!("{before}mgpu_");
    let names = text.match_indices(&prefix).map(|(at, _)| &text[at + before.len()..]);
    let name = |rest: &str| {
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_')?;
        rest[end..].starts_with('(').then(|| rest[..end].to_owned())
    };
    names.filter_map(name).collect()
}

#[test]
fn header_source_and_library_have_the_same_functions() {
    let header = read(&source().join("include/mgpu.h"));
    // Comments mention functions, too.
    let code: String =
        header.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
    let declared: BTreeSet<String> = [" ", "*"].iter().flat_map(|before| functions(&code, before)).collect();
    let sources = fs::read_dir(source().join("src")).expect("the sources");
    let sources: String = sources.map(|entry| read(&entry.unwrap().path())).collect();
    let defined = functions(&sources, "extern \"C\" fn ");
    assert!(defined.len() > 50, "{defined:?}");
    assert_eq!(declared, defined, "run runtime/c/regenerate.sh");
    let Ok(symbols) = Command::new("nm").args(["-D", "--defined-only"]).arg(shared_library()).output() else {
        println!("skipped: no nm");
        return;
    };
    let symbols = String::from_utf8_lossy(&symbols.stdout).into_owned();
    let exported: BTreeSet<String> = symbols
        .lines()
        .filter_map(|line| line.split_whitespace().last())
        .filter(|name| name.starts_with("mgpu_"))
        .map(str::to_owned)
        .collect();
    assert_eq!(exported, defined);
}

#[test]
fn structs_have_the_same_layout_in_c_and_in_rust() {
    let Some(cc) = compiler("CC", "cc") else { return };
    let workshop = Workshop::new();
    let program = workshop.compile(&cc, &fixture("layout.c"), &["-std=c99", "-pedantic"]);
    let expected = [
        ("mgpu_world_info", size_of::<WorldInfo>()),
        ("mgpu_world_info.struct_size", offset_of!(WorldInfo, struct_size)),
        ("mgpu_world_info.rank", offset_of!(WorldInfo, rank)),
        ("mgpu_world_info.is_launched", offset_of!(WorldInfo, is_launched)),
        ("mgpu_reducer_config", size_of::<ReducerOptions>()),
        ("mgpu_reducer_config.struct_size", offset_of!(ReducerOptions, struct_size)),
        ("mgpu_reducer_config.clip_norm", offset_of!(ReducerOptions, clip_norm)),
        ("mgpu_reducer_config.unused_is_zero", offset_of!(ReducerOptions, unused_is_zero)),
    ];
    let expected: String = expected.map(|(name, number)| format!("{name} {number}\n")).concat();
    assert_eq!(run(&mut command(program)).stdout, expected);
}

#[test]
fn wrong_calls_are_errors() {
    let Some(cc) = compiler("CC", "cc") else { return };
    let workshop = Workshop::new();
    let program = workshop.compile(&cc, &fixture("misuse.c"), &[]);
    run(&mut command(&program)).expect(0, &["all calls were refused"]);
    launch(1, &[&program], &[]).expect(0, &["all calls were refused"]);
}

#[test]
fn all_operations_work_from_c() {
    let Some(cc) = compiler("CC", "cc") else { return };
    let workshop = Workshop::new();
    let program = workshop.compile(&cc, &fixture("groups.c"), &[]);
    launch(3, &[&program], &[]).expect(0, &["all results are right"]);
}

#[test]
fn an_error_names_the_rank_at_fault() {
    let Some(cc) = compiler("CC", "cc") else { return };
    let workshop = Workshop::new();
    let program = workshop.compile(&cc, &fixture("lost_peer.c"), &[]);
    // 6: the peer is lost; 8: the communicator is unusable since then.
    launch(2, &[&program], &[])
        .expect(7, &["status 6, rank 1, rank 0 lost rank 1", "exited with code 7", "then status 8"]);
}

/// What follows `loss ` in the output.
fn loss(finished: &Finished) -> f64 {
    let text = finished.stdout.split("loss ").nth(1).unwrap_or_else(|| panic!("no loss in {finished:#?}"));
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    text[..end].parse().expect("a loss")
}

#[test]
fn programs_in_c_and_cpp_train_the_same() {
    let Some(cc) = compiler("CC", "cc") else { return };
    let workshop = Workshop::new();
    let c = workshop.compile(&cc, &example("train_mlp.c"), &["-std=c11"]);
    let early = loss(run(command(&c).arg("1")).expect(0, &["1 ranks, 1 steps"]));
    let alone = loss(run(&mut command(&c)).expect(0, &["1 ranks, 100 steps", "on all"]));
    let two = loss(launch(2, &[&c], &[]).expect(0, &["2 ranks, 100 steps", "on all"]));
    // Ten classes: an untrained network has a loss of about 2.3.
    assert!(early > 1.8 && alone < 0.5, "{early} {alone}");
    assert!((alone - two).abs() < 1e-3, "{alone} {two}");
    let Some(cxx) = compiler("CXX", "g++") else { return };
    let cpp = workshop.compile(&cxx, &example("train_mlp.cpp"), &["-std=c++14"]);
    let cpp = loss(launch(2, &[&cpp], &[]).expect(0, &["2 ranks: loss"]));
    assert!((cpp - two).abs() < 1e-3, "{cpp} {two}");
}

#[test]
fn a_program_in_c_stops_on_request_and_resumes() {
    let Some(cc) = compiler("CC", "cc") else { return };
    let workshop = Workshop::new();
    let program = workshop.compile(&cc, &example("train_mlp.c"), &[]);
    let folder = workshop.path("checkpoints");
    let folder = folder.to_str().expect("a path in UTF-8");
    let whole = launch(2, &[&program], &["60"]).stdout;
    launch(2, &[&program], &["25", folder]).expect(0, &["25 steps"]);
    let mut stopped = command(MGPURUN);
    stopped.args(["-n", "2", "--backend", "cpu", "--no-prefix", "--stop-after", "0.2s"]).arg(&program);
    let stopped = run(stopped.args(["100000000", folder]));
    stopped.expect(74, &["2 ranks, "]);
    // The same weights, to the last bit, as without a stop.
    let fresh = workshop.path("fresh");
    let fresh = fresh.to_str().expect("a path in UTF-8");
    launch(2, &[&program], &["25", fresh]).expect(0, &[]);
    assert_eq!(launch(2, &[&program], &["60", fresh]).stdout, whole);
}

/// On the fake libraries of `tests/gpu`.
#[test]
fn device_memory_of_the_program_is_reduced_on_its_own_stream() {
    let Some(cc) = compiler("CC", "cc") else { return };
    let workshop = Workshop::new();
    let program = workshop.compile(&cc, &fixture("device.c"), &["-std=gnu11", "-ldl"]);
    run(fake_gpu::launched(MGPURUN, 2).arg("--no-prefix").arg(program))
        .expect(0, &["device memory is reduced"]);
}

#[test]
fn valgrind_finds_nothing() {
    if Command::new("valgrind").arg("--version").output().is_err() {
        println!("skipped: no valgrind");
        return;
    }
    let Some(cc) = compiler("CC", "cc") else { return };
    let workshop = Workshop::new();
    let valgrind = Path::new("valgrind");
    let options = ["--quiet", "--error-exitcode=9", "--leak-check=full", "--errors-for-leak-kinds=definite"]
        .map(Path::new);
    for (name, ranks, arguments) in [("train_mlp.c", 2, vec!["3"]), ("misuse.c", 1, vec![])] {
        let path = if ranks == 1 { fixture(name) } else { example(name) };
        let program = workshop.compile(&cc, &path, &[]);
        let line: Vec<&Path> = [valgrind].into_iter().chain(options).chain([program.as_path()]).collect();
        let finished = launch(ranks, &line, &arguments);
        assert_eq!((finished.code, finished.stderr.contains("==")), (Some(0), false), "{finished:#?}");
    }
}

#[test]
fn the_same_program_on_mpi_trains_the_same() {
    let Some(mpicc) = compiler("MPICC", "mpicc") else { return };
    let Some(cc) = compiler("CC", "cc") else { return };
    let workshop = Workshop::new();
    let ours = workshop.compile(&cc, &example("train_mlp.c"), &[]);
    let theirs = workshop.compile(&mpicc, &example("train_mlp_mpi.c"), &["-Wno-error"]);
    let mut mpirun = command("mpirun");
    let finished = run(mpirun
        .args(["-n", "1"])
        .arg(theirs)
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"));
    let ours = loss(&launch(2, &[&ours], &[]));
    assert!((loss(finished.expect(0, &["loss"])) - ours).abs() < 1e-3, "{finished:#?} {ours}");
}
