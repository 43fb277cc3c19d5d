//! What follows the handshake, as a pure byte machine: messages to frames, frames to encrypted records, and back.
//!
//! A frame is a length (32 bits, little-endian) and a JSON message. With a secret the stream of frames is cut into
//! records: a length (16 bits, big-endian) and a Noise message of at most 65,535 bytes. A frame may span records, and a
//! record always belongs to one frame.

use serde::Serialize;
use serde::de::DeserializeOwned;
use snow::TransportState;

use super::noise::{MAX_MESSAGE, TAG};

/// Maximum size of a message in bytes.
pub const MAX_FRAME: usize = 1 << 20;

/// Both directions of one connection.
pub struct Channel {
    keys: Option<Box<TransportState>>,
    /// The record that is not complete yet.
    record: Vec<u8>,
    /// Received frames; those before `start` were taken.
    frames: Vec<u8>,
    start: usize,
}

impl Channel {
    pub(super) fn plain() -> Self {
        Channel { keys: None, record: Vec::new(), frames: Vec::new(), start: 0 }
    }

    pub(super) fn encrypted(keys: Box<TransportState>) -> Self {
        Channel { keys: Some(keys), ..Self::plain() }
    }

    /// Appends the bytes that carry `message` to `output`.
    ///
    /// # Errors
    /// If the message is too large or cannot be encrypted. Nothing was appended then.
    pub fn seal<T: Serialize>(&mut self, message: &T, output: &mut Vec<u8>) -> Result<(), String> {
        let mut frame = vec![0; 4];
        serde_json::to_writer(&mut frame, message).map_err(|error| format!("not a message: {error}"))?;
        let length = frame.len() - 4;
        if length > MAX_FRAME {
            return Err(format!("a message of {length} bytes; the maximum is {MAX_FRAME}"));
        }
        frame[..4].copy_from_slice(&(length as u32).to_le_bytes());
        let Some(keys) = &mut self.keys else {
            output.extend(frame);
            return Ok(());
        };
        for part in frame.chunks(MAX_MESSAGE - TAG) {
            output.extend(((part.len() + TAG) as u16).to_be_bytes());
            let start = output.len();
            output.resize(start + part.len() + TAG, 0);
            keys.write_message(part, &mut output[start..])
                .map_err(|error| format!("not encrypted: {error}"))?;
        }
        Ok(())
    }

    /// Takes received bytes.
    ///
    /// # Errors
    /// If they are not what the authenticated peer sent: the connection cannot be used any more.
    pub fn open(&mut self, input: &[u8]) -> Result<(), String> {
        let Some(keys) = &mut self.keys else {
            self.frames.extend_from_slice(input);
            return Ok(());
        };
        self.record.extend_from_slice(input);
        let mut rest = &self.record[..];
        while let Some((length, after)) = rest.split_first_chunk::<2>() {
            let length = u16::from_be_bytes(*length) as usize;
            let Some(record) = after.get(..length) else { break };
            let start = self.frames.len();
            self.frames.resize(start + length.saturating_sub(TAG), 0);
            keys.read_message(record, &mut self.frames[start..])
                .map_err(|_| "received bytes that were changed on the way")?;
            rest = &after[length..];
        }
        let used = self.record.len() - rest.len();
        self.record.drain(..used);
        Ok(())
    }

    /// The next complete message, `None` if there is none.
    ///
    /// # Errors
    /// A text that says what is wrong with the bytes; the connection cannot be used any more.
    pub fn next_message<T: DeserializeOwned>(&mut self) -> Result<Option<T>, String> {
        let Some((length, rest)) = self.frames[self.start..].split_first_chunk::<4>() else {
            self.forget_taken();
            return Ok(None);
        };
        let length = u32::from_le_bytes(*length) as usize;
        if length > MAX_FRAME {
            return Err(format!("a frame of {length} bytes; the maximum is {MAX_FRAME}"));
        }
        let Some(body) = rest.get(..length) else {
            self.forget_taken();
            return Ok(None);
        };
        let message = serde_json::from_slice(body).map_err(|error| format!("not a message: {error}"))?;
        self.start += 4 + length;
        Ok(Some(message))
    }

    /// Number of received bytes that were not taken as messages.
    pub(super) fn buffered(&self) -> usize {
        self.frames.len() - self.start
    }

    fn forget_taken(&mut self) {
        self.frames.drain(..std::mem::take(&mut self.start));
        // A large message is rare: its memory is not kept.
        if self.frames.is_empty() {
            self.frames.shrink_to(MAX_MESSAGE);
        }
    }
}
