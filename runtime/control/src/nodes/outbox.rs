//! Bytes that wait to be written to a non-blocking socket.

use std::io::{self, ErrorKind, Write};

/// Memory that an empty outbox keeps, in bytes.
const KEPT: usize = 64 << 10;

#[derive(Debug, Default)]
pub(super) struct Outbox {
    bytes: Vec<u8>,
    /// Bytes before this were written.
    start: usize,
}

impl Outbox {
    /// Where to append bytes.
    pub(super) fn end(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len() - self.start
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes as much as possible without blocking.
    pub(super) fn write_to(&mut self, mut stream: impl Write) -> io::Result<()> {
        while !self.is_empty() {
            match stream.write(&self.bytes[self.start..]) {
                Ok(count) => self.start += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    // At most half of the memory is for bytes that were written.
                    if self.start > self.len() {
                        self.bytes.drain(..std::mem::take(&mut self.start));
                    }
                    return Ok(());
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.bytes.clear();
        self.bytes.shrink_to(KEPT);
        self.start = 0;
        Ok(())
    }
}
