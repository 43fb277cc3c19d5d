use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::sync::mpsc;
use std::thread;

use nix::sys::stat::Mode;
use nix::unistd::{geteuid, mkfifo};

use super::*;

/// Asserts that the folder contains exactly these names.
fn assert_names(folder: &Path, names: &[&str]) {
    let entries = fs::read_dir(folder).unwrap();
    let mut found: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    found.sort();
    assert_eq!(found, names);
}

fn refused(path: &Path) -> String {
    let (checked, written) = (check(path).unwrap_err(), write(path, b"new").unwrap_err());
    assert_eq!(checked.to_string(), written.to_string(), "{}", path.display());
    written.to_string()
}

#[test]
fn files_are_replaced_atomically_with_their_mode() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plot.svg");
    check(&path).unwrap();
    assert_names(folder.path(), &[]);
    write(&path, b"first").unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
    let before = fs::metadata(&path).unwrap();
    // A process that has the old file open keeps reading the old content.
    let mut old = File::open(&path).unwrap();
    check(&path).unwrap();
    write(&path, b"second").unwrap();
    assert_eq!(io::read_to_string(&mut old).unwrap(), "first");
    assert_eq!(fs::read(&path).unwrap(), b"second");
    let after = fs::metadata(&path).unwrap();
    assert_eq!((after.mode(), after.uid(), after.gid()), (before.mode(), before.uid(), before.gid()));
    assert_names(folder.path(), &["plot.svg"]);
}

#[test]
fn the_owner_of_a_file_is_preserved() {
    if !geteuid().is_root() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plot.svg");
    fs::write(&path, b"old").unwrap();
    std::os::unix::fs::chown(&path, Some(12345), Some(54321)).unwrap();
    write(&path, b"new").unwrap();
    let metadata = fs::metadata(&path).unwrap();
    assert_eq!((metadata.uid(), metadata.gid(), metadata.len()), (12345, 54321, 3));
}

#[test]
fn symbolic_links_are_followed_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::create_dir(path("deeper")).unwrap();
    symlink("deeper/second", path("first")).unwrap();
    symlink("../file", path("deeper/second")).unwrap();
    for content in ["to nothing yet", "to a file"] {
        check(&path("first")).unwrap();
        write(&path("first"), content.as_bytes()).unwrap();
        assert_eq!(fs::read_to_string(path("file")).unwrap(), content);
        assert_eq!(fs::read_link(path("first")).unwrap(), Path::new("deeper/second"));
        assert_names(&path("deeper"), &["second"]);
    }
    // Both hard links have the new content.
    fs::hard_link(path("file"), path("other-name")).unwrap();
    write(&path("file"), b"new").unwrap();
    assert_eq!(fs::read(path("other-name")).unwrap(), b"new");
    symlink("none/file", path("astray")).unwrap();
    symlink("loop", path("loop")).unwrap();
    assert_eq!(refused(&path("astray")), "No such file or directory (os error 2)");
    assert_eq!(refused(&path("loop")), "Too many levels of symbolic links (os error 40)");
    assert_names(folder.path(), &["astray", "deeper", "file", "first", "loop", "other-name"]);
}

#[test]
fn devices_are_not_replaced() {
    for name in ["/dev/null", "/dev/full"] {
        let before = fs::metadata(name).unwrap();
        check(name.as_ref()).unwrap();
        let written = write(name.as_ref(), b"new");
        assert_eq!(written.is_ok(), name == "/dev/null", "{written:?}");
        let after = fs::metadata(name).unwrap();
        assert!(same_file(&before, &after) && after.file_type().is_char_device(), "{name}");
    }
}

#[test]
fn pipes_are_written_if_they_have_a_reader() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pipe");
    mkfifo(&path, Mode::S_IRWXU).unwrap();
    check(&path).unwrap();
    assert_eq!(write(&path, b"new").unwrap_err().to_string(), "nobody reads from it");
    let flags = OFlag::O_NONBLOCK.bits();
    let reader = OpenOptions::new().read(true).custom_flags(flags).open(&path).unwrap();
    // More than a pipe holds, so that the writer has to wait.
    let content = vec![7; 1 << 20];
    let (send, receive) = mpsc::channel();
    let writer = thread::spawn({
        let content = content.clone();
        move || send.send(write(&path, &content)).unwrap()
    });
    let mut read = Vec::new();
    while read.len() < content.len() {
        poll(&mut [PollFd::new(reader.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE).unwrap();
        let _ = io::Read::read_to_end(&mut &reader, &mut read);
    }
    receive.recv().unwrap().unwrap();
    writer.join().unwrap();
    assert!(read == content);
    assert_names(folder.path(), &["pipe"]);
}

#[test]
fn folders_sockets_and_missing_parents_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::create_dir(path("folder")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(path("socket")).unwrap();
    fs::write(path("file"), b"old").unwrap();
    assert_eq!(refused(&path("folder")), "it is a folder");
    assert_eq!(refused(&path("socket")), "it is a socket");
    assert_eq!(refused(&path("file/inside")), "Not a directory (os error 20)");
    assert_eq!(refused(&path("new/")), "No such file or directory (os error 2)");
    assert_eq!(refused(&path("none/file")), "No such file or directory (os error 2)");
    assert_names(folder.path(), &["file", "folder", "socket"]);
    if geteuid().is_root() {
        return;
    }
    // A file in a folder without write permission is overwritten in place.
    fs::set_permissions(folder.path(), Permissions::from_mode(0o555)).unwrap();
    assert_eq!(refused(&path("new")), "Permission denied (os error 13)");
    write(&path("file"), b"new").unwrap();
    assert_eq!(fs::read(path("file")).unwrap(), b"new");
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn temporary_names_never_overwrite_existing_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plot.svg");
    let taken = folder.path().join(format!(".mgpu-{}-0.partial", process::id()));
    symlink("precious", &taken).unwrap();
    fs::write(folder.path().join("precious"), b"old").unwrap();
    fs::write(path.with_extension("svg.partial"), b"old").unwrap();
    write(&path, b"new").unwrap();
    assert_eq!(fs::read(folder.path().join("precious")).unwrap(), b"old");
    assert_eq!(fs::read(path.with_extension("svg.partial")).unwrap(), b"old");
    assert!(taken.is_symlink());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 4);
}
