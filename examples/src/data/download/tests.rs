//! Downloads from servers on loopback: complete, interrupted, resumed, wrong, absent.

mod server;

use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::sync::Barrier;

use flate2::Compression;
use flate2::write::GzEncoder;
use server::{Request, Server, answer, serve};
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use super::*;

const NAME: &str = "digits.gz";

/// Content that compresses badly, and its gzip file.
fn sample() -> (Vec<u8>, Vec<u8>) {
    let content: Vec<u8> = (0..50_000u64).map(|i| mgpu_kernels::rng::splitmix64(i) as u8).collect();
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(&content).unwrap();
    (content, encoder.finish().unwrap())
}

fn sum(content: &[u8]) -> String {
    Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Downloads the sample from these mirrors into a folder.
fn fetch_sample(folder: &TempDir, mirrors: &[&str]) -> Result<PathBuf, DataError> {
    let (content, _) = sample();
    let sha256 = sum(&content);
    let file = RemoteFile { name: NAME, sha256: &sha256, len: content.len() as u64 };
    download_files(folder.path(), &[file], mirrors, Progress::Quiet)
}

/// The reasons of a failure, and its message.
fn reasons(result: Result<PathBuf, DataError>) -> (Vec<Reason>, String) {
    let error = result.unwrap_err();
    let text = error.to_string();
    let DataError::Download { file, attempts } = error else { panic!("{text}") };
    assert_eq!(file, NAME);
    (attempts.into_iter().map(|attempt| attempt.reason).collect(), text)
}

fn names(folder: &TempDir) -> Vec<String> {
    let entries = fs::read_dir(folder.path()).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn asked(from: Option<usize>) -> Request {
    Request { name: NAME.to_owned(), from }
}

fn part(folder: &TempDir) -> PathBuf {
    folder.path().join(format!("{NAME}.part"))
}

/// An address without a listener.
fn silent() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    format!("http://{}/", listener.local_addr().unwrap())
}

#[test]
fn a_whole_download_is_kept_and_not_repeated() {
    let (folder, (_, file)) = (tempfile::tempdir().unwrap(), sample());
    let bytes = file.clone();
    let server = Server::start(move |request| serve(&bytes, request));
    for _ in 0..2 {
        assert_eq!(fetch_sample(&folder, &[&server.url()]).unwrap(), folder.path());
        assert_eq!(fs::read(folder.path().join(NAME)).unwrap(), file);
    }
    assert_eq!(server.requests(), [asked(None)]);
    assert_eq!(names(&folder), [NAME, "download.lock"]);
}

#[test]
fn a_folder_that_is_complete_needs_no_mirror_and_is_not_written() {
    let (folder, (content, _)) = (tempfile::tempdir().unwrap(), sample());
    // Uncompressed.
    fs::write(folder.path().join(NAME), content).unwrap();
    fetch_sample(&folder, &[]).unwrap();
    assert_eq!(names(&folder), [NAME]);
}

#[test]
fn a_file_with_other_content_is_renamed_and_kept() {
    let (folder, (_, file)) = (tempfile::tempdir().unwrap(), sample());
    let bytes = file.clone();
    let server = Server::start(move |request| serve(&bytes, request));
    let path = folder.path().join(NAME);
    for (content, kept) in [(&file[..2000], "other"), (b"somebody's own", "other-2")] {
        fs::write(&path, content).unwrap();
        fetch_sample(&folder, &[&server.url()]).unwrap();
        assert_eq!(fs::read(&path).unwrap(), file);
        assert_eq!(fs::read(folder.path().join(format!("{NAME}.{kept}"))).unwrap(), content);
    }
}

#[test]
fn a_part_that_is_not_a_file_is_refused() {
    let (folder, (_, file)) = (tempfile::tempdir().unwrap(), sample());
    let server = Server::start(move |request| serve(&file, request));
    let precious = folder.path().join("precious");
    fs::write(&precious, b"old").unwrap();
    std::os::unix::fs::symlink(&precious, part(&folder)).unwrap();
    let error = fetch_sample(&folder, &[&server.url()]).unwrap_err().to_string();
    assert_eq!(error, format!("{}: not a regular file: move it away", part(&folder).display()));
    assert_eq!(fs::read(&precious).unwrap(), b"old");
    fs::remove_file(part(&folder)).unwrap();
    // A named pipe does not block either.
    for path in [part(&folder), folder.path().join(NAME)] {
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        fetch_sample(&folder, &[&server.url()]).unwrap_err();
        fs::remove_file(path).unwrap();
    }
}

#[test]
fn a_broken_transfer_is_resumed() {
    let (folder, (_, file)) = (tempfile::tempdir().unwrap(), sample());
    let server = Server::start(move |request| match request.from {
        None => answer("200 OK", "", file.len(), &file[..20_000]),
        Some(_) => serve(&file, request),
    });
    fetch_sample(&folder, &[&server.url()]).unwrap();
    assert_eq!(server.requests(), [asked(None), asked(Some(20_000))]);
}

#[test]
fn a_part_is_resumed_by_a_later_run_and_by_the_next_mirror() {
    let (folder, (_, file)) = (tempfile::tempdir().unwrap(), sample());
    let bytes = file.clone();
    // Closes every connection after 5,000 bytes.
    let cutting = Server::start(move |request| {
        let whole = serve(&bytes, request);
        let head = whole.windows(4).position(|end| end == b"\r\n\r\n").unwrap() + 4;
        whole[..head + 5000].to_vec()
    });
    let (found, _) = reasons(fetch_sample(&folder, &[&cutting.url()]));
    assert!(matches!(found[..], [Reason::Connection(_)]), "{found:?}");
    assert_eq!(cutting.requests(), [asked(None), asked(Some(5000)), asked(Some(10_000))]);
    assert_eq!(fs::read(part(&folder)).unwrap(), file[..15_000]);

    let good = Server::start(move |request| serve(&file, request));
    fetch_sample(&folder, &[&cutting.url(), &good.url()]).unwrap();
    assert_eq!(good.requests(), [asked(Some(30_000))]);
    assert_eq!(names(&folder), [NAME, "download.lock"]);
}

#[test]
fn a_server_without_ranges_restarts_the_transfer() {
    let (folder, (_, file)) = (tempfile::tempdir().unwrap(), sample());
    fs::write(part(&folder), &file[..100]).unwrap();
    let server = Server::start(move |_| answer("200 OK", "", file.len(), &file));
    fetch_sample(&folder, &[&server.url()]).unwrap();
    assert_eq!(server.requests(), [asked(Some(100))]);
}

#[test]
fn wrong_ranges_are_not_appended() {
    for range in ["Content-Range: bytes 0-50/51\r\n", "Content-Range: nonsense\r\n", ""] {
        let (folder, (_, file)) = (tempfile::tempdir().unwrap(), sample());
        fs::write(part(&folder), &file[..100]).unwrap();
        let server = Server::start(move |request| match request.from {
            Some(_) => answer("206 Partial Content", range, 51, &file[..51]),
            None => serve(&file, request),
        });
        fetch_sample(&folder, &[&server.url()]).unwrap();
        assert_eq!(server.requests(), [asked(Some(100)), asked(None)]);
    }
}

#[test]
fn an_unrequested_range_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(|_| answer("206 Partial Content", "Content-Range: bytes 7-8/9\r\n", 2, b"ab"));
    let (found, text) = reasons(fetch_sample(&folder, &[&server.url()]));
    assert!(matches!(found[..], [Reason::Connection(_)]), "{text}");
}

