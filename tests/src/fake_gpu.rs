//! A fake GPU for machines without one: NVIDIA's libraries as one shared object, built from `tests/gpu`.
//!
//! The object contains the driver, NVRTC, NCCL, NVML and the other `tests/gpu/fake_*.cpp`, together with the project's
//! kernels, which a C++ compiler reads with `tests/gpu/shim.h`. It is built on first use in the target folder, under
//! a name derived from all of its inputs, with a symbolic link for each library name. [`command`] makes a program
//! find it. Its output contains the device's name, `FAKE GPU (tests only)`, and says nothing about the speed of a
//! GPU.

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};
use std::thread;

/// File name of the object.
const OBJECT: &str = "libmgpu_fake_gpu.so";

/// The names that the project and cudarc pass to the loader.
const NAMES: [&str; 13] = [
    "libcuda.so",
    "libcuda.so.1",
    "libnvrtc.so",
    "libnvrtc.so.13",
    "libnccl.so",
    "libnccl.so.2",
    "libcudnn.so",
    "libcudnn.so.9",
    "libcublas.so",
    "libcublas.so.13",
    "libcublasLt.so",
    "libcublasLt.so.13",
    "libnvidia-ml.so.1",
];

/// Folders with the same object for older versions of NCCL, and the functions that these lack.
const OLDER: [(&str, &[&str]); 2] = [
    (
        "nccl-2.18",
        &["ncclMemAlloc", "ncclMemFree", "ncclCommRegister", "ncclCommDeregister", WINDOWS[0], WINDOWS[1]],
    ),
    ("nccl-2.26", &WINDOWS),
];

const WINDOWS: [&str; 2] = ["ncclCommWindowRegister", "ncclCommWindowDeregister"];

/// Contraction into fused multiply-adds is off, because it would depend on the machine: GPUs contract, baseline
/// x86-64 cannot, and kernels write `fmaf` where they need fusing. So a kernel's result is the same on every machine,
/// and comparisons with the CPU's kernels need at most the tolerance of a GPU.
const FLAGS: [&str; 9] = [
    "-std=c++20",
    "-O2",
    "-fPIC",
    "-pthread",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-DMGPU_SHIM",
];

/// Kernels only: loops over a thread's few sums are unrolled, and an access at an address that is not a multiple of its
/// type's alignment calls a function of the shim.
const KERNEL_FLAGS: [&str; 3] = ["-O3", "-fsanitize=alignment", "-fno-sanitize-recover=alignment"];

/// The folder of the libraries; builds them if needed.
///
/// # Panics
/// If there is no C++ compiler, or compilation fails.
pub fn folder() -> PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| Inputs::collect().build()).clone()
}

/// Whether this process has loaded the object.
///
/// # Panics
/// If `/proc` cannot be read.
pub fn is_loaded() -> bool {
    fs::read_to_string("/proc/self/maps").expect("/proc can be read").contains(OBJECT)
}

/// The fakes' own test program, linked with the object.
///
/// # Panics
/// As [`folder`].
pub fn selftest() -> PathBuf {
    folder().join("selftest")
}

