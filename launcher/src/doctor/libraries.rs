//! Finds NVIDIA's libraries. They are searched as files, in the folders of the system's loader, of CUDA toolkits and of
//! Python packages; none is opened.
//!
//! NCCL and NVML are searched in the same folders and order as in a run (crate nvidia-libraries). The other libraries are
//! searched in the same order and also in `/usr/local/cuda*`.

use std::fs;
use std::path::{Path, PathBuf};

use nvidia_libraries::{SearchEnv, SitePackages, Source, candidates, site_packages};

use super::nvidia::driver_cuda;
use super::report::{Item, Mark, Section};
use super::system::Host;

/// Default folders of loaders, and folders in which container runtimes put the driver's libraries. `{architecture}` is
/// replaced by the processor's architecture.
const SYSTEM: [&str; 9] = [
    "/lib/{architecture}-linux-gnu",
    "/usr/lib/{architecture}-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
    "/usr/local/nvidia/lib64",
    "/run/opengl-driver/lib",
    "/usr/lib/wsl/lib",
];

/// The folders of [`SYSTEM`] on this machine.
fn system_folders(host: &Host) -> impl Iterator<Item = String> + use<> {
    let architecture = host.architecture;
    SYSTEM.into_iter().map(move |folder| folder.replace("{architecture}", architecture))
}

/// A library.
struct Library {
    /// Its name, and the names of other usable versions.
    names: &'static [&'static str],
    /// Its folders in a Python environment.
    wheels: &'static [&'static str],
    purpose: &'static str,
    /// How to install it; `{pip}` is replaced by the pip package.
    install: &'static str,
    /// Its pip package for drivers of CUDA 13 and newer, and for those of CUDA 12.
    pip: [&'static str; 2],
}

const LIBRARIES: [Library; 6] = [
    Library {
        names: &["libcuda.so.1"],
        wheels: &[],
        purpose: "the driver's interface",
        install: "it comes with the driver; in a container, with the NVIDIA container toolkit (--gpus all)",
        pip: [""; 2],
    },
    Library {
        names: &[nvml::LIBRARY_NAME],
        wheels: &[],
        purpose: "optional (NVML): which processes use which GPU, for --gpus free",
        install: "it comes with the driver; in a container, with NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        pip: [""; 2],
    },
    Library {
        names: &[nccl_sys::LIBRARY_NAME],
        wheels: nccl_sys::LIBRARY_WHEELS,
        purpose: "collectives on GPUs",
        install: "apt install libnccl2, or pip install {pip}, or name the file in MGPU_NCCL_LIBRARY",
        pip: ["nvidia-nccl-cu13", "nvidia-nccl-cu12"],
    },
    Library {
        names: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
        wheels: &["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"],
        purpose: "compiles kernels",
        install: "the CUDA toolkit has it, or pip install {pip}",
        pip: ["nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"],
    },
    Library {
        names: &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
        wheels: &["nvidia/cu13/lib", "nvidia/cublas/lib"],
        purpose: "matrix products",
        install: "the CUDA toolkit has it, or pip install {pip}",
        pip: ["nvidia-cublas", "nvidia-cublas-cu12"],
    },
    Library {
        names: &["libcudnn.so.9", "libcudnn.so"],
        wheels: &["nvidia/cudnn/lib"],
        purpose: "convolutions",
        install: "apt install libcudnn9-cuda-{cuda}, or pip install {pip}",
        pip: ["nvidia-cudnn-cu13", "nvidia-cudnn-cu12"],
    },
];

/// The section.
pub(super) fn section(host: &Host) -> Section {
    let sites = site_packages(&host.search);
    let toolkits = toolkits(host);
    let cuda = driver_cuda(host);
    let mut items: Vec<Item> =
        LIBRARIES.iter().map(|library| look(host, &sites, &toolkits, library, cuda)).collect();
    let nccl = items.iter().find(|item| item.name == nccl_sys::LIBRARY_NAME);
    items.extend(nccl.and_then(|nccl| nccl.version.as_deref()).and_then(gradients));
    items.push(Item::new(Mark::Note, "searched", places(host, &sites, &toolkits)));
    Section { title: "Libraries for GPUs", items }
}

/// How a version of NCCL accesses gradients; `None` if it is no version.
fn gradients(version: &str) -> Option<Item> {
    let mut numbers = version.split('.').map_while(|number| number.parse::<u32>().ok());
    let text = match (numbers.next()?, numbers.next()?) {
        release if release >= (2, 27) => {
            "in place: registered memory, and symmetric windows between GPUs of one host"
        }
        release if release >= (2, 19) => {
            "in place: registered memory; NCCL 2.27 or newer has symmetric windows, too"
        }
        _ => "by copies; NCCL 2.19 or newer accesses them in place",
    };
    Some(Item::new(Mark::Note, "NCCL, gradients", text))
}

