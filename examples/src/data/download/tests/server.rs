//! A web server on loopback with answers defined by a test.

use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// A received request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Request {
    /// The path without its slash.
    pub(super) name: String,
    /// The first byte of the requested range, if there is one.
    pub(super) from: Option<usize>,
}

/// Serves until it is dropped, one connection after the other, one request each.
pub(super) struct Server {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<Request>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts a server. `answer` returns the bytes of a whole HTTP response for each request.
    pub(super) fn start(mut answer: impl FnMut(&Request) -> Vec<u8> + Send + 'static) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let (requests, stop) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
        let (seen, stopped) = (Arc::clone(&requests), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if stopped.load(Ordering::SeqCst) {
                    return;
                }
                let mut stream = stream.unwrap();
                let Some(request) = read_request(&stream) else { continue };
                let bytes = answer(&request);
                seen.lock().unwrap().push(request);
                // The client may have closed the connection because of its limits.
                let _ = stream.write_all(&bytes);
            }
        });
        Self { address, requests, stop, thread: Some(thread) }
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}/mnist/", self.address)
    }

    /// All requests so far.
    pub(super) fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        // Wakes up the server if it waits for a connection.
        let _ = TcpStream::connect(self.address);
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || std::thread::panicking(), "the test's server panicked");
    }
}

fn read_request(stream: &TcpStream) -> Option<Request> {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let first = lines.next()?;
    let name = first.split(' ').nth(1)?.rsplit('/').next()?.to_owned();
    let mut from = None;
    for line in lines.take_while(|line| !line.is_empty()) {
        if let Some(range) = line.to_ascii_lowercase().strip_prefix("range: bytes=") {
            from = Some(range.trim_end_matches('-').parse().unwrap());
        }
    }
    Some(Request { name, from })
}

/// An HTTP response; `len` is its Content-Length.
pub(super) fn answer(status: &str, headers: &str, len: usize, body: &[u8]) -> Vec<u8> {
    let head = format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {len}\r\n{headers}\r\n");
    [head.as_bytes(), body].concat()
}

/// The response of a correct server: all of `file`, or the requested range.
pub(super) fn serve(file: &[u8], request: &Request) -> Vec<u8> {
    let len = file.len();
    match request.from {
        None => answer("200 OK", "", len, file),
        Some(from) if from < len => {
            let range = format!("Content-Range: bytes {from}-{}/{len}\r\n", len - 1);
            answer("206 Partial Content", &range, len - from, &file[from..])
        }
        Some(_) => answer("416 Range Not Satisfiable", &format!("Content-Range: bytes */{len}\r\n"), 0, b""),
    }
}
