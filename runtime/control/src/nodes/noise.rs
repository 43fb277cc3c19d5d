//! The cryptography, all of it from the crate `snow`: a Noise handshake with a pre-shared key, and its hash.
//!
//! `NNpsk0`: neither side has a key pair of its own, and the first message already proves the pre-shared key. Keys of a
//! connection come from a fresh Diffie-Hellman exchange, so a secret that leaks later does not reveal what was sent.
//! See <https://noiseprotocol.org/noise.html>.

use snow::params::HashChoice;
use snow::resolvers::{CryptoResolver, DefaultResolver};
use snow::{Builder, HandshakeState, TransportState};

const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";

/// Maximum size of an encrypted message in bytes, by the specification.
pub(super) const MAX_MESSAGE: usize = 65535;
/// What encryption adds to a message, in bytes.
pub(super) const TAG: usize = 16;

/// BLAKE2s of `parts`, each with its length, for one purpose.
pub(super) fn hash(purpose: &str, parts: &[&[u8]]) -> [u8; 32] {
    let mut hasher = DefaultResolver.resolve_hash(&HashChoice::Blake2s).expect("snow has BLAKE2s");
    hasher.input(b"mgpurun ");
    for part in std::iter::once(&purpose.as_bytes()).chain(parts) {
        hasher.input(&(part.len() as u64).to_le_bytes());
        hasher.input(part);
    }
    let mut digest = [0; 32];
    hasher.result(&mut digest);
    digest
}

/// Random bytes of the operating system.
pub(super) fn random<const N: usize>() -> Result<[u8; N], String> {
    let mut bytes = [0; N];
    let mut source = DefaultResolver.resolve_rng().expect("snow has a source of randomness");
    source.try_fill_bytes(&mut bytes).map_err(|_| "the system has no random bytes".to_owned())?;
    Ok(bytes)
}

/// A handshake of two messages, of the side that dials first.
pub(super) struct NoiseHandshake(Box<HandshakeState>);

impl NoiseHandshake {
    /// The side that dials.
    pub(super) fn initiator(key: &[u8; 32], prologue: &[u8]) -> Self {
        Self::new(key, prologue, Builder::build_initiator)
    }

    /// The side that listens.
    pub(super) fn responder(key: &[u8; 32], prologue: &[u8]) -> Self {
        Self::new(key, prologue, Builder::build_responder)
    }

    fn new<'a>(
        key: &'a [u8; 32],
        prologue: &'a [u8],
        build: impl FnOnce(Builder<'a>) -> Result<HandshakeState, snow::Error>,
    ) -> Self {
        let pattern = PATTERN.parse().expect("snow knows the pattern");
        let builder = Builder::new(pattern).psk(0, key).and_then(|builder| builder.prologue(prologue));
        NoiseHandshake(Box::new(builder.and_then(build).expect("snow has the pattern's primitives")))
    }

    /// The next message of this side.
    pub(super) fn write(&mut self) -> Result<Vec<u8>, String> {
        let mut message = vec![0; 128];
        let len = self.0.write_message(&[], &mut message).map_err(|error| error.to_string())?;
        message.truncate(len);
        Ok(message)
    }

    /// Checks the message of the other side. `false`: it does not know the key, or saw other preambles.
    pub(super) fn read(&mut self, message: &[u8]) -> bool {
        self.0.read_message(message, &mut [0; 128]).is_ok_and(|len| len == 0)
    }

    /// The keys for what follows, after both messages.
    pub(super) fn finish(self) -> Result<Box<TransportState>, String> {
        self.0.into_transport_mode().map(Box::new).map_err(|error| error.to_string())
    }
}