/// The version of NCCL, or its file if nothing tells the version; `None` if a run would not find it.
pub(super) fn nccl(host: &Host) -> Option<String> {
    let library = LIBRARIES.iter().find(|library| library.names.contains(&nccl_sys::LIBRARY_NAME))?;
    let found = look(host, &site_packages(&host.search), &toolkits(host), library, driver_cuda(host));
    (found.mark == Mark::Ok).then_some(found.version.or(found.file)).flatten()
}

fn look(
    host: &Host,
    sites: &[SitePackages],
    toolkits: &[PathBuf],
    library: &Library,
    cuda: Option<u32>,
) -> Item {
    // A driver of CUDA 12 does not load code that libraries of CUDA 13 generate.
    let serves = |name: &&&str| cuda != Some(12) || !name.ends_with(".so.13");
    let names: Vec<&str> = library.names.iter().filter(serves).copied().collect();
    let name = names[0];
    let search = search_of_a_run(host, name);
    if let Some((variable, search)) = &search {
        for place in candidates(search, sites) {
            let Ok(file) = place.file else { continue };
            let found = match place.source {
                Source::SystemLoader => loaded(host, name),
                Source::Explicit if !host.path(&file).is_file() => {
                    let text = format!("{variable} is {}, which does not exist", file.display());
                    return Item::new(Mark::Missing, name, text);
                }
                _ => Some(file).filter(|file| host.path(file).is_file()),
            };
            if let Some(file) = found {
                return Item::library(name, &file, version(host, library, &file));
            }
        }
    }
    let home = host.search.cuda_home.iter().map(|home| home.join("lib64"));
    let wheels =
        sites.iter().flat_map(|site| library.wheels.iter().map(|folder| site.directory.join(folder)));
    let conda = host.search.conda_prefix.iter().map(|root| root.join("lib"));
    let folders: Vec<PathBuf> = home.chain(toolkits.iter().cloned()).chain(conda).chain(wheels).collect();
    for name in names.iter().copied() {
        let in_folders =
            || folders.iter().map(|folder| folder.join(name)).find(|file| host.path(file).is_file());
        let Some(file) = loaded(host, name).or_else(in_folders) else { continue };
        if let Some((variable, _)) = search {
            let file = file.display();
            let text = format!("{file} is not in the folders that a run searches: set {variable}={file}");
            return Item::new(Mark::Note, name, text);
        }
        return Item::library(name, &file, version(host, library, &file));
    }
    Item::new(Mark::Missing, name, format!("{}; {}", library.purpose, how_to_install(library, cuda)))
}

/// The search of a run for the library `name`, with the variable that holds its path; `None` if it is not known here.
fn search_of_a_run(host: &Host, name: &str) -> Option<(&'static str, SearchEnv)> {
    if name == nccl_sys::LIBRARY_NAME {
        return Some((nccl_sys::LIBRARY_VARIABLE, host.search.clone()));
    }
    let search = SearchEnv {
        file_name: nvml::LIBRARY_NAME.into(),
        wheels: &[],
        explicit: host.nvml.clone(),
        ..host.search.clone()
    };
    (name == nvml::LIBRARY_NAME).then_some((nvml::LIBRARY_VARIABLE, search))
}

/// The version of a library: from the name of its file, or from the Python package that it belongs to.
fn version(host: &Host, library: &Library, file: &Path) -> Option<String> {
    version_in_name(host, file).or_else(|| {
        let is_root = |folder: &&Path| folder.file_name().is_some_and(|name| name == "nvidia");
        let site = file.ancestors().find(is_root)?.parent()?;
        let entries = fs::read_dir(host.path(site)).into_iter().flatten().flatten();
        let mut names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        names.find_map(|name| version_of_package(host, library, file, site, &name))
    })
}

/// `580.65.06`, if the file, behind symbolic links, is `libcuda.so.580.65.06`. A single number is no version: it belongs
/// to the name that programs ask for.
fn version_in_name(host: &Host, file: &Path) -> Option<String> {
    let target = host.path(file).canonicalize().ok()?;
    let (_, version) = target.file_name()?.to_str()?.split_once(".so.")?;
    version.contains('.').then(|| version.to_owned())
}

/// The version of the Python package in `site` whose metadata is `metadata`, if it has installed this file of the
/// library. Packages for two versions of CUDA may share a folder.
fn version_of_package(
    host: &Host,
    library: &Library,
    file: &Path,
    site: &Path,
    metadata: &str,
) -> Option<String> {
    let (package, version) = metadata.strip_suffix(".dist-info")?.split_once('-')?;
    if !library.pip.iter().any(|pip| pip.replace('-', "_") == package) {
        return None;
    }
    let record = host.read(site.join(metadata).join("RECORD").to_str()?)?;
    let mut installed = record.lines().filter_map(|line| line.split(',').next());
    installed.any(|path| site.join(path) == file).then(|| version.to_owned())
}

