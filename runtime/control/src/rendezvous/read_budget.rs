//! Fairness between peers: limits how much is read from one peer before the server serves the next one.
//!
//! Poll reports bytes in the socket, not bytes that the server has already read. A complete message left in the decoder
//! would be handled only after the peer's next message, but the peer sends none before it gets its reply: a deadlock.
//! So after every read all complete messages are handled, and only the number of reads is limited.

use super::socket::Received;

/// Maximum number of reads from one peer before the server serves the next one.
const MAX_READS_PER_CALL: usize = 16;

/// A connection and the handler of its messages.
pub(super) trait MessageHandler {
    /// Reads once.
    fn receive(&mut self) -> Result<Received, String>;

    /// Handles all complete messages.
    fn handle_messages(&mut self) -> Result<(), String>;
}

/// Handles messages of a peer, up to the limit. `false`: the peer has disconnected.
pub(super) fn serve_within_budget(handler: &mut impl MessageHandler) -> Result<bool, String> {
    for _ in 0..MAX_READS_PER_CALL {
        match handler.receive()? {
            Received::Bytes => handler.handle_messages()?,
            Received::Nothing => return Ok(true),
            Received::End => return Ok(false),
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;
    use crate::rendezvous::message::{Decoder, Request, encode};

    /// A peer that sends its next request as soon as the last one was answered, and a socket that returns its bytes in
    /// parts of any length. Like a real socket, it wakes the server only for unread bytes.
    struct Model {
        requests: VecDeque<Request>,
        /// Lengths of the reads, repeated cyclically.
        reads: Vec<usize>,
        read: usize,
        socket: VecDeque<u8>,
        decoder: Decoder,
        answered: Vec<Request>,
    }

    impl Model {
        fn new(requests: &[Request], reads: Vec<usize>) -> Self {
            let mut model = Model {
                requests: requests.iter().cloned().collect(),
                reads,
                read: 0,
                socket: VecDeque::new(),
                decoder: Decoder::default(),
                answered: Vec::new(),
            };
            model.send();
            model
        }

        fn send(&mut self) {
            self.socket.extend(self.requests.pop_front().iter().flat_map(encode));
        }
    }

    impl MessageHandler for Model {
        fn receive(&mut self) -> Result<Received, String> {
            if self.socket.is_empty() {
                let is_over = self.requests.is_empty() && self.decoder.is_empty();
                return Ok(if is_over { Received::End } else { Received::Nothing });
            }
            let most = self.reads[self.read % self.reads.len()];
            self.read += 1;
            let count = most.min(self.socket.len());
            self.decoder.push(&self.socket.drain(..count).collect::<Vec<u8>>());
            Ok(Received::Bytes)
        }

        fn handle_messages(&mut self) -> Result<(), String> {
            while let Some(request) = self.decoder.next_message()? {
                self.answered.push(request);
                self.send();
            }
            Ok(())
        }
    }

    proptest! {
        #[test]
        fn every_complete_request_is_answered(
            keys in prop::collection::vec("[a-z]{0,40}", 1..60),
            reads in prop::collection::vec(1usize..200, 1..8),
        ) {
            let requests: Vec<Request> =
                keys.into_iter().map(|key| Request::Get { key, from: 0, timeout_ms: 1 }).collect();
            let mut model = Model::new(&requests, reads);
            while !model.socket.is_empty() {
                serve_within_budget(&mut model).unwrap();
            }
            prop_assert_eq!(model.answered, requests);
        }
    }
}