#[test]
fn a_part_that_is_whole_already_is_kept_and_one_too_long_is_not() {
    for surplus in [0, 10] {
        let (folder, (_, file)) = (tempfile::tempdir().unwrap(), sample());
        let len = file.len() + surplus;
        fs::write(part(&folder), [&file[..], &vec![0; surplus]].concat()).unwrap();
        let server = Server::start(move |request| serve(&file, request));
        fetch_sample(&folder, &[&server.url()]).unwrap();
        let expected = [asked(Some(len)), asked(None)];
        assert_eq!(server.requests(), expected[..if surplus == 0 { 1 } else { 2 }]);
    }
}

#[test]
fn a_part_with_a_wrong_beginning_is_fetched_as_a_whole() {
    let (folder, (_, file)) = (tempfile::tempdir().unwrap(), sample());
    fs::write(part(&folder), [7; 100]).unwrap();
    let server = Server::start(move |request| serve(&file, request));
    fetch_sample(&folder, &[&server.url()]).unwrap();
    assert_eq!(server.requests(), [asked(Some(100)), asked(None)]);
}

#[test]
fn other_content_is_refused_and_removed() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(|_| answer("200 OK", "", 5, b"login"));
    let (found, text) = reasons(fetch_sample(&folder, &[&server.url()]));
    let (expected, received) = (sum(&sample().0), sum(b"login"));
    assert!(text.contains(&format!("{NAME} with wrong content")), "{text}");
    assert!(text.contains(&format!("expected SHA-256 {expected}, received {received}")), "{text}");
    assert_eq!(found, [Reason::Checksum { file: NAME.to_owned(), expected, received }]);
    assert_eq!(names(&folder), ["download.lock"]);
}

