//! Loading a library that is absent, wrong, incomplete or newer than these bindings, and the real one if
//! `MGPU_NCCL_LIBRARY` names it.

use nccl_sys::{
    HEADER_VERSION, InitConfig, LIBRARY_NAME, LIBRARY_VARIABLE, LIBRARY_WHEELS, Library, NcclError, UniqueId,
    Version, ncclResult_t,
};
use nvidia_libraries::{SearchEnv, Source};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, ptr};
use tempfile::TempDir;

/// Searches with the system loader only, for a name that no machine has.
fn nowhere() -> SearchEnv {
    SearchEnv {
        file_name: "libnccl-of-no-machine.so.2".into(),
        ..SearchEnv::empty(LIBRARY_NAME, LIBRARY_WHEELS)
    }
}

fn only(library: impl Into<PathBuf>) -> SearchEnv {
    SearchEnv { explicit: Some(library.into()), ..SearchEnv::empty(LIBRARY_NAME, LIBRARY_WHEELS) }
}

#[test]
fn an_empty_search_path_lists_every_place_with_its_reason_and_the_fix() {
    let error = Library::open_in(&nowhere()).unwrap_err();
    let sources: Vec<Source> = error.attempts.iter().map(|attempt| attempt.source).collect();
    let expected = [
        Source::Explicit,
        Source::SystemLoader,
        Source::CudaHome,
        Source::VirtualEnv,
        Source::Conda,
        Source::Interpreter,
        Source::UserSite,
    ];
    assert_eq!(sources, expected);
    let text = error.to_string();
    for expected in [
        "MGPU_NCCL_LIBRARY: not set",
        "system loader: libnccl-of-no-machine.so.2: ",
        "CUDA_HOME: not set",
        "VIRTUAL_ENV: not set",
        "CONDA_PREFIX: not set",
        "python on PATH: no interpreter",
        "pip's --user packages: not set",
        "pip install nvidia-nccl-cu13",
    ] {
        assert!(text.contains(expected), "{expected:?} is missing from:\n{text}");
    }
    let summary = error.summary();
    assert_eq!(summary.lines().count(), 1, "{summary}");
    assert!(summary.contains("system loader (libnccl-of-no-machine.so.2)"), "{summary}");
    assert!(summary.contains("pip install"), "{summary}");
}

#[test]
fn a_missing_library_named_by_the_variable_is_the_only_one_tried() {
    let error = Library::open_in(&only("/nowhere/libnccl.so.2")).unwrap_err();
    assert_eq!(error.attempts.len(), 1);
    let text = error.to_string();
    assert_eq!(text.matches("/nowhere/libnccl.so.2").count(), 1, "{text}");
    assert!(text.contains("correct MGPU_NCCL_LIBRARY"), "{text}");
}

#[test]
fn a_library_that_is_not_nccl_is_rejected_with_the_symbol_it_lacks() {
    let error = Library::open_in(&only("libc.so.6")).unwrap_err();
    assert!(error.attempts[0].reason.contains("no ncclGetVersion"), "{error}");
    println!("{error}");
}

#[test]
fn a_file_that_is_not_a_library_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("libnccl.so.2");
    fs::write(&file, "not an ELF file").unwrap();
    let error = Library::open_in(&only(&file)).unwrap_err();
    let reason = &error.attempts[0].reason;
    assert!(reason.len() > "dlopen failed".len() && reason.contains("libnccl.so.2"), "{error}");
}

/// Compiles a fake library to the place where a wheel would install it; `None` (and a line of output) without a C
/// compiler.
fn fake_library(source: &str) -> Option<(TempDir, SearchEnv)> {
    let directory = tempfile::tempdir().unwrap();
    let lib = directory.path().join("lib/python3.12/site-packages/nvidia/nccl/lib");
    fs::create_dir_all(&lib).unwrap();
    let code = directory.path().join("fake_library.c");
    fs::write(&code, source).unwrap();
    let compiler = env::var_os("CC").unwrap_or_else(|| "cc".into());
    let output = lib.join(nowhere().file_name);
    match Command::new(compiler).args(["-shared", "-fPIC", "-o"]).arg(&output).arg(&code).status() {
        Ok(status) => assert!(status.success(), "the fake library does not compile"),
        Err(error) => {
            eprintln!("skipped: no C compiler ({error})");
            return None;
        }
    }
    let env = SearchEnv { virtual_env: Some(directory.path().into()), ..nowhere() };
    Some((directory, env))
}

#[test]
fn a_missing_symbol_is_an_error_that_names_it() {
    let Some((_directory, env)) = fake_library("int ncclGetVersion(int *v) { *v = 2804; return 0; }") else {
        return;
    };
    let nccl = Library::open_in(&env).unwrap();
    assert_eq!(nccl.source(), Source::VirtualEnv);
    assert_eq!(nccl.version(), Ok(Version { major: 2, minor: 8, patch: 4 }));

    let error = nccl.unique_id().unwrap_err();
    assert_eq!(error.function(), "ncclGetUniqueId");
    assert_eq!(error.code(), None);
    assert!(error.to_string().starts_with("ncclGetUniqueId is missing from VIRTUAL_ENV: "), "{error}");

    // SAFETY: the library has no such function, so nothing is called.
    let error = unsafe { nccl.group_start() }.unwrap_err();
    assert_eq!(error.function(), "ncclGroupStart");
    // Without ncclGetErrorString the text is our own.
    assert_eq!(nccl.error_string(ncclResult_t::ncclRemoteError), "a remote rank failed or left");
}

