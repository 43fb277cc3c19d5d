//! A rank's side: one request at a time, each answered before its deadline.

use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::message::{MAX_FDS, MAX_VALUE, Manifest, Reply, Request, VERSION, encode};
use super::socket::{Connection, Received};
use crate::progress::ProgressPage;
use crate::{Error, Result};

/// What the server may take beyond a request's own deadline before it counts as gone.
const SERVER_MARGIN: Duration = Duration::from_secs(5);

/// How long a rank waits for the others to join. The launcher, which knows who is missing, ends the run long before.
const JOIN_PATIENCE: Duration = Duration::from_secs(24 * 3600);

/// Longest key and longest name of a barrier, in bytes.
const MAX_NAME: usize = 256;

fn check_name(operation: &'static str, name: &str) -> Result<()> {
    if name.len() <= MAX_NAME {
        return Ok(());
    }
    let problem = format!("a name of {} bytes, where {MAX_NAME} are the most", name.len());
    Err(Error::InvalidArgument { operation, problem })
}

/// As long as a message can say.
fn milliseconds(timeout: Duration) -> u64 {
    timeout.as_millis().try_into().unwrap_or(u64::MAX)
}

/// The key/value store of a run, and its barriers.
#[derive(Debug)]
pub struct Store {
    rank: u32,
    world_size: u32,
    connection: Mutex<Connection>,
}

impl Store {
    /// Connects to the launcher at `address`.
    pub(crate) fn connect(address: &str, rank: u32) -> Result<UnixStream> {
        let refused = |problem: String| Error::Join { rank, problem };
        let path = address.strip_prefix("unix:").ok_or_else(|| {
            refused(format!("`{address}` is no address of a rendezvous; it should be unix:PATH"))
        })?;
        UnixStream::connect(path).map_err(|error| {
            refused(format!(
                "no launcher answers at {path}: {error} (has this process already joined, or its run ended?)"
            ))
        })
    }

    /// Says hello over a connected stream; [`admission`](Self::admission) has the answer.
    pub(crate) fn apply(
        stream: UnixStream,
        run_id: &str,
        rank: u32,
        world_size: u32,
        manifest: Manifest,
    ) -> Result<Self> {
        let store = Store { rank, world_size, connection: Mutex::new(Connection::new(stream)) };
        let pid = std::process::id();
        let run_id = run_id.to_owned();
        let hello = Request::Hello { version: VERSION, run_id, rank, world_size, pid, manifest };
        let connection = store.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let sent = connection.send(&encode(&hello), &[]);
        sent.map_err(|error| Error::Join { rank, problem: format!("the launcher is gone ({error})") })?;
        drop(connection);
        Ok(store)
    }

    /// Waits until all ranks have said hello and go together.
    pub(crate) fn admission(&self) -> Result<ProgressPage> {
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        match self.answer(&mut connection, "join", JOIN_PATIENCE)? {
            Reply::Welcome => {}
            Reply::Refused { why } => return Err(Error::Join { rank: self.rank, problem: why }),
            other => return Err(self.unexpected(&other)),
        }
        let fds = connection.take_fds(1).map_err(|problem| self.bad_message(problem))?;
        ProgressPage::open(fds[0].as_fd(), self.world_size)
    }

