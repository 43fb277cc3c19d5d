//! By-product files of a training: plots, timelines, logits.
//!
//! A regular file is replaced atomically: the new content is written to a temporary file beside it, flushed, and
//! renamed. A full disk or a kill leaves the old file. The new file has the mode and the owner of the old one.
//! Symbolic links are followed, also a link whose target does not exist yet.
//!
//! Some files cannot be replaced by a rename; these are truncated and overwritten in place, as a shell's `>` does:
//! devices (a rename would turn `/dev/null` into a regular file), pipes, files with several hard links, and files
//! whose owner cannot be preserved or whose folder is not writable. If the file is this process's standard output or
//! error, the content is appended after what was printed. Writing to a pipe without a reader is an error and does not
//! block. Folders, sockets and block devices are rejected.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Error, ErrorKind, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};
use std::process;

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::fstat;
use nix::unistd::{AccessFlags, faccessat};

pub use mgpu_control::process::block_sigxfsz;

/// Most symbolic links in a row that the kernel follows.
const MAX_LINKS: usize = 40;
/// Milliseconds until a write to a pipe fails if its reader reads nothing.
const PIPE_TIMEOUT_MS: u16 = 10_000;

/// How a file gets its content.
#[derive(Debug)]
enum Destination {
    /// By a rename to this path. The metadata is that of the file which is replaced, if there is one.
    Replace(PathBuf, Option<Metadata>),
    Truncate,
    /// The file is this process's standard output or standard error.
    Standard(File),
    /// A device or a pipe.
    Stream,
}

/// Writes `content` as the whole content of the file `path`.
///
/// ```
/// # fn main() -> std::io::Result<()> {
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("plot.svg");
/// mgpu::output_file::check(&path)?; // Before the training, and
/// mgpu::output_file::write(&path, b"<svg/>")?; // after it.
/// assert_eq!(std::fs::read(&path)?, b"<svg/>");
/// mgpu::output_file::write("/dev/null".as_ref(), b"<svg/>")?; // Still a device.
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// If the file cannot be written. A regular file is then unchanged, unless it had to be overwritten in place.
pub fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    match Destination::of(path)? {
        Destination::Replace(target, old) => replace(&target, old.as_ref(), content),
        Destination::Truncate => write_through(OpenOptions::new().truncate(true), path, content),
        Destination::Standard(mut stream) => {
            io::stdout().flush()?;
            stream.write_all(content)
        }
        Destination::Stream => stream(path, content),
    }
}

/// Checks whether [`write`](write()) could write to `path`, so that a training does not fail at its end. Opens and
/// creates nothing: the reader of a pipe would take the close for the end.
///
/// # Errors
/// If [`write`](write()) would fail.
pub fn check(path: &Path) -> io::Result<()> {
    let access = |path: &Path, flags| Ok(faccessat(AT_FDCWD, path, flags, AtFlags::AT_EACCESS)?);
    match Destination::of(path)? {
        Destination::Replace(target, _) => access(folder_of(&target), AccessFlags::W_OK | AccessFlags::X_OK),
        _ => access(path, AccessFlags::W_OK),
    }
}

impl Destination {
    fn of(path: &Path) -> io::Result<Self> {
        let refused = |kind, what: &str| Err(Error::new(kind, format!("it is {what}")));
        let metadata = match fs::metadata(path) {
            Err(error)
                if error.kind() == ErrorKind::NotFound && !path.as_os_str().as_bytes().ends_with(b"/") =>
            {
                return Ok(Destination::Replace(resolve_links(path)?, None));
            }
            other => other?,
        };
        let kind = metadata.file_type();
        if kind.is_dir() {
            return refused(ErrorKind::IsADirectory, "a folder");
        } else if kind.is_block_device() {
            return refused(ErrorKind::InvalidInput, "a block device, whose content would be overwritten");
        } else if kind.is_socket() {
            return refused(ErrorKind::InvalidInput, "a socket");
        } else if !kind.is_file() {
            return Ok(Destination::Stream);
        }
        let target = resolve_links(path)?;
        // A link in /proc can lead to a file that was unlinked.
        let is_named = target.symlink_metadata().is_ok_and(|found| same_file(&found, &metadata));
        let folder = faccessat(AT_FDCWD, folder_of(&target), AccessFlags::W_OK, AtFlags::AT_EACCESS);
        Ok(if let Some(stream) = standard_stream(&metadata) {
            Destination::Standard(stream)
        } else if is_named && metadata.nlink() == 1 && folder.is_ok() {
            Destination::Replace(target, Some(metadata))
        } else {
            Destination::Truncate
        })
    }
}

