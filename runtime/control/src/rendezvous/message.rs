//! The messages between a rank and the server, and how they travel.
//!
//! A frame is a little-endian `u32` length and that many bytes of JSON. JSON because a rank of another version
//! must still be able to read why it was refused. Frames are bounded: a length past [`MAX_FRAME`] is an error,
//! not an allocation. Descriptors travel beside the first byte of their frame (SCM_RIGHTS); the message says how
//! many there are.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Version of the messages; both sides must have the same.
pub const VERSION: u32 = 2;
/// Largest frame in bytes, without its length.
pub const MAX_FRAME: usize = 64 << 10;
/// Largest value in bytes that can be set under a key.
pub const MAX_VALUE: usize = 12 << 10;
/// Most descriptors in one message.
pub const MAX_FDS: usize = 4;
/// Longest key, name of a barrier and identifier of a run, in bytes.
pub const MAX_NAME: usize = 256;

/// What a rank asks of the server. Each request has exactly one [`Reply`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub enum Request {
    /// First message on a connection.
    Hello {
        /// [`VERSION`] of the rank.
        version: u32,
        /// The run's identifier, which doubles as the token.
        run_id: String,
        /// Who is joining.
        rank: u32,
        /// World size the rank believes in.
        world_size: u32,
        /// Its process.
        pid: u32,
        /// What it works with.
        #[serde(default)]
        manifest: Manifest,
    },
    /// Publishes a value, and descriptors with it, to be read `readers` times.
    Set {
        /// Name, unique in the run.
        key: String,
        /// At most [`MAX_VALUE`] bytes.
        value: Vec<u8>,
        /// Number of descriptors beside the frame.
        fds: u32,
        /// How often it will be read before it is forgotten.
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
    /// Waits until every rank is in the barrier of this name.
    Barrier {
        /// Name, unique in the run.
        name: String,
        /// Longest wait in milliseconds.
        timeout_ms: u64,
    },
    /// Last message of a rank that has finished.
    Leave,
}

/// What a rank works with, as far as ranks have to be compared. `None` is what it does not use.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// UUID of its GPU.
    pub gpu: Option<String>,
    /// Version of the NVIDIA driver.
    pub driver: Option<String>,
    /// Version of NCCL.
    pub nccl: Option<String>,
    /// Another rank may use the same GPU.
    #[serde(default)]
    pub shares_gpu: bool,
}

/// The server's answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// Answer to [`Request::Hello`] once all ranks have said it; the progress page travels with it.
    Welcome,
    /// Answer to [`Request::Set`], [`Request::Barrier`] and [`Request::Leave`].
    Done,
    /// Answer to [`Request::Get`].
    Value {
        /// What was set.
        value: Vec<u8>,
        /// Number of descriptors beside the frame.
        fds: u32,
    },
    /// The deadline passed.
    TimedOut {
        /// Ranks that did not come.
        missing: Vec<u32>,
    },
    /// A rank that is needed is gone.
    PeerGone {
        /// The rank.
        peer: u32,
        /// How it ended, as a predicate.
        how: String,
    },
    /// The request cannot be met. Nothing has changed, and the connection goes on.
    Denied {
        /// Why.
        why: String,
    },
    /// The request makes no sense; the connection ends.
    Refused {
        /// Why.
        why: String,
    },
}

/// The frame of `message`.
///
/// # Panics
/// If the message is larger than [`MAX_FRAME`]: values are bounded before.
pub fn encode<T: Serialize>(message: &T) -> Vec<u8> {
    let mut frame = vec![0; 4];
    serde_json::to_writer(&mut frame, message).expect("messages hold nothing that JSON cannot");
    let len = frame.len() - 4;
    assert!(len <= MAX_FRAME, "a message of {len} bytes");
    frame[..4].copy_from_slice(&(len as u32).to_le_bytes());
    frame
}

/// Names are bounded like everything that the server keeps.
///
/// # Errors
/// If `name` is longer than [`MAX_NAME`].
pub fn check_name(name: &str) -> Result<(), String> {
    match name.len() {
        ..=MAX_NAME => Ok(()),
        len => Err(format!("a name of {len} bytes where {MAX_NAME} is the most")),
    }
}

/// Puts received bytes together into messages.
#[derive(Debug, Default)]
pub struct Decoder {
    bytes: Vec<u8>,
}

impl Decoder {
    /// True when no part of a message is waiting for its rest.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Adds received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next whole message, `None` while there is none.
    ///
    /// # Errors
    /// A text that says what is wrong with the bytes; the stream cannot be used any further.
    pub fn next_message<T: DeserializeOwned>(&mut self) -> Result<Option<T>, String> {
        let Some((header, rest)) = self.bytes.split_first_chunk::<4>() else { return Ok(None) };
        let len = u32::from_le_bytes(*header) as usize;
        if len > MAX_FRAME {
            return Err(format!("a frame of {len} bytes where {MAX_FRAME} is the most"));
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
        fn messages_survive_any_chunking(values in prop::collection::vec(
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
        fn any_bytes_are_survived(bytes in any::<Vec<u8>>()) {
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
    fn the_largest_value_fits_a_frame() {
        let value = vec![255; MAX_VALUE];
        encode(&Request::Set { key: "k".repeat(64), value, fds: 0, readers: 1 });
    }
}