#[test]
fn damaged_gzip_data_is_refused_and_removed() {
    let (folder, (_, mut file)) = (tempfile::tempdir().unwrap(), sample());
    file.truncate(30_000);
    let server = Server::start(move |request| serve(&file, request));
    let (_, text) = reasons(fetch_sample(&folder, &[&server.url()]));
    assert!(text.contains("received damaged gzip data"), "{text}");
    assert_eq!(names(&folder), ["download.lock"]);
}

#[test]
fn endless_content_is_cut_off() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(|_| answer("200 OK", "", 10_000_000, &vec![0; 10_000_000]));
    let (found, _) = reasons(fetch_sample(&folder, &[&server.url()]));
    assert_eq!(found, [Reason::TooLong { file: NAME.to_owned(), limit: 50_000 + 781 + 1024 }]);
    assert_eq!(fs::metadata(part(&folder)).unwrap().len(), 0);
}

#[test]
fn decompression_bombs_are_cut_off() {
    let folder = tempfile::tempdir().unwrap();
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(&vec![0; 20_000_000]).unwrap();
    let bomb = encoder.finish().unwrap();
    let server = Server::start(move |request| serve(&bomb, request));
    let (_, text) = reasons(fetch_sample(&folder, &[&server.url()]));
    assert!(text.contains("received more than the 50000 bytes expected"), "{text}");
}

#[test]
fn the_second_mirror_is_asked_when_the_first_has_nothing() {
    let (folder, (_, file)) = (tempfile::tempdir().unwrap(), sample());
    let first = Server::start(|_| answer("404 Not Found", "", 0, b""));
    let second = Server::start(move |request| serve(&file, request));
    fetch_sample(&folder, &[&first.url(), &second.url()]).unwrap();
    assert_eq!((first.requests().len(), second.requests().len()), (1, 1));
}

#[test]
fn offline_errors_list_every_mirror_and_suggest_data_dir() {
    let folder = tempfile::tempdir().unwrap();
    let (nobody, broken) = (silent(), Server::start(|_| answer("503 Service Unavailable", "", 0, b"")));
    let (found, text) = reasons(fetch_sample(&folder, &[&nobody, &broken.url(), "no address"]));
    assert!(
        matches!(found[..], [Reason::Connection(_), Reason::Status(503), Reason::Connection(_)]),
        "{text}"
    );
    let url = broken.url();
    for expected in [
        format!("cannot download {NAME}"),
        format!("{nobody}: "),
        format!("{url}: answered with HTTP status 503"),
        "--data DIR".to_owned(),
        "--synthetic".to_owned(),
    ] {
        assert!(text.contains(&expected), "`{expected}` is not in:\n{text}");
    }
    let (_, text) = reasons(fetch_sample(&folder, &[]));
    assert!(text.contains("no mirror was given"), "{text}");
}

#[test]
fn concurrent_downloads_are_serialised() {
    let (folder, (_, file)) = (tempfile::tempdir().unwrap(), sample());
    let server = Server::start(move |request| serve(&file, request));
    let start = Barrier::new(4);
    // Locks belong to open files, not to processes, so threads exclude each other like processes.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                start.wait();
                fetch_sample(&folder, &[&server.url()]).unwrap();
            });
        }
    });
    assert_eq!(server.requests(), [asked(None)]);
    assert_eq!(names(&folder), [NAME, "download.lock"]);
}

#[test]
fn a_folder_that_cannot_be_made_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, b"").unwrap();
    let error = download(&file.join("mnist"), &MIRRORS, Progress::Quiet).unwrap_err();
    assert!(matches!(&error, DataError::Io { path, .. } if path.starts_with(&file)), "{error}");
}

#[test]
fn downloads_are_kept_in_the_users_cache() {
    let folder = |xdg: &'static str, home: &'static str| {
        folder_from(move |name| Some(if name == "HOME" { home.into() } else { xdg.into() }))
    };
    assert_eq!(folder("/cache", "/home/me").unwrap(), Path::new("/cache/mgpu/mnist"));
    assert_eq!(folder("", "/home/me").unwrap(), Path::new("/home/me/.cache/mgpu/mnist"));
    assert_eq!(folder("relative", "/home/me").unwrap(), Path::new("/home/me/.cache/mgpu/mnist"));
    assert!(matches!(folder_from(|_| None), Err(DataError::NoCache)));
}

#[test]
fn the_original_files_have_the_pinned_sums() {
    let Some(folder) = std::env::var_os("MGPU_DATA").map(PathBuf::from) else {
        println!("skipped: set MGPU_DATA to verify the original files");
        return;
    };
    for file in &FILES {
        let zipped = folder.join(file.name);
        let path = if zipped.is_file() { zipped } else { folder.join(file.name.trim_end_matches(".gz")) };
        assert_eq!(verify::content(&path, file).unwrap(), Content::Right, "{}", file.name);
    }
}
