//! The messages between a rank and the server, and their encoding.
//!
//! A frame is a little-endian `u32` length followed by that many bytes of JSON. JSON, because a rank of another version
//! must still be able to read why it was refused. Frames are bounded: a length above [`MAX_FRAME`] is an error and
//! causes no allocation. Descriptors are sent with the first byte of their frame (SCM_RIGHTS); the message contains
//! their number.

use std::net::IpAddr;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::rank_list;
use crate::nccl::NcclAdvice;
use crate::nodes::Layout;

/// Version of the messages; both sides must have the same.
pub const VERSION: u32 = 5;
/// Maximum size of a frame in bytes, without its length.
pub const MAX_FRAME: usize = 64 << 10;
/// Maximum size of a value in bytes.
pub const MAX_VALUE: usize = 12 << 10;
/// Maximum number of descriptors in one message.
pub const MAX_FDS: usize = 4;
/// Maximum length of a key, of the name of a barrier and of the identifier of a run, in bytes.
pub const MAX_NAME: usize = 256;

/// A request of a rank to the server. Each request gets exactly one [`Reply`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub enum Request {
    /// The first message on a connection.
    Hello {
        /// [`VERSION`] of the rank.
        version: u32,
        /// The run's identifier, which is also the token.
        run_id: String,
        /// The rank that joins.
        rank: u32,
        /// World size that the rank expects.
        world_size: u32,
        /// Its process id.
        pid: u32,
        /// Its GPU and library versions.
        #[serde(default)]
        manifest: Manifest,
    },
    /// Publishes a value, and descriptors with it, to be read `readers` times.
    Set {
        /// Name, unique in the run.
        key: String,
        /// At most [`MAX_VALUE`] bytes.
        value: Vec<u8>,
        /// Number of descriptors sent with the frame.
        fds: u32,
        /// Number of reads after which the value is removed.
        readers: u32,
    },
    /// Waits for a value.
    Get {
        /// Name, unique in the run.
        key: String,
        /// The rank that will set it.
        from: u32,
        /// Longest wait in milliseconds.
        timeout_ms: u64,
    },
    /// Waits until every participant is in the barrier of this name.
    Barrier {
        /// Name, unique in the run.
        name: String,
        /// The participants, this rank among them; `None` for all ranks.
        #[serde(default, with = "rank_list::option")]
        ranks: Option<Vec<u32>>,
        /// Longest wait in milliseconds.
        timeout_ms: u64,
    },
    /// Asks that all ranks stop. The progress page says where, once that is decided.
    Stop,
    /// Last message of a rank that has finished.
    Leave,
}

/// The GPU and library versions of a rank that the server compares between ranks. `None`: the rank does not use it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// UUID of its GPU.
    pub gpu: Option<String>,
    /// Version of the NVIDIA driver.
    pub driver: Option<String>,
    /// Version of NCCL.
    pub nccl: Option<String>,
    /// True if another rank may use the same GPU.
    #[serde(default)]
    pub shares_gpu: bool,
}

/// The server's answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// Answer to [`Request::Hello`] once all ranks have said hello; carries the descriptor of the progress page.
    Welcome {
        /// Which ranks are on which node; `None` if all are on one host.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        layout: Option<Layout>,
        /// Address of this node as the other nodes reach it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        address: Option<IpAddr>,
        /// What the rank has to know about NCCL. Only ranks of the same program say it, which are of one release.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        nccl: Option<NcclAdvice>,
    },
    /// Answer to [`Request::Set`], [`Request::Barrier`], [`Request::Stop`] and [`Request::Leave`].
    Done,
    /// Answer to [`Request::Get`].
    Value {
        /// The value.
        value: Vec<u8>,
        /// Number of descriptors sent with the frame.
        fds: u32,
    },
    /// The deadline passed.
    TimedOut {
        /// Ranks that did not arrive.
        #[serde(with = "rank_list")]
        missing: Vec<u32>,
    },
    /// A rank that the request needs has ended.
    PeerGone {
        /// The rank.
        peer: u32,
        /// How it ended, as a predicate.
        how: String,
    },
    /// The request cannot be met. Nothing has changed, and the connection stays open.
    Denied {
        /// Why.
        why: String,
    },
    /// The connection or the request is rejected; the server closes the connection.
    Refused {
        /// Why.
        why: String,
    },
}

impl Reply {
    /// The welcome of a world on one host.
    pub const WELCOME: Reply = Reply::Welcome { layout: None, address: None, nccl: None };
}