/// [`process::command`](crate::process::command) with the fakes instead of NVIDIA's libraries, and with a separate
/// cache of compiled kernels.
pub fn command(program: impl AsRef<Path>) -> Command {
    let folder = folder();
    let mut command = crate::process::command(program);
    let mut path = OsString::from(&folder);
    if let Some(others) = env::var_os("LD_LIBRARY_PATH").filter(|others| !others.is_empty()) {
        path.push(":");
        path.push(others);
    }
    command.env("LD_LIBRARY_PATH", path).env("MGPU_CACHE_DIR", folder.join("kernels"));
    // Removes everything that selects real libraries or devices, and all settings of the fakes. Only the order of
    // threads and the delay of streams may be set for a whole suite.
    let kept = ["FAKE_GPU_ORDER", "FAKE_GPU_SEED", "FAKE_GPU_DELAY_US"];
    let others = ["CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "VIRTUAL_ENV"];
    let foreign = |name: &str| {
        let about_gpus = name.starts_with("FAKE_") || name.starts_with("NCCL_") || name.ends_with("_LIBRARY");
        (about_gpus || others.contains(&name)) && !kept.contains(&name)
    };
    for (name, _) in env::vars_os() {
        if name.to_str().is_some_and(foreign) {
            command.env_remove(name);
        }
    }
    command
}

/// Makes a [`command`] find an older version of NCCL: 18 or 26 for 2.18 and 2.26.
///
/// # Panics
/// As [`folder`].
pub fn with_older_nccl(command: &mut Command, minor: u32) {
    let folder = folder().join(format!("nccl-2.{minor}"));
    command.env("LD_LIBRARY_PATH", folder).env("FAKE_NCCL_VERSION", format!("2{minor}05"));
}

/// A `launcher` of `ranks` ranks, with one fake GPU each.
///
/// # Panics
/// As [`folder`].
pub fn launched(launcher: impl AsRef<Path>, ranks: u32) -> Command {
    let mut launcher = command(launcher);
    launcher.env("FAKE_GPU_COUNT", ranks.to_string());
    launcher.args(["-n", &ranks.to_string(), "--backend", "nccl"]);
    launcher
}

/// A file for the C++ compiler.
struct CxxSource {
    text: String,
    is_kernel: bool,
}

/// The inputs of the object.
struct Inputs {
    /// The sources by the name of their object file: a few lines that include the file itself, with hashes of its
    /// inputs in a comment.
    sources: BTreeMap<String, CxxSource>,
    flags: Vec<OsString>,
    compiler: OsString,
    /// The sources of the fakes' own test, which are not part of the object.
    selftest: Vec<PathBuf>,
}

impl Inputs {
    fn collect() -> Self {
        let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
        let (fakes, kernels) = (tests.join("gpu"), tests.join("../kernels/src"));
        let device = fs::canonicalize(kernels.join("cuda/device.cuh")).expect("kernels/src/cuda/device.cuh");
        let mut files = Vec::new();
        walk(&fakes, &mut files);
        walk(&kernels, &mut files);
        files.sort();

        // Hash of the headers that each kind of source may include: changing a fake does not rebuild the kernels.
        let headers = |wanted: &dyn Fn(&str) -> bool| {
            let name = |file: &&PathBuf| file.file_name().is_some_and(|name| wanted(&name.to_string_lossy()));
            hash(&files.iter().filter(name).map(|file| read(file)).collect::<String>())
        };
        let for_fakes = headers(&|name| name.ends_with(".h"));
        let for_kernels = headers(&|name| name.ends_with(".cuh") || name == "shim.h");
        let mut sources = BTreeMap::new();
        let of_selftest = |file: &PathBuf| {
            let name = file.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("selftest") && name.ends_with(".cpp")
        };
        let (selftest, files): (Vec<_>, Vec<_>) = files.into_iter().partition(of_selftest);
        for file in files {
            let name = object_name(&file, tests.parent().expect("a workspace"));
            let extension = file.extension().unwrap_or_default().to_str();
            let inputs = |headers: u64| format!("// {headers:016x} {:016x}\n", hash(&read(&file)));
            if extension == Some("cpp") {
                let text = inputs(for_fakes) + &format!("#include \"{}\"\n", file.display());
                sources.insert(name, CxxSource { text, is_kernel: false });
            } else if extension == Some("cu") {
                let text = inputs(for_kernels) + &wrap(&name, &file, &fakes.join("shim.h"), &device);
                sources.insert(name, CxxSource { text, is_kernel: true });
            }
        }

        let mut flags: Vec<OsString> = FLAGS.iter().map(OsString::from).collect();
        #[cfg(target_arch = "x86_64")]
        if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma") {
            // So that `fmaf` is one instruction instead of a call.
            flags.extend(["-mavx2", "-mfma"].map(OsString::from));
        }
        let compiler = env::var_os("CXX").unwrap_or_else(|| "g++".into());
        Self { sources, flags, compiler, selftest }
    }

    /// The folder for these inputs, built if needed. Other processes wait for the one that builds it.
    fn build(&self) -> PathBuf {
        let root = target().join("fake-gpu");
        let objects = root.join("objects");
        fs::create_dir_all(&objects).expect("a folder under target");
        let all: String = self.sources.values().map(|source| format!("{:x}\n", self.key(source))).collect();
        let headers = self.selftest[0].with_file_name("selftest.h");
        let selftest: String = self.selftest.iter().chain([&headers]).map(|file| read(file)).collect();
        let folder = root.join(format!("{:016x}", hash(&format!("{all}{selftest}{NAMES:?}{OLDER:?}"))));
        if folder.exists() {
            return folder;
        }
        let lock = File::create(root.join("lock")).expect("a file under target");
        lock.lock().expect("a lock under target");
        if folder.exists() {
            return folder;
        }
        let building = root.join("building");
        let _ = fs::remove_dir_all(&building);
        fs::create_dir_all(&building).expect("a folder under target");
        self.compile(&objects, &building);
        self.link(&objects, &building);
        fs::rename(&building, &folder).expect("the folder just built");
        folder
    }

    fn flags(&self, source: &CxxSource) -> Vec<OsString> {
        let more: &[&str] = if source.is_kernel { &KERNEL_FLAGS } else { &[] };
        self.flags.iter().cloned().chain(more.iter().map(OsString::from)).collect()
    }

    fn key(&self, source: &CxxSource) -> u64 {
        hash(&format!("{:?}{:?}{}", self.flags(source), self.compiler, source.text))
    }

    fn object(&self, objects: &Path, name: &str, source: &CxxSource) -> PathBuf {
        objects.join(format!("{name}-{:016x}.o", self.key(source)))
    }

    /// Compiles everything that no earlier build has compiled, on all cores.
    fn compile(&self, objects: &Path, building: &Path) {
        let sources: Vec<_> = self.sources.iter().collect();
        let (next, failures) = (AtomicUsize::new(0), Mutex::new(String::new()));
        let work = || {
            while let Some((name, source)) = sources.get(next.fetch_add(1, Ordering::Relaxed)) {
                let object = self.object(objects, name, source);
                if object.exists() {
                    continue;
                }
                let file = building.join(format!("{name}.cpp"));
                fs::write(&file, &source.text).expect("a file under target");
                let part = building.join(format!("{name}.o"));
                let mut command = Command::new(&self.compiler);
                command.args(self.flags(source)).arg("-c").arg(&file).arg("-o").arg(&part);
                match self.run(&mut command) {
                    Ok(()) => fs::rename(&part, &object).expect("the object just compiled"),
                    Err(output) => failures.lock().expect("no panic holds it").push_str(&output),
                }
            }
        };
        let workers = thread::available_parallelism().map_or(1, usize::from);
        thread::scope(|scope| (0..workers).for_each(|_| drop(scope.spawn(work))));
        let failures = failures.into_inner().expect("all workers ended well");
        assert!(failures.is_empty(), "the fake GPU does not compile:\n{failures}");
    }

    fn link(&self, objects: &Path, folder: &Path) {
        let library = self.link_without(&[], objects, folder);
        for (name, missing) in OLDER {
            let older = folder.join(name);
            fs::create_dir(&older).expect("a folder under target");
            self.link_without(missing, objects, &older);
        }
        let mut command = Command::new(&self.compiler);
        command.args(&self.flags).args(&self.selftest).arg(&library).arg("-Wl,-rpath,$ORIGIN");
        command.arg("-o").arg(folder.join("selftest"));
        self.run(&mut command).unwrap_or_else(|output| panic!("the fakes' test does not compile:\n{output}"));
    }

    /// Links the object without exporting some functions.
    fn link_without(&self, missing: &[&str], objects: &Path, folder: &Path) -> PathBuf {
        let library = folder.join(OBJECT);
        let parts = self.sources.iter().map(|(name, source)| self.object(objects, name, source));
        let mut command = Command::new(&self.compiler);
        command.args(["-shared", "-pthread", "-Wl,--no-undefined", "-Wl,-Bsymbolic"]);
        if !missing.is_empty() {
            let script = folder.join("exports");
            let text = format!("{{ global: *; local: {}; }};\n", missing.join("; "));
            fs::write(&script, text).expect("a file under target");
            command.arg(format!("-Wl,--version-script,{}", script.display()));
        }
        command.arg(format!("-Wl,-soname,{OBJECT}")).args(parts).arg("-o").arg(&library).arg("-ldl");
        self.run(&mut command).unwrap_or_else(|output| panic!("the fake GPU does not link:\n{output}"));
        for name in NAMES {
            std::os::unix::fs::symlink(OBJECT, folder.join(name)).expect("a link under target");
        }
        library
    }

    fn run(&self, command: &mut Command) -> Result<(), String> {
        let output = command.output().unwrap_or_else(|error| {
            let compiler = self.compiler.display();
            panic!("{compiler}: {error}; the GPU tests need a C++20 compiler: install g++ (package `g++`) or set CXX")
        });
        if output.status.success() {
            Ok(())
        } else {
            Err(String::from_utf8_lossy(&output.stderr).into_owned())
        }
    }
}

