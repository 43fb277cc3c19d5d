//! Reserves GPUs, so that no two launches choose the same one.
//!
//! A launch that chooses its GPUs (`--gpus`) locks a file for each of them, exclusively. Any other launch locks the files
//! of the GPUs that it uses together with others: it is refused nothing, but `--gpus free` does not choose these GPUs in
//! the seconds before its ranks appear in NVML. The locks belong to open files (`flock`), which the ranks inherit: if the
//! launcher is killed, a GPU stays reserved until its last rank has ended. The kernel releases them, so a file that is
//! left over means nothing, and none is ever removed.
//!
//! While a launch looks which GPUs are reserved and reserves its own, it holds one more lock: two launches at the same
//! moment choose one after the other.
//!
//! The files are in a folder that only this user can write: `/tmp/mgpurun-UID`, for every session of the user the same
//! one. Other users' launches are known by their processes, from NVML.

use std::fs::{DirBuilder, File, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl, open, openat};
use nix::sys::stat::{Mode, fstat};
use nix::unistd::geteuid;

use crate::placement::Gpu;

/// The environment variable that names another folder.
const FOLDER_VARIABLE: &str = "MGPU_LOCK_DIR";

/// Longest wait for a launch that is choosing GPUs, and the interval at which to look.
const SELECTION_TIMES: (Duration, Duration) = (Duration::from_secs(10), Duration::from_millis(20));

/// Maximum number of bytes that are read of a file.
const MAX_TEXT: u64 = 512;

/// Why GPUs cannot be reserved.
#[derive(Debug, thiserror::Error)]
#[error("cannot reserve GPUs in {}: {problem}; {FOLDER_VARIABLE} names another folder", folder.display())]
pub struct ReservationError {
    /// The folder of the locks.
    pub folder: PathBuf,
    /// What is wrong with it.
    pub problem: String,
}

/// The reservations of this user, while this launch chooses GPUs.
pub(crate) struct Register {
    path: PathBuf,
    folder: File,
    /// Locked until this value is dropped.
    _selection: File,
}

/// GPUs that are reserved as long as this value and the ranks live.
#[derive(Debug, Default)]
pub(crate) struct Reservations {
    _locks: Vec<File>,
}

impl Register {
    /// Opens the register, and keeps other launches from choosing GPUs.
    pub(crate) fn open() -> Result<Self, ReservationError> {
        let named = std::env::var_os(FOLDER_VARIABLE).filter(|folder| !folder.is_empty());
        let path = named.map_or_else(|| PathBuf::from(format!("/tmp/mgpurun-{}", geteuid())), PathBuf::from);
        Self::open_in(&path).map_err(|problem| ReservationError { folder: path, problem })
    }

    fn open_in(path: &Path) -> Result<Self, String> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        match DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(text(&error)),
            _ => {}
        }
        let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let folder = open(path, flags, Mode::empty()).map_err(|error| text(&error))?;
        let state = fstat(&folder).map_err(|error| text(&error))?;
        if state.st_uid != geteuid().as_raw() {
            return Err("it belongs to another user".into());
        }
        if state.st_mode & 0o077 != 0 {
            return Err("other users may use it; try: chmod 700 on it".into());
        }
        let folder = File::from(folder);
        let selection = open_file(&folder, "selection.lock").map_err(|error| text(&error))?;
        lock_selection(&selection)?;
        Ok(Register { path: path.to_owned(), folder, _selection: selection })
    }

    /// The launch that has reserved this GPU, as a phrase.
    ///
    /// # Errors
    /// If its file cannot be opened.
    pub(crate) fn holder(&self, gpu: &Gpu) -> Result<Option<String>, ReservationError> {
        let file = self.file_of(gpu)?;
        match file.try_lock() {
            Ok(()) => Ok(None),
            Err(TryLockError::WouldBlock) => Ok(Some(read_holder(&file))),
            Err(TryLockError::Error(error)) => Err(self.failed(&error)),
        }
    }

    /// Reserves a GPU for the launch of `command`, for itself alone or together with others. Returns the holder if
    /// another launch has it for itself.
    ///
    /// # Errors
    /// If its file cannot be locked.
    pub(crate) fn reserve(
        &self,
        gpu: &Gpu,
        alone: bool,
        command: &str,
        reservations: &mut Reservations,
    ) -> Result<Option<String>, ReservationError> {
        let mut file = self.file_of(gpu)?;
        match if alone { file.try_lock() } else { file.try_lock_shared() } {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(Some(read_holder(&file))),
            Err(TryLockError::Error(error)) => return Err(self.failed(&error)),
        }
        let line = format!("{} {command}", std::process::id());
        // On a full disk the lock counts all the same; only errors of other launches do not name this one.
        let _ = file.set_len(0).and_then(|()| file.rewind()).and_then(|()| file.write_all(line.as_bytes()));
        // The ranks inherit it.
        fcntl(file.as_fd(), FcntlArg::F_SETFD(FdFlag::empty()))
            .map_err(|error| self.failed(&error.into()))?;
        reservations._locks.push(file);
        Ok(None)
    }

    fn file_of(&self, gpu: &Gpu) -> Result<File, ReservationError> {
        // A name from CUDA_VISIBLE_DEVICES may contain anything.
        let plain = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' };
        let name: String = gpu.lasting_name().chars().map(plain).take(100).collect();
        open_file(&self.folder, &format!("gpu-{name}.lock")).map_err(|error| self.failed(&error))
    }

    fn failed(&self, error: &io::Error) -> ReservationError {
        ReservationError { folder: self.path.clone(), problem: error.to_string() }
    }
}