#[test]
fn an_unknown_code_keeps_its_number() {
    let source = r#"
        int ncclGetVersion(int *v) { *v = 99901; return 0; }
        int ncclGetUniqueId(void *id) { (void)id; return 4242; }
        int ncclGroupEnd(void) { return 7; }
        const char *ncclGetErrorString(int code) { return code == 4242 ? "moon phase" : 0; }
    "#;
    let Some((_directory, env)) = fake_library(source) else { return };
    let nccl = Library::open_in(&env).unwrap();
    assert!(nccl.version().unwrap() > HEADER_VERSION);
    assert_eq!(
        nccl.unique_id(),
        Err(NcclError::Call { code: 4242, function: "ncclGetUniqueId", message: "moon phase".into() })
    );
    // SAFETY: the fake function takes nothing and accesses no memory.
    assert_eq!(unsafe { nccl.group_end() }, Ok(nccl_sys::Progress::InProgress));
    assert_eq!(nccl.error_string(ncclResult_t(5)), "the call is not allowed here");
}

#[test]
fn memory_is_allocated_and_registered_if_the_library_can() {
    let version = "int ncclGetVersion(int *v) { *v = 22605; return 0; }";
    let Some((_old, env)) = fake_library(version) else { return };
    let old = Library::open_in(&env).unwrap();
    assert!(!old.has_registration() && !old.has_windows());
    assert_eq!(old.mem_alloc(1).unwrap_err().function(), "ncclMemAlloc");

    let functions = r#"
        int ncclMemAlloc(void **p, unsigned long n) { *p = (void *)(n + 1); return n == 0; }
        int ncclMemFree(void *p) { return p == (void *)9 ? 0 : 4; }
        int ncclCommRegister(void *c, void *p, unsigned long n, void **h) { *h = c; return p != (void *)9 || n != 8; }
        int ncclCommDeregister(void *c, void *h) { return c != h; }
    "#;
    let Some((_directory, env)) = fake_library(&format!("{version}{functions}")) else { return };
    let nccl = Library::open_in(&env).unwrap();
    assert!(nccl.has_registration() && !nccl.has_windows());
    let address = nccl.mem_alloc(8).unwrap();
    assert_eq!(address as usize, 9);
    assert_eq!(nccl.mem_alloc(0).unwrap_err().code(), Some(ncclResult_t(1)));
    // SAFETY: the fake functions take any addresses and access no memory but the handle.
    unsafe {
        let comm = ptr::without_provenance_mut(3);
        let handle = nccl.comm_register(comm, address, 8).unwrap();
        assert_eq!(nccl.comm_deregister(comm, handle), Ok(()));
        assert_eq!(nccl.comm_register(comm, address, 7).unwrap_err().function(), "ncclCommRegister");
        assert_eq!(nccl.mem_free(address), Ok(()));
        assert_eq!(
            nccl.mem_free(ptr::null_mut()).unwrap_err().code(),
            Some(ncclResult_t::ncclInvalidArgument)
        );
        let mut window = ptr::null_mut();
        let error = nccl.comm_window_register(comm, address, 8, &mut window).unwrap_err();
        assert_eq!((error.function(), error.code()), ("ncclCommWindowRegister", None));
    }
}

/// Set in the child process that tests the real library.
const CHILD: &str = "NCCL_SYS_TEST_CHILD";

/// NCCL reads its variables once per process, so the real library is tested in a child process with its own
/// environment.
#[test]
fn the_real_library_returns_its_version_and_distinct_ids() {
    if env::var_os(LIBRARY_VARIABLE).is_none() {
        eprintln!("skipped: {LIBRARY_VARIABLE} names no library");
        return;
    }
    let child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "real_library_child", "--nocapture"])
        .envs([(CHILD, "1"), ("NCCL_SOCKET_IFNAME", "lo")])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&child.stdout).into_owned() + &String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success() && text.contains("1 passed"), "{text}");
    eprintln!("{text}");
}

#[test]
fn real_library_child() {
    if env::var_os(CHILD).is_none() {
        return;
    }
    let nccl = Library::open().unwrap();
    let version = nccl.version().unwrap();
    println!("NCCL {version} from {}", nccl.origin());
    assert!(version >= Version { major: 2, minor: 18, patch: 0 }, "{version}");

    let (first, second) = (nccl.unique_id().unwrap(), nccl.unique_id().unwrap());
    assert_ne!(first, second);
    assert_eq!(UniqueId::from_bytes(*first.as_bytes()), first);

    assert!(!nccl.error_string(ncclResult_t::ncclInvalidUsage).is_empty());
    println!("code 4242: {}", nccl.error_string(ncclResult_t(4242)));

    // SAFETY: an empty group has no buffers.
    unsafe {
        let _ = nccl.group_start().unwrap();
        let _ = nccl.group_end().unwrap();
    }
    if Path::new("/dev/nvidiactl").exists() {
        println!("a GPU is present: initialisation without one is not tested");
        return;
    }
    // The missing CUDA driver is found first, so this says nothing about the configuration, only that the call fails
    // cleanly.
    let mut comm = ptr::null_mut();
    // SAFETY: `comm` is writable and outlives the initialisation, because the test continues only after an error.
    let error = unsafe { nccl.comm_init_rank_config(&mut comm, 1, first, 0, InitConfig::non_blocking()) }
        .unwrap_err();
    println!("without a GPU: {error}");
    assert_eq!(error.function(), "ncclCommInitRankConfig");
    assert_eq!(error.code(), Some(ncclResult_t::ncclUnhandledCudaError), "{error}");
}