/// Resolves symbolic links.
fn resolve_links(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        match fs::read_link(&path) {
            Ok(target) => path = folder_of(&path).join(target),
            Err(_) => return Ok(path),
        }
    }
    Err(Errno::ELOOP.into())
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn same_file(one: &Metadata, other: &Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

/// Standard output or standard error, if it refers to the file with this metadata. Opening that file a second time
/// would have a separate offset, and the two would overwrite each other.
pub fn standard_stream(metadata: &Metadata) -> Option<File> {
    let to_file = |stream: BorrowedFd<'_>| {
        let found = fstat(stream).ok()?;
        let is_same = (found.st_dev, found.st_ino) == (metadata.dev(), metadata.ino());
        is_same.then(|| stream.try_clone_to_owned().ok()).flatten().map(File::from)
    };
    to_file(io::stdout().as_fd()).or_else(|| to_file(io::stderr().as_fd()))
}

fn replace(target: &Path, old: Option<&Metadata>, content: &[u8]) -> io::Result<()> {
    let (mut file, partial) = create_beside(target)?;
    if old.is_some_and(|old| copy_owner_and_mode(old, &file).is_err()) {
        let _ = fs::remove_file(&partial);
        return write_through(OpenOptions::new().truncate(true), target, content);
    }
    let written = file.write_all(content).and_then(|()| file.sync_all());
    written.and_then(|()| fs::rename(&partial, target)).inspect_err(|_| {
        // This process has created it, so nobody else needs it.
        let _ = fs::remove_file(&partial);
    })
}

/// Creates a new file with an unused name in the folder of `target`.
fn create_beside(target: &Path) -> io::Result<(File, PathBuf)> {
    for number in 0u64.. {
        let partial = folder_of(target).join(format!(".mgpu-{}-{number}.partial", process::id()));
        match OpenOptions::new().write(true).create_new(true).open(&partial) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            opened => return Ok((opened?, partial)),
        }
    }
    Err(ErrorKind::AlreadyExists.into())
}

/// Gives `file` the owner and the mode of `old`.
fn copy_owner_and_mode(old: &Metadata, file: &File) -> io::Result<()> {
    let new = file.metadata()?;
    if (new.uid(), new.gid()) != (old.uid(), old.gid()) {
        fchown(file, Some(old.uid()), Some(old.gid()))?;
    }
    let mode = old.permissions();
    if new.permissions() == mode { Ok(()) } else { file.set_permissions(mode) }
}

fn write_through(how: &mut OpenOptions, path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = how.write(true).open(path)?;
    file.write_all(content)?;
    file.sync_all()
}

/// Writes to a device or a pipe; times out if the reader reads nothing for too long.
fn stream(path: &Path, mut content: &[u8]) -> io::Result<()> {
    let flags = OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
    let mut file =
        OpenOptions::new().write(true).custom_flags(flags.bits()).open(path).map_err(|error| match error
            .raw_os_error()
        {
            Some(number) if number == Errno::ENXIO as i32 => Error::new(error.kind(), "nobody reads from it"),
            _ => error,
        })?;
    while !content.is_empty() {
        match file.write(content) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(count) => content = &content[count..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => wait_for_room(&file)?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn wait_for_room(file: &File) -> io::Result<()> {
    match poll(&mut [PollFd::new(file.as_fd(), PollFlags::POLLOUT)], PollTimeout::from(PIPE_TIMEOUT_MS)) {
        Ok(0) => Err(Error::new(ErrorKind::TimedOut, "its reader has read nothing for 10 s")),
        Ok(_) | Err(Errno::EINTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests;