/// How to install a missing library, for a driver of this CUDA version if there is one.
fn how_to_install(library: &Library, cuda: Option<u32>) -> String {
    let [newest, for_cuda_12] = library.pip;
    let pip = match cuda {
        Some(12) => for_cuda_12.to_owned(),
        Some(_) => newest.to_owned(),
        None => format!("{newest} ({for_cuda_12} for a driver of CUDA 12)"),
    };
    library.install.replace("{pip}", &pip).replace("{cuda}", &cuda.unwrap_or(13).to_string())
}

/// The file that the system's loader would load for `name`.
fn loaded(host: &Host, name: &str) -> Option<PathBuf> {
    let in_folder = |folder: &Path| Some(folder.join(name)).filter(|file| host.path(file).is_file());
    let told = host.loader_path.iter().flatten().find_map(|folder| in_folder(folder));
    let cached = || {
        let mut known = host.loader_cache.iter().flatten();
        known.find(|file| file.file_name().is_some_and(|other| other == name)).cloned()
    };
    told.or_else(cached).or_else(|| system_folders(host).find_map(|folder| in_folder(Path::new(&folder))))
}

/// `lib64` of the toolkits in `/usr/local`: first `cuda`, a link to the one in use, then the others, newest first.
fn toolkits(host: &Host) -> Vec<PathBuf> {
    let entries = fs::read_dir(host.path(Path::new("/usr/local"))).into_iter().flatten().flatten();
    let version = |name: &str| -> Option<Vec<u32>> {
        match name.strip_prefix("cuda")? {
            "" => Some(vec![u32::MAX]),
            rest => rest.strip_prefix('-')?.split('.').map(|part| part.parse().ok()).collect(),
        }
    };
    let named = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut found: Vec<(Vec<u32>, String)> = named.filter_map(|name| Some((version(&name)?, name))).collect();
    found.sort_unstable_by(|a, b| b.cmp(a));
    found.into_iter().map(|(_, name)| Path::new("/usr/local").join(name).join("lib64")).collect()
}

/// The searched places as text, in order.
fn places(host: &Host, sites: &[SitePackages], toolkits: &[PathBuf]) -> String {
    let list = |folders: &[PathBuf]| -> String {
        folders.iter().map(|folder| folder.display().to_string()).collect::<Vec<_>>().join(", ")
    };
    let explicit = match &host.search.explicit {
        Some(file) => format!("MGPU_NCCL_LIBRARY ({})", file.display()),
        None => "MGPU_NCCL_LIBRARY (not set)".into(),
    };
    let told = match &host.loader_path {
        Some(folders) => format!("LD_LIBRARY_PATH ({})", list(folders)),
        None => "LD_LIBRARY_PATH (not set)".into(),
    };
    let cache = match &host.loader_cache {
        Some(files) => format!("the loader's cache ({} files)", files.len()),
        None => "the loader's cache (no ldconfig)".into(),
    };
    let home = match &host.search.cuda_home {
        Some(home) => format!("CUDA_HOME ({}/lib64)", home.display()),
        None => "CUDA_HOME (not set)".into(),
    };
    let toolkits = if toolkits.is_empty() { "/usr/local/cuda* (none)".into() } else { list(toolkits) };
    let conda = match &host.search.conda_prefix {
        Some(root) => format!("CONDA_PREFIX ({}/lib)", root.display()),
        None => "CONDA_PREFIX (not set)".into(),
    };
    let sites: Vec<PathBuf> = sites.iter().map(|site| site.directory.join("nvidia")).collect();
    let wheels = match sites.as_slice() {
        [] => "Python's packages (no Python found)".to_owned(),
        sites => format!("Python's packages ({})", list(sites)),
    };
    let system = system_folders(host).collect::<Vec<_>>().join(", ");
    [explicit, told, cache, system, home, toolkits, conda, wheels].join("; ")
}

#[cfg(test)]
mod tests {
    use super::gradients;

    #[test]
    fn the_version_tells_how_nccl_accesses_gradients() {
        let text = |version| gradients(version).map(|item| item.text);
        for (version, part) in
            [("2.18.5", "by copies"), ("2.19.3", "registered memory; "), ("2.26.2-1", "registered memory; ")]
        {
            assert!(text(version).unwrap().contains(part), "{version}");
        }
        assert_eq!(text("2.27.3"), text("3.0"));
        assert_ne!(text("2.27.3"), text("2.26.2"));
        assert_eq!(text("unknown"), None);
    }
}
