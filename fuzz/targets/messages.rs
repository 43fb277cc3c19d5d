//! Decodes arbitrary bytes, in chunks of any size, as a stream of messages. The result is messages or an error; memory
//! stays within a frame and a chunk. A decoded message survives encoding and decoding unchanged.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mgpu_control::rendezvous::message::{Decoder, Reply, Request, encode};

/// Decodes `bytes` in chunks of `chunk` bytes. Returns the messages before the first error, and whether there was one.
fn decode<T: serde::de::DeserializeOwned>(bytes: &[u8], chunk: usize) -> (Vec<T>, bool) {
    let (mut decoder, mut messages) = (Decoder::default(), Vec::new());
    for piece in bytes.chunks(chunk) {
        decoder.push(piece);
        loop {
            match decoder.next_message::<T>() {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => break,
                Err(_) => return (messages, true),
            }
        }
    }
    (messages, false)
}

fuzz_target!(|input: (u8, &[u8])| {
    let (chunk, bytes) = (1 + usize::from(input.0), input.1);
    let requests = decode::<Request>(bytes, chunk);
    assert_eq!(requests, decode::<Request>(bytes, usize::MAX), "the messages depend on the chunks");
    let replies = decode::<Reply>(bytes, chunk);
    for request in requests.0 {
        assert_eq!(decode::<Request>(&encode(&request), chunk).0, [request]);
    }
    for reply in replies.0 {
        assert_eq!(decode::<Reply>(&encode(&reply), chunk).0, [reply]);
    }
});
