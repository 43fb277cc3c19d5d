//! Transfers one file from one mirror into a `.part` file, resuming as often as needed.
//!
//! Responses of a server to a request for the bytes from `have` on (RFC 9110, section 14):
//!
//! | response | meaning | action |
//! |---|---|---|
//! | 206, `Content-Range: bytes HAVE-…` | the rest | appended |
//! | 206 with another range, or none | not the requested range | request the whole file, without a range |
//! | 200 | no support for ranges; this is the whole file | the part starts again |
//! | 416, `Content-Range: bytes */HAVE` | there is no rest: the part is complete | the checksum decides |
//! | 416 otherwise | the part is longer than the file | request the whole file, without a range |
//!
//! A broken connection is resumed where it broke. After [`BREAKS`] breaks the mirror is given up; the part stays, and
//! the next mirror continues from there.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use ureq::http::{HeaderMap, Response, Uri};
use ureq::{Agent, Body};

use super::progress::{Bar, Progress};
use super::{DataError, Reason, RemoteFile};

/// Broken connections after which the next mirror is tried.
const BREAKS: u32 = 3;
/// Timeout of connecting to a host.
const CONNECT: Duration = Duration::from_secs(10);
/// Timeout without a received byte, later.
const SILENCE: Duration = Duration::from_secs(30);

/// The HTTP client.
pub(super) struct Client {
    agent: Agent,
    progress: Progress,
}

/// A completed transfer.
pub(super) struct Transfer {
    /// Whether the part was received in several pieces, or existed before.
    pub(super) resumed: bool,
}

/// How a single response ended.
enum ResponseEnd {
    /// Complete.
    Whole,
    /// Interrupted. Some bytes may have arrived.
    Broken(String),
    /// With a range other than the requested one.
    Range,
}

impl Client {
    pub(super) fn new(progress: Progress) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_resolve(Some(CONNECT))
            .timeout_connect(Some(CONNECT))
            .timeout_recv_response(Some(SILENCE))
            .timeout_per_read(Some(SILENCE))
            .timeout_per_write(Some(SILENCE))
            // Ranges count the bytes of the file, so the server must not encode it again.
            .accept_encoding("identity")
            .user_agent(concat!("mgpu/", env!("CARGO_PKG_VERSION")))
            .build();
        Self { agent: config.into(), progress }
    }

    /// Completes `part` with the file at `url`. The outer error is local, the inner one the mirror's.
    pub(super) fn transfer(
        &self,
        url: &str,
        file: &RemoteFile<'_>,
        part: &Path,
    ) -> Result<Result<Transfer, Reason>, DataError> {
        let bar = self.progress.file(file.name);
        // A transfer leaves only regular files: a link could lead to a foreign file, and a pipe would block.
        if part.symlink_metadata().is_ok_and(|metadata| !metadata.is_file()) {
            let error = std::io::Error::new(ErrorKind::AlreadyExists, "not a regular file: move it away");
            return Err(DataError::io(part)(error));
        }
        let mut out = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(part)
            .map_err(DataError::io(part))?;
        let mut breaks = 0;
        let mut ranges = true;
        loop {
            let have = match ranges {
                true => out.seek(SeekFrom::End(0)),
                false => out.set_len(0).and_then(|()| out.rewind()).map(|()| 0),
            };
            let have = have.map_err(DataError::io(part))?;
            let mut request = self.agent.get(url);
            if is_local(request.uri_ref()) {
                request = request.config().proxy(None).build();
            }
            if have > 0 {
                request = request.header("Range", format!("bytes={have}-"));
            }
            let ended = match request.call() {
                Ok(answer) => {
                    match receive(answer, have, file, &mut out, &bar).map_err(DataError::io(part))? {
                        Ok(ended) => ended,
                        Err(reason) => return Ok(Err(reason)),
                    }
                }
                Err(error) => return Ok(Err(Reason::Connection(error.to_string()))),
            };
            match ended {
                ResponseEnd::Whole => return Ok(Ok(Transfer { resumed: have > 0 })),
                ResponseEnd::Range if ranges => ranges = false,
                ResponseEnd::Range => {
                    return Ok(Err(Reason::Connection("sent a range that was not requested".to_owned())));
                }
                ResponseEnd::Broken(error) => {
                    breaks += 1;
                    if breaks == BREAKS {
                        return Ok(Err(Reason::Connection(error)));
                    }
                }
            }
        }
    }
}