    /// Publishes `value`, and up to 4 descriptors with it, to be read by `readers` ranks, once each. A key is
    /// set once in a run, or again after all its readers have read it.
    ///
    /// # Errors
    /// If the value is larger than 12 KiB, the key is set already, or the launcher is gone.
    pub fn set(&self, key: &str, value: &[u8], fds: &[BorrowedFd<'_>], readers: u32) -> Result<()> {
        check_name("set", key)?;
        if value.len() > MAX_VALUE || fds.len() > MAX_FDS {
            let (bytes, count) = (value.len(), fds.len());
            let problem = format!(
                "{bytes} bytes and {count} descriptors, where {MAX_VALUE} and {MAX_FDS} are the most"
            );
            return Err(Error::InvalidArgument { operation: "set", problem });
        }
        let (key, value, count) = (key.to_owned(), value.to_vec(), fds.len() as u32);
        let request = Request::Set { key, value, fds: count, readers };
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        match self.call(&mut connection, &request, fds, "set", Duration::ZERO)? {
            Reply::Done => Ok(()),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Waits until rank `from` has set `key`.
    ///
    /// # Errors
    /// If that takes longer than `timeout`, or `from` has ended without setting it, or any rank has failed.
    pub fn get(&self, key: &str, from: u32, timeout: Duration) -> Result<(Vec<u8>, Vec<OwnedFd>)> {
        check_name("get", key)?;
        let request = Request::Get { key: key.to_owned(), from, timeout_ms: milliseconds(timeout) };
        let operation = format!("get `{key}`");
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        match self.call(&mut connection, &request, &[], &operation, timeout)? {
            Reply::Value { value, fds } => {
                let fds = connection.take_fds(fds).map_err(|problem| self.bad_message(problem))?;
                Ok((value, fds))
            }
            other => Err(self.unexpected(&other)),
        }
    }

    /// Waits until all ranks are in the barrier called `name`.
    ///
    /// # Errors
    /// If that takes longer than `timeout` (names the missing ranks), or a rank has ended.
    pub fn barrier(&self, name: &str, timeout: Duration) -> Result<()> {
        check_name("barrier", name)?;
        let request = Request::Barrier { name: name.to_owned(), timeout_ms: milliseconds(timeout) };
        let operation = format!("barrier `{name}`");
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        match self.call(&mut connection, &request, &[], &operation, timeout)? {
            Reply::Done => Ok(()),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Says goodbye. Errors are of no interest any more.
    pub(crate) fn leave(&self) {
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = self.call(&mut connection, &Request::Leave, &[], "leave", Duration::ZERO);
    }

    /// Sends a request and waits for its reply.
    fn call(
        &self,
        connection: &mut Connection,
        request: &Request,
        fds: &[BorrowedFd<'_>],
        operation: &str,
        timeout: Duration,
    ) -> Result<Reply> {
        connection.send(&encode(request), fds).map_err(|error| self.gone(&error.to_string()))?;
        self.answer(connection, operation, timeout)
    }

    fn gone(&self, reason: &str) -> Error {
        Error::Join { rank: self.rank, problem: format!("the launcher is gone ({reason})") }
    }

    /// Waits for the reply to the last request.
    fn answer(&self, connection: &mut Connection, operation: &str, timeout: Duration) -> Result<Reply> {
        let started = Instant::now();
        let gone = |reason: String| self.gone(&reason);
        let reply = loop {
            if let Some(reply) =
                connection.next_message::<Reply>().map_err(|problem| self.bad_message(problem))?
            {
                break reply;
            }
            let left = timeout.saturating_add(SERVER_MARGIN).saturating_sub(started.elapsed());
            if left.is_zero() {
                // A late answer would be taken for that to the next request.
                let _ = connection.stream().shutdown(Shutdown::Both);
                return Err(Error::Join {
                    rank: self.rank,
                    problem: format!("the launcher did not answer {operation} for {:?}", started.elapsed()),
                });
            }
            connection.stream().set_read_timeout(Some(left)).map_err(|error| gone(error.to_string()))?;
            if let Received::End = connection.receive().map_err(|error| gone(error.to_string()))? {
                return Err(gone("its end of the connection is closed".into()));
            }
        };
        match reply {
            Reply::TimedOut { missing } => Err(Error::Timeout {
                rank: self.rank,
                waited_for: missing,
                operation: operation.to_owned(),
                after: started.elapsed(),
            }),
            Reply::PeerGone { peer, how } if peer < self.world_size => {
                let (rank, operation) = (self.rank, operation.to_owned());
                Err(Error::PeerLost { rank, peer, operation, how, silent: false })
            }
            reply => Ok(reply),
        }
    }

    fn bad_message(&self, problem: String) -> Error {
        Error::Protocol { peer: "the launcher".into(), problem }
    }

    fn unexpected(&self, reply: &Reply) -> Error {
        match reply {
            Reply::Refused { why } => {
                Error::Protocol { peer: format!("rank {}", self.rank), problem: why.clone() }
            }
            other => self.bad_message(format!("unexpected {other:?}")),
        }
    }
}