/// The beginning of a reason, which may quote what a peer has sent, so that a message with it fits a frame.
pub fn shortened(why: &str) -> String {
    why.chars().take(1000).collect()
}

/// The frame of `message`.
///
/// # Panics
/// If the message is larger than [`MAX_FRAME`]; callers bound values before.
pub fn encode<T: Serialize>(message: &T) -> Vec<u8> {
    let mut frame = vec![0; 4];
    serde_json::to_writer(&mut frame, message).expect("messages hold nothing that JSON cannot");
    let len = frame.len() - 4;
    assert!(len <= MAX_FRAME, "a message of {len} bytes");
    frame[..4].copy_from_slice(&(len as u32).to_le_bytes());
    frame
}

/// Checks the length of a name: the server keeps names, so they are bounded.
///
/// # Errors
/// If `name` is longer than [`MAX_NAME`].
pub fn check_name(name: &str) -> Result<(), String> {
    match name.len() {
        ..=MAX_NAME => Ok(()),
        len => Err(format!("a name of {len} bytes; the maximum is {MAX_NAME}")),
    }
}

/// Assembles received bytes into messages.
#[derive(Debug, Default)]
pub struct Decoder {
    bytes: Vec<u8>,
}

impl Decoder {
    /// True if no incomplete message is buffered.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Adds received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next complete message, `None` if there is none.
    ///
    /// # Errors
    /// A text that says what is wrong with the bytes; the stream cannot be used any more.
    pub fn next_message<T: DeserializeOwned>(&mut self) -> Result<Option<T>, String> {
        let Some((header, rest)) = self.bytes.split_first_chunk::<4>() else { return Ok(None) };
        let len = u32::from_le_bytes(*header) as usize;
        if len > MAX_FRAME {
            return Err(format!("a frame of {len} bytes; the maximum is {MAX_FRAME}"));
        }
        let Some(body) = rest.get(..len) else { return Ok(None) };
        let message = serde_json::from_slice(body).map_err(|error| format!("not a message: {error}"))?;
        self.bytes.drain(..4 + len);
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn messages_do_not_depend_on_chunking(values in prop::collection::vec(
            (any::<Vec<u8>>(), any::<String>()), 0..5), chunk in 1usize..40) {
            let sent: Vec<Request> = values.into_iter()
                .map(|(value, key)| Request::Set { key, value, fds: 1, readers: 2 }).collect();
            let stream: Vec<u8> = sent.iter().flat_map(encode).collect();
            let (mut decoder, mut received) = (Decoder::default(), Vec::<Request>::new());
            for part in stream.chunks(chunk) {
                decoder.push(part);
                while let Some(message) = decoder.next_message().unwrap() {
                    received.push(message);
                }
            }
            prop_assert_eq!(sent, received);
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in any::<Vec<u8>>()) {
            let mut decoder = Decoder::default();
            decoder.push(&bytes);
            while let Ok(Some(_)) = decoder.next_message::<Request>() {}
        }
    }

    #[test]
    fn an_oversized_frame_is_an_error_before_it_is_read() {
        let mut decoder = Decoder::default();
        decoder.push(&u32::MAX.to_le_bytes());
        assert!(decoder.next_message::<Request>().unwrap_err().contains("4294967295 bytes"));
    }

    #[test]
    fn the_largest_barrier_fits_a_frame() {
        let ranks = Some((0..crate::protocol::MAX_WORLD_RANKS).collect());
        encode(&Request::Barrier { name: "n".repeat(MAX_NAME), ranks, timeout_ms: u64::MAX });
    }

    #[test]
    fn the_largest_layout_fits_a_frame() {
        use crate::nccl::advice::{MAX_NOTICE, MAX_NOTICES};
        use crate::nodes::layout::MAX_NODES;
        let world_size = crate::protocol::MAX_WORLD_RANKS;
        let first_ranks = (0..MAX_NODES as u32).map(|node| 8 * node).collect();
        let layout = Layout::new(first_ranks, world_size, MAX_NODES as u32 - 1).unwrap();
        let nccl = NcclAdvice { variables: Vec::new(), notices: vec!["x".repeat(MAX_NOTICE); MAX_NOTICES] };
        let address = Some(std::net::Ipv6Addr::LOCALHOST.into());
        encode(&Reply::Welcome { layout: Some(layout), address, nccl: Some(nccl) });
    }

    #[test]
    fn the_largest_value_fits_a_frame() {
        let value = vec![255; MAX_VALUE];
        encode(&Request::Set { key: "k".repeat(64), value, fds: 0, readers: 1 });
    }
}