fn open_file(folder: &File, name: &str) -> io::Result<File> {
    let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK;
    Ok(File::from(openat(folder, name, flags, Mode::S_IRUSR | Mode::S_IWUSR)?))
}

/// Locks the file that is locked while a launch chooses GPUs.
fn lock_selection(file: &File) -> Result<(), String> {
    let (longest, interval) = SELECTION_TIMES;
    let deadline = Instant::now() + longest;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => std::thread::sleep(interval),
            Err(TryLockError::WouldBlock) => {
                return Err(format!("another launch has been choosing GPUs for {} s", longest.as_secs()));
            }
            Err(TryLockError::Error(error)) => return Err(error.to_string()),
        }
    }
}

/// "launch 4711 (train_mnist --net a)", from a file that `reserve` has written.
fn read_holder(file: &File) -> String {
    let mut bytes = Vec::new();
    // Whatever cannot be read does not matter: the lock alone counts.
    let _ = file.take(MAX_TEXT).read_to_end(&mut bytes);
    let text = String::from_utf8_lossy(&bytes);
    match text.trim().split_once(' ') {
        Some((pid, command)) if pid.parse::<u32>().is_ok() => {
            format!("launch {pid} ({})", command.escape_debug())
        }
        _ => "another launch".into(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn gpu(uuid: &str) -> Gpu {
        Gpu { name: "0".into(), uuid: Some(uuid.into()), ..Gpu::default() }
    }

    #[test]
    fn a_gpu_is_reserved_once_and_names_its_holder() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
        let register = Register::open_in(folder.path()).unwrap();
        let (mut first, mut second) = (Reservations::default(), Reservations::default());
        let one = gpu("GPU-1/../x");
        assert_eq!(register.holder(&one).unwrap(), None);
        assert_eq!(register.reserve(&one, true, "train --net a", &mut first).unwrap(), None);
        let holder = format!("launch {} (train --net a)", std::process::id());
        for alone in [true, false] {
            assert_eq!(register.reserve(&one, alone, "x", &mut second).unwrap(), Some(holder.clone()));
        }
        assert_eq!(register.holder(&one).unwrap(), Some(holder));
        drop(first);
        assert_eq!(register.holder(&one).unwrap(), None);
        // Together with others.
        let mut third = Reservations::default();
        for reservations in [&mut second, &mut third] {
            assert_eq!(register.reserve(&one, false, "x", reservations).unwrap(), None);
        }
        drop(second);
        assert!(register.holder(&one).unwrap().is_some());
        drop(third);
        std::fs::write(folder.path().join("gpu-GPU-1____x.lock"), b"\xff\n1 \x1b").unwrap();
        assert_eq!(register.reserve(&one, true, "y", &mut Reservations::default()).unwrap(), None);
    }

    #[test]
    fn only_a_private_folder_is_used() {
        let base = tempfile::tempdir().unwrap();
        let folder = base.path().join("locks");
        drop(Register::open_in(&folder).unwrap());
        assert_eq!(folder.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        let refused = |folder: &Path| Register::open_in(folder).err().unwrap();
        let link = base.path().join("link");
        symlink(&folder, &link).unwrap();
        assert!(!refused(&link).is_empty());
        std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(refused(&folder), "other users may use it; try: chmod 700 on it");
        assert!(!refused(&base.path().join("none/locks")).is_empty());
        std::fs::write(base.path().join("file"), "").unwrap();
        assert!(!refused(&base.path().join("file")).is_empty());
        assert_eq!(
            refused(Path::new("/")),
            if geteuid().is_root() {
                "other users may use it; try: chmod 700 on it"
            } else {
                "it belongs to another user"
            }
        );
    }
}
