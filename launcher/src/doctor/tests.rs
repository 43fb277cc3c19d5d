use std::fs;
use std::path::Path;

use nvidia_libraries::SearchEnv;

use super::system::Probe;
use super::*;
use crate::placement::{CoreSet, Topology};

pub(super) fn write(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// A machine with nothing but the files in `root`.
pub(super) fn host(root: &Path) -> Host {
    let probe =
        Probe { name: "pidfd", purpose: "to notice an end", outcome: Ok(()), remedy: "a newer kernel" };
    Host {
        root: root.to_owned(),
        architecture: "x86_64",
        topology: Topology::read(root, &CoreSet::parse("0-3").unwrap(), 2),
        shm: Some((64 << 20, 64 << 20)),
        open_files: Some(1024),
        locked_memory: Some(u64::MAX),
        tile_registers: Ok(()),
        probes: vec![probe],
        search: SearchEnv {
            path: vec![root.join("usr/bin")],
            ..SearchEnv::empty(nccl_sys::LIBRARY_NAME, nccl_sys::LIBRARY_WHEELS)
        },
        ucx: Err("UCX cannot be loaded (libucp.so.0: not found): apt install libucx0".into()),
        nvml: None,
        loader_path: None,
        loader_cache: None,
    }
}

fn machine_with_gpus(root: &Path) {
    write(root, "proc/sys/kernel/osrelease", "6.8.0-test\n");
    write(root, "proc/cpuinfo", "model name\t: Some Processor\nflags\t\t: fpu avx2 fma avx512f\n");
    write(root, "proc/meminfo", "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n");
    write(root, "proc/self/cgroup", "0::/job\n");
    write(root, "sys/fs/cgroup/job/memory.max", "4294967296\n");
    write(root, "sys/devices/system/node/node0/cpulist", "0-1\n");
    write(root, "sys/devices/system/node/node1/cpulist", "2-3\n");
    let version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version: 12\n";
    write(root, "proc/driver/nvidia/version", version);
    let information = "Model: \t\t NVIDIA H100 80GB HBM3\nGPU UUID: \t GPU-1234\n";
    write(root, "proc/driver/nvidia/gpus/0000:3b:00.0/information", information);
    write(root, "sys/bus/pci/devices/0000:3b:00.0/numa_node", "1\n");
    for name in ["nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-modeset"] {
        write(root, &format!("dev/{name}"), "");
    }
    write(root, "usr/lib/x86_64-linux-gnu/libcuda.so.1", "");
    write(root, "usr/local/cuda-12.4/lib64/libnvrtc.so.12", "");
    write(root, "usr/local/cuda-12.10/lib64/libnvrtc.so.12", "");
}

/// The report without the path of the root.
fn shown(host: &Host) -> (String, bool) {
    let (report, healthy) = examine(host);
    (report.to_string().replace(host.root.to_str().unwrap(), ""), healthy)
}

#[test]
fn a_machine_with_a_gpu() {
    let root = tempfile::tempdir().unwrap();
    machine_with_gpus(root.path());
    insta::assert_snapshot!(shown(&host(root.path())).0);
}

#[test]
fn a_machine_without_gpus_is_healthy() {
    let root = tempfile::tempdir().unwrap();
    let (mut report, healthy) = examine(&host(root.path()));
    let text = report.to_string();
    assert!(healthy, "{text}");
    assert!(text.starts_with("Backends: cpu can be used; nccl"), "{text}");
    assert!(text.ends_with("\nNVIDIA driver and GPUs: 2 missing (--all lists them)\nLibraries for GPUs: 6 missing (--all lists them)\n"), "{text}");
    assert!(text.contains("  ok       pidfd") && !text.contains("nvidia-nccl-cu13"), "{text}");
    report.folded.clear();
    let text = report.to_string();
    for part in [
        "  missing  driver",
        "  missing  GPUs",
        "  missing  libnccl.so.2",
        "nvidia-nccl-cu13 (nvidia-nccl-cu12 ",
        "\n\nBackends: cpu can be used; nccl",
    ] {
        assert!(text.contains(part), "no `{part}` in {text}");
    }
}

#[test]
fn a_failed_probe_makes_the_machine_unhealthy() {
    let root = tempfile::tempdir().unwrap();
    let mut host = host(root.path());
    host.probes[0].outcome = Err("ENOSYS".into());
    let (text, healthy) = shown(&host);
    assert!(!healthy);
    assert!(text.contains("missing  pidfd") && text.contains("ENOSYS; a newer kernel"), "{text}");
    assert!(text.contains("Backends: cpu cannot be used (pidfd is missing)"), "{text}");
}

#[test]
fn nccl_is_searched_where_a_run_searches() {
    let root = tempfile::tempdir().unwrap();
    let line = |host: &Host| {
        let section = libraries::section(host);
        let item = section.items.into_iter().find(|item| item.name == "libnccl.so.2").unwrap();
        (item.mark, item.text.replace(root.path().to_str().unwrap(), ""))
    };
    let mut host = host(root.path());
    assert_eq!(line(&host).0, Mark::Missing);
    write(root.path(), "usr/local/cuda/lib64/libnccl.so.2", "");
    let (mark, text) = line(&host);
    assert!(
        mark == Mark::Note && text.ends_with("set MGPU_NCCL_LIBRARY=/usr/local/cuda/lib64/libnccl.so.2"),
        "{text}"
    );
    write(root.path(), "usr/bin/python3", "");
    let wheel = "usr/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2";
    write(root.path(), wheel, "");
    // Python's folders are found through the real file system, so their paths include the root.
    assert_eq!(line(&host), (Mark::Ok, format!("/{wheel}")));
    host.search.explicit = Some("/opt/libnccl.so".into());
    assert_eq!(
        line(&host),
        (Mark::Missing, "MGPU_NCCL_LIBRARY is /opt/libnccl.so, which does not exist".into())
    );
    write(root.path(), "opt/libnccl.so", "");
    assert_eq!(line(&host), (Mark::Ok, "/opt/libnccl.so".into()));
}

#[test]
fn nvml_is_searched_where_a_run_searches() {
    let root = tempfile::tempdir().unwrap();
    let item = |host: &Host| {
        let items = libraries::section(host).items;
        items.into_iter().find(|item| item.name == "libnvidia-ml.so.1").unwrap()
    };
    let mut host = host(root.path());
    let absent = item(&host);
    assert!(absent.mark == Mark::Missing && absent.text.contains("--gpus free"), "{absent:?}");
    write(root.path(), "usr/local/cuda/lib64/libnvidia-ml.so.1", "");
    let elsewhere = item(&host);
    assert!(
        elsewhere.mark == Mark::Note
            && elsewhere.text.ends_with("set MGPU_NVML_LIBRARY=/usr/local/cuda/lib64/libnvidia-ml.so.1"),
        "{elsewhere:?}"
    );
    write(root.path(), "usr/lib64/libnvidia-ml.so.580.65.06", "");
    let link = root.path().join("usr/lib64/libnvidia-ml.so.1");
    std::os::unix::fs::symlink("libnvidia-ml.so.580.65.06", link).unwrap();
    let found = item(&host);
    assert_eq!((found.mark, found.version.as_deref()), (Mark::Ok, Some("580.65.06")));
    assert_eq!(found.file.as_deref(), Some("/usr/lib64/libnvidia-ml.so.1"));
    host.nvml = Some("/opt/nvml.so".into());
    assert_eq!(item(&host).text, "MGPU_NVML_LIBRARY is /opt/nvml.so, which does not exist");
    write(root.path(), "opt/nvml.so", "");
    let told = item(&host);
    assert_eq!((told.mark, told.file.as_deref()), (Mark::Ok, Some("/opt/nvml.so")));
}

/// For a driver of CUDA 12, libraries that it cannot use are neither recommended nor counted as found.
#[test]
fn recommended_packages_match_the_driver() {
    let root = tempfile::tempdir().unwrap();
    machine_with_gpus(root.path());
    let item = |host: &Host, beginning: &str| {
        let items = libraries::section(host).items;
        let item = items.into_iter().find(|item| item.name.starts_with(beginning)).unwrap();
        (item.mark, item.text)
    };
    let mut host = host(root.path());
    host.search.conda_prefix = Some("/opt/conda".into());
    write(root.path(), "opt/conda/lib/libcublasLt.so.13", "");
    let (mark, text) = item(&host, "libcublasLt.so");
    assert!(mark == Mark::Missing && text.ends_with("pip install nvidia-cublas-cu12"), "{text}");
    let version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Release Build\n";
    write(root.path(), "proc/driver/nvidia/version", version);
    assert_eq!(item(&host, "libcublasLt.so"), (Mark::Ok, "/opt/conda/lib/libcublasLt.so.13".into()));
    let (_, text) = item(&host, "libcudnn");
    assert!(text.ends_with("apt install libcudnn9-cuda-13, or pip install nvidia-cudnn-cu13"), "{text}");
}

/// `--json` has the file and the version of each library: from a versioned file name, or from its Python package.
#[test]
fn versions_of_libraries_are_read_from_their_files() {
    let root = tempfile::tempdir().unwrap();
    machine_with_gpus(root.path());
    fs::remove_file(root.path().join("usr/lib/x86_64-linux-gnu/libcuda.so.1")).unwrap();
    write(root.path(), "usr/lib/x86_64-linux-gnu/libcuda.so.570.86.15", "");
    let driver = root.path().join("usr/lib/x86_64-linux-gnu/libcuda.so.1");
    std::os::unix::fs::symlink("libcuda.so.570.86.15", driver).unwrap();
    write(root.path(), "usr/bin/python3", "");
    let site = "usr/lib/python3.12/site-packages";
    write(root.path(), &format!("{site}/nvidia/cudnn/lib/libcudnn.so.9"), "");
    for (package, files) in
        [("cu13-9.20.0.1", "nvidia/cudnn/other"), ("cu12-9.14.0.64", "nvidia/cudnn/lib/libcudnn.so.9")]
    {
        let record = format!("{site}/nvidia_cudnn_{package}.dist-info/RECORD");
        write(root.path(), &record, &format!("nvidia/__init__.py,,\n{files},sha256=x,1\n"));
    }
    let (report, _) = examine(&host(root.path()));
    let report: serde_json::Value = serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
    let sections = report["sections"].as_array().unwrap();
    let items = sections.iter().flat_map(|section| section["items"].as_array().unwrap());
    let item = |name: &str| items.clone().find(|item| item["name"] == name).unwrap();
    let cuda = item("libcuda.so.1");
    assert_eq!((&cuda["mark"], &cuda["version"]), (&"ok".into(), &"570.86.15".into()));
    assert_eq!(cuda["file"], "/usr/lib/x86_64-linux-gnu/libcuda.so.1");
    let cudnn = item("libcudnn.so.9");
    assert_eq!(cudnn["version"], "9.14.0.64");
    assert!(cudnn["text"].as_str().unwrap().ends_with("/libcudnn.so.9, version 9.14.0.64"), "{cudnn}");
    // A file without a version in its name.
    assert_eq!(item("libnvrtc.so.12").get("version"), None);
    assert_eq!(item("libnccl.so.2")["mark"], "missing");
}

#[test]
fn device_files_that_are_absent_are_named() {
    let root = tempfile::tempdir().unwrap();
    machine_with_gpus(root.path());
    fs::remove_file(root.path().join("dev/nvidia-uvm")).unwrap();
    let (section, gpus) = nvidia::section(&host(root.path()));
    assert_eq!(gpus, 1);
    let item = section.items.last().unwrap();
    assert!(item.mark == Mark::Missing && item.text.starts_with("no /dev/nvidia-uvm: "), "{item:?}");
}

#[test]
fn refused_tile_registers_are_noted() {
    let root = tempfile::tempdir().unwrap();
    machine_with_gpus(root.path());
    assert!(!shown(&host(root.path())).0.contains("AMX"));
    write(root.path(), "proc/cpuinfo", "flags\t\t: fpu avx2 fma avx512f amx_bf16 amx_tile amx_int8\n");
    assert!(shown(&host(root.path())).0.contains("products of bf16 with --precision bf16"));
    let refused = Host { tile_registers: Err("operation not permitted".to_owned()), ..host(root.path()) };
    let (report, healthy) = shown(&refused);
    assert!(
        healthy && report.contains("the kernel refuses the tile registers: operation not permitted"),
        "{report}"
    );
}

#[test]
fn files_with_arbitrary_content_are_tolerated() {
    let root = tempfile::tempdir().unwrap();
    machine_with_gpus(root.path());
    for path in [
        "proc/cpuinfo",
        "proc/meminfo",
        "proc/self/cgroup",
        "proc/driver/nvidia/version",
        "sys/fs/cgroup/job/memory.max",
    ] {
        for text in [
            "",
            "\u{1b}[2J",
            ":\n::\n0::",
            "MemTotal: 99999999999999999999 kB",
            "NVRM version: .",
            "MemAvailable:",
        ] {
            write(root.path(), path, text);
            let (text, healthy) = shown(&host(root.path()));
            assert!(healthy && !text.contains('\u{1b}'), "{text}");
        }
    }
}

#[test]
fn this_machine_gets_a_report() {
    let (report, healthy) = examine(&Host::detect());
    assert!(healthy, "{report}");
    assert!(report.to_string().lines().all(|line| !line.ends_with(' ')));
}
