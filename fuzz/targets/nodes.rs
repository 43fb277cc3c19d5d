//! Tests both ends of a connection between hosts against arbitrary peers: bytes of an honest peer, cut and mixed with
//! arbitrary ones, preambles and packets with arbitrary contents, and after the handshake anything as frames. With a
//! secret nobody but an honest peer is authenticated, and no bytes but its own become messages.
#![no_main]

use std::sync::OnceLock;

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use mgpu_control::nodes::channel::Channel;
use mgpu_control::nodes::handshake::Handshake;
use mgpu_control::nodes::{Credentials, RunTag, Secret};

/// What the side under test receives.
#[derive(Debug, Arbitrary)]
enum Step<'a> {
    /// Bytes that an honest peer sends, up to a number.
    Honest { most: u8 },
    /// The next byte of the honest peer, changed.
    Changed { by: u8 },
    /// A preamble.
    Preamble { version: Option<u16>, method: Option<&'a str>, run: Option<[u8; 4]>, nonce: &'a str },
    /// A packet of the authentication.
    Packet { kind: u8, length: Option<u16>, body: &'a [u8] },
    /// A frame, not encrypted.
    Frame { length: Option<u32>, body: &'a [u8] },
    /// Anything.
    Bytes { bytes: &'a [u8] },
}

#[derive(Debug, Arbitrary)]
struct Input<'a> {
    has_secret: bool,
    dials: bool,
    steps: Vec<Step<'a>>,
}

fn run_tag() -> RunTag {
    static TAG: OnceLock<RunTag> = OnceLock::new();
    *TAG.get_or_init(|| RunTag::of("run"))
}

fn credentials(has_secret: bool) -> Credentials {
    static SECRET: OnceLock<Secret> = OnceLock::new();
    let secret = SECRET.get_or_init(|| Secret::new(b"a secret of the fuzzer", "fuzz").expect("long enough"));
    if has_secret { Credentials::Secret(secret.clone()) } else { Credentials::None }
}

fn side(dials: bool, credentials: &Credentials) -> Handshake {
    let new = if dials { Handshake::dialer } else { Handshake::listener };
    new(credentials, run_tag()).expect("random bytes")
}

/// The bytes of a step that is not the honest peer's.
fn forged(step: &Step<'_>) -> Vec<u8> {
    match step {
        Step::Honest { .. } | Step::Changed { .. } => Vec::new(),
        Step::Preamble { version, method, run, nonce } => {
            let version = version.unwrap_or(1);
            let run = run.map_or(run_tag().to_string(), |run| format!("{run:?}"));
            format!("mgpurun-nodes {version} 0 {} {run} {nonce}\n", method.unwrap_or("secret")).into_bytes()
        }
        Step::Packet { kind, length, body } => {
            let kind = [b'A', b'R', *kind][usize::from(kind % 3)];
            let length = length.unwrap_or(body.len() as u16).to_be_bytes();
            [&[kind][..], &length, body].concat()
        }
        Step::Frame { length, body } => {
            let length = length.unwrap_or(body.len() as u32).to_le_bytes();
            [&length[..], body].concat()
        }
        Step::Bytes { bytes } => bytes.to_vec(),
    }
}

/// The honest peer: its handshake, then a message.
struct Honest {
    handshake: Handshake,
    channel: Option<Channel>,
    /// All bytes of its handshake.
    said: Vec<u8>,
    unsent: Vec<u8>,
}

impl Honest {
    fn receive(&mut self, bytes: &[u8]) {
        if self.channel.is_none() {
            self.channel = self.handshake.advance(bytes).unwrap_or(None);
            let output = self.handshake.take_output();
            self.said.extend(&output);
            self.unsent.extend(output);
            if let Some(channel) = &mut self.channel {
                channel.seal(&"honest", &mut self.unsent).expect("a short message");
            }
        }
    }

    fn send(&mut self, most: usize) -> Vec<u8> {
        self.unsent.drain(..self.unsent.len().min(most)).collect()
    }
}

fn run(input: &Input<'_>) {
    let credentials = credentials(input.has_secret);
    let mut tested = side(input.dials, &credentials);
    let handshake = side(!input.dials, &credentials);
    let mut honest = Honest { handshake, channel: None, said: Vec::new(), unsent: Vec::new() };
    honest.receive(&[]);
    let (mut channel, mut heard) = (None::<Channel>, Vec::new());
    for step in &input.steps {
        let output = tested.take_output();
        assert!(output.len() < 4096);
        honest.receive(&output);
        let bytes = match step {
            Step::Honest { most } => honest.send(usize::from(*most)),
            Step::Changed { by } => honest.send(1).iter().map(|byte| byte ^ by).collect(),
            step => forged(step),
        };
        let Some(open) = &mut channel else {
            heard.extend(&bytes);
            match tested.advance(&bytes) {
                Ok(new) => channel = new,
                Err(fault) => return assert!(fault.to_string().len() < 8192),
            }
            // Single bytes can be guessed; the handshake as a whole cannot.
            let is_forged = input.has_secret && !heard.starts_with(&honest.said);
            assert!(channel.is_none() || !is_forged, "a forged handshake is authenticated");
            continue;
        };
        if open.open(&bytes).is_err() {
            return;
        }
        while let Ok(Some(message)) = open.next_message::<serde_json::Value>() {
            assert!(!input.has_secret || message == "honest", "{message} was forged");
        }
    }
}

fuzz_target!(|input: Input<'_>| run(&input));