/// The C++ file for one `.cu` file. Its own namespace separates equal names of several sources; entry points are
/// `extern "C"` and globally known by name.
fn wrap(name: &str, file: &Path, shim: &Path, device: &Path) -> String {
    let text = read(file);
    let mut wrapper = format!(
        "#include \"{}\"\nnamespace kernels_{name} {{\n#include \"{}\"\n#include \"{}\"\n",
        shim.display(),
        device.display(),
        file.display()
    );
    for (kernel, bounds) in entry_points(&text) {
        wrapper.push_str(&format!("SHIM_REGISTER({kernel}, {bounds});\n"));
    }
    wrapper + "}\n"
}

/// The entry points of a source, with the maximum number of threads per block.
fn entry_points(source: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut in_macro = false;
    for line in source.lines() {
        let definition = in_macro || line.starts_with('#');
        in_macro = definition && line.ends_with('\\');
        if definition {
            continue;
        }
        let code = line.split("//").next().unwrap_or_default();
        for (at, _) in code.match_indices("KERNEL") {
            let rest = &code[at + "KERNEL".len()..];
            if let Some(rest) = rest.strip_prefix('(') {
                let name = rest.split(')').next().unwrap_or_default();
                found.insert(name.trim().to_owned(), "1024".to_owned());
            } else if let Some((name, bounds)) =
                rest.strip_prefix("_BOUNDS(").and_then(|rest| rest.split_once(','))
            {
                found.insert(name.trim().to_owned(), up_to_closing(bounds).trim().to_owned());
            } else if let Some((name, bounds)) =
                rest.strip_prefix("_BLOCKS(").and_then(|rest| rest.split_once(','))
            {
                // The last one is the number of blocks.
                let (threads, _) = up_to_closing(bounds).rsplit_once(',').unwrap_or((bounds, ""));
                found.insert(name.trim().to_owned(), threads.trim().to_owned());
            }
        }
    }
    found
}