/// True for a mirror on this machine, which a proxy could not reach.
fn is_local(uri: Option<&Uri>) -> bool {
    let host = uri.and_then(Uri::host).unwrap_or_default();
    host == "localhost"
        || host.trim_matches(['[', ']']).parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

/// Writes the body of a response after the first `have` bytes of `out`, or replaces them.
fn receive(
    mut answer: Response<Body>,
    have: u64,
    file: &RemoteFile<'_>,
    out: &mut File,
    bar: &Bar,
) -> std::io::Result<Result<ResponseEnd, Reason>> {
    let range = ContentRange::of(answer.headers());
    let mut written = match answer.status().as_u16() {
        206 if range.first == Some(have) => have,
        206 => return Ok(Ok(ResponseEnd::Range)),
        416 if have > 0 && range.total == Some(have) => return Ok(Ok(ResponseEnd::Whole)),
        416 if have > 0 => return Ok(Ok(ResponseEnd::Range)),
        200 => {
            out.set_len(0)?;
            out.rewind()?;
            0
        }
        status => return Ok(Err(Reason::Status(status))),
    };
    // A gzip file of incompressible content is slightly larger than the content.
    let limit = file.len + file.len / 64 + 1024;
    let total = answer.body().content_length().map(|rest| written.saturating_add(rest));
    bar.begin(written, total);
    let mut body = answer.body_mut().with_config().limit(u64::MAX).reader();
    let mut chunk = vec![0; 1 << 16];
    loop {
        match body.read(&mut chunk) {
            // A body without a length ends with its connection, whoever closed it; the checksum decides.
            Ok(0) if total.is_none_or(|total| written == total) => return Ok(Ok(ResponseEnd::Whole)),
            Ok(0) => return Ok(Ok(ResponseEnd::Broken("the connection ended too early".to_owned()))),
            Ok(read) => {
                written += read as u64;
                if written > limit {
                    out.set_len(0)?;
                    return Ok(Err(Reason::TooLong { file: file.name.to_owned(), limit }));
                }
                out.write_all(&chunk[..read])?;
                bar.add(read as u64);
            }
            Err(error) => return Ok(Ok(ResponseEnd::Broken(error.to_string()))),
        }
    }
}

/// Values of `Content-Range`: `bytes FIRST-LAST/TOTAL`, `bytes FIRST-LAST/*` or `bytes */TOTAL`.
#[derive(Debug, Default, PartialEq, Eq)]
struct ContentRange {
    first: Option<u64>,
    total: Option<u64>,
}

impl ContentRange {
    fn of(headers: &HeaderMap) -> Self {
        let value = headers.get("Content-Range").and_then(|value| value.to_str().ok());
        value.map(Self::parse).unwrap_or_default()
    }

    /// Parts that cannot be parsed become `None`.
    fn parse(value: &str) -> Self {
        let Some((range, total)) = value.trim().strip_prefix("bytes ").and_then(|rest| rest.split_once('/'))
        else {
            return Self::default();
        };
        let first = range.split_once('-').and_then(|(first, _)| first.trim().parse().ok());
        Self { first, total: total.trim().parse().ok() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_ranges_are_understood_or_left_out() {
        let range = |first, total| ContentRange { first, total };
        for (text, expected) in [
            ("bytes 5-9/10", range(Some(5), Some(10))),
            ("bytes 5-9/*", range(Some(5), None)),
            ("bytes */10", range(None, Some(10))),
            ("bytes -1-9/10", range(None, Some(10))),
            ("bytes 99999999999999999999-1/10", range(None, Some(10))),
            ("items 5-9/10", range(None, None)),
            ("bytes 5", range(None, None)),
            ("", range(None, None)),
        ] {
            assert_eq!(ContentRange::parse(text), expected, "{text}");
        }
    }
}