/// The text before the parenthesis that closes one opened earlier.
fn up_to_closing(text: &str) -> &str {
    let mut depth = 0;
    for (at, character) in text.char_indices() {
        match character {
            '(' => depth += 1,
            ')' if depth == 0 => return &text[..at],
            ')' => depth -= 1,
            _ => {}
        }
    }
    text
}

/// Cargo's target folder of this test: the one marked as a cache.
fn target() -> PathBuf {
    let program = env::current_exe().expect("a test knows its own file");
    let marked = program.ancestors().find(|folder| folder.join("CACHEDIR.TAG").exists());
    marked.map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target"), Path::to_path_buf)
}

/// An identifier for a file that is valid in C++: its path in the workspace.
fn object_name(file: &Path, workspace: &Path) -> String {
    let path = file.strip_prefix(workspace).unwrap_or(file).with_extension("");
    let letter = |letter: char| if letter.is_ascii_alphanumeric() { letter } else { '_' };
    path.display().to_string().trim_start_matches("tests/../").chars().map(letter).collect()
}

fn walk(folder: &Path, files: &mut Vec<PathBuf>) {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    for path in entries.map(|entry| entry.expect("an entry of a folder").path()) {
        if path.is_dir() {
            walk(&path, files);
        } else {
            files.push(path);
        }
    }
}

fn read(file: &Path) -> String {
    fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

fn hash(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(text.as_bytes());
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_points_are_found_where_they_are_defined() {
        let source = "#define BOTH(T) \\\n    KERNEL(not_this)(T* x) {}\n// KERNEL(nor_this)\nKERNEL(one)(f32* x) {\n\
                      KERNEL_BOUNDS(two, (4 * WARP))(u32 n) {\nBODY(KERNEL(three), f32)\n\
                      KERNEL_BLOCKS(zero, (2 * WARP), 2)(u32 n) {\n";
        let expected = [("one", "1024"), ("three", "1024"), ("two", "(4 * WARP)"), ("zero", "(2 * WARP)")];
        let found = entry_points(source);
        let found: Vec<_> = found.iter().map(|(name, bounds)| (name.as_str(), bounds.as_str())).collect();
        assert_eq!(found, expected);
    }
}
