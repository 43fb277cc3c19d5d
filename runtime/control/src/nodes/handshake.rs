//! Everything that two agents say before the first message, as a pure byte machine for both roles.
//!
//! ```text
//! side that dials                                     side that listens
//!   its preamble                                 →
//!                                                ←      its preamble
//!   packet A: first Noise message, if any        →
//!                                                ←      packet A: second Noise message, if any
//!                                                    or packet R: why authentication failed
//! ```
//!
//! The listener says nothing to a peer that does not begin like mgpurun. Both preambles are the prologue of the Noise
//! handshake: if somebody changed a byte of them on the way, for instance to make both sides believe that the other one
//! wants no authentication, it fails. The listener's nonce makes sure that the first Noise message was made for this
//! connection, so after one message from each side both are authenticated.
//!
//! A peer can make this machine keep one preamble or one packet, less than 4 KiB, and no allocation depends on a
//! length that it sends.

use std::fmt;

use super::auth::Credentials;
use super::channel::Channel;
use super::noise::{self, NoiseHandshake};
use super::preamble::{Preamble, RunTag, preamble_length};

/// Maximum size of a packet's body in bytes.
const MAX_PACKET: usize = 2048;
/// A packet of the authentication.
const AUTHENTICATE: u8 = b'A';
/// A packet that says why authentication failed.
const REFUSE: u8 = b'R';

/// Why a connection did not become a link: a predicate, whose subject is the other side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// The other side is not mgpurun.
    Stranger(String),
    /// It is mgpurun, of another run.
    OtherRun(String),
    /// It has another version.
    Version(String),
    /// It has other credentials.
    Authentication(String),
    /// It broke the protocol.
    Protocol(String),
    /// The connection failed.
    Connection(String),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Stranger(why)
            | Fault::OtherRun(why)
            | Fault::Version(why)
            | Fault::Authentication(why)
            | Fault::Protocol(why)
            | Fault::Connection(why) => f.write_str(why),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Dialer,
    Listener,
}

enum Stage {
    /// Waits for the preamble of the other side.
    Preamble,
    /// Waits for its packet.
    Packet { noise: Option<NoiseHandshake> },
    /// Has succeeded or failed.
    Over,
}

/// One side of a handshake.
pub struct Handshake {
    role: Role,
    credentials: Credentials,
    preamble: Preamble,
    stage: Stage,
    /// Received bytes that are not used yet.
    input: Vec<u8>,
    /// Bytes to send.
    output: Vec<u8>,
}

impl Handshake {
    /// The side that dials; its preamble is ready to be sent.
    ///
    /// # Errors
    /// If the system has no random bytes.
    pub fn dialer(credentials: &Credentials, run: RunTag) -> Result<Self, String> {
        let mut handshake = Self::new(Role::Dialer, credentials, run)?;
        handshake.output.extend(handshake.preamble.line().bytes());
        Ok(handshake)
    }

    /// The side that listens.
    ///
    /// # Errors
    /// If the system has no random bytes.
    pub fn listener(credentials: &Credentials, run: RunTag) -> Result<Self, String> {
        Self::new(Role::Listener, credentials, run)
    }

    fn new(role: Role, credentials: &Credentials, run: RunTag) -> Result<Self, String> {
        Ok(Handshake {
            role,
            credentials: credentials.clone(),
            preamble: Preamble { method: credentials.method(), run, nonce: noise::random()? },
            stage: Stage::Preamble,
            input: Vec::new(),
            output: Vec::new(),
        })
    }

    /// Takes received bytes. Returns the channel as soon as both sides are authenticated.
    ///
    /// # Errors
    /// Why the connection cannot be used. The output then still has to be sent: it tells the other side.
    pub fn advance(&mut self, input: &[u8]) -> Result<Option<Channel>, Fault> {
        self.input.extend_from_slice(input);
        let result = self.take_steps();
        if !matches!(result, Ok(None)) {
            self.stage = Stage::Over;
            self.input = Vec::new();
        }
        result
    }

    /// Bytes to send.
    pub fn take_output(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.output)
    }

    /// True once the other side has sent a preamble that matches.
    pub fn is_answered(&self) -> bool {
        !matches!(self.stage, Stage::Preamble)
    }

    fn take_steps(&mut self) -> Result<Option<Channel>, Fault> {
        if matches!(self.stage, Stage::Preamble) {
            let Some(length) = preamble_length(&self.input)? else { return Ok(None) };
            let line: Vec<u8> = self.input.drain(..length).collect();
            self.exchange_preambles(&String::from_utf8_lossy(&line))?;
        }
        let Some((kind, body)) = self.take_packet()? else { return Ok(None) };
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Packet { noise } => self.authenticate(noise, kind, &body).map(Some),
            _ => Ok(None),
        }
    }

    fn exchange_preambles(&mut self, theirs: &str) -> Result<(), Fault> {
        let own = self.preamble.line();
        if self.role == Role::Listener {
            // Also if it does not match: the other side then says the same.
            self.output.extend(own.bytes());
        }
        self.preamble.check(theirs)?;
        let noise = match (&self.credentials, self.role) {
            (Credentials::None, _) => None,
            (Credentials::Secret(secret), Role::Dialer) => {
                Some(NoiseHandshake::initiator(secret.key(), format!("{own}{theirs}").as_bytes()))
            }
            (Credentials::Secret(secret), Role::Listener) => {
                Some(NoiseHandshake::responder(secret.key(), format!("{theirs}{own}").as_bytes()))
            }
        };
        self.stage = Stage::Packet { noise };
        if self.role == Role::Dialer { self.send_authentication() } else { Ok(()) }
    }

    /// The next packet, if it is complete: its kind and body.
    fn take_packet(&mut self) -> Result<Option<(u8, Vec<u8>)>, Fault> {
        let Some(([kind, high, low], rest)) = self.input.split_first_chunk::<3>() else { return Ok(None) };
        let (kind, length) = (*kind, u16::from_be_bytes([*high, *low]) as usize);
        if !matches!(kind, AUTHENTICATE | REFUSE) || length > MAX_PACKET {
            return Err(Fault::Protocol("sent bytes that belong to no authentication".into()));
        }
        let Some(body) = rest.get(..length) else { return Ok(None) };
        let body = body.to_vec();
        self.input.drain(..3 + length);
        Ok(Some((kind, body)))
    }

    fn send_packet(&mut self, kind: u8, body: &[u8]) {
        self.output.push(kind);
        self.output.extend((body.len() as u16).to_be_bytes());
        self.output.extend(body);
    }

    /// Sends this side's packet of the authentication.
    fn send_authentication(&mut self) -> Result<(), Fault> {
        let body = match &mut self.stage {
            Stage::Packet { noise: Some(noise) } => noise.write().map_err(Fault::Connection)?,
            _ => Vec::new(),
        };
        self.send_packet(AUTHENTICATE, &body);
        Ok(())
    }

    /// Checks the packet of the other side, and answers it if this side listens.
    fn authenticate(
        &mut self,
        noise: Option<NoiseHandshake>,
        kind: u8,
        body: &[u8],
    ) -> Result<Channel, Fault> {
        if kind == REFUSE {
            let why: String =
                String::from_utf8_lossy(body).chars().filter(|char| !char.is_control()).collect();
            return Err(Fault::Authentication(format!(
                "refused authentication by `{}`: {why}",
                self.preamble.method
            )));
        }
        let Some(mut noise) = noise else {
            if !body.is_empty() {
                return Err(Fault::Protocol("sent credentials, and no authentication was agreed on".into()));
            }
            return self.finish(Channel::plain());
        };
        if !noise.read(body) {
            let why =
                "the secrets differ; check that MGPU_SECRET_FILE or MGPU_SECRET is the same on all hosts";
            if self.role == Role::Listener {
                self.send_packet(REFUSE, why.as_bytes());
            }
            return Err(Fault::Authentication(format!(
                "failed authentication by `{}`: {why}",
                self.preamble.method
            )));
        }
        if self.role == Role::Listener {
            let body = noise.write().map_err(Fault::Connection)?;
            self.send_packet(AUTHENTICATE, &body);
        }
        let keys = noise.finish().map_err(Fault::Protocol)?;
        self.finish(Channel::encrypted(keys))
    }

    /// Hands over to the channel, with what the other side has sent on it already.
    fn finish(&mut self, mut channel: Channel) -> Result<Channel, Fault> {
        if self.role == Role::Listener && matches!(self.credentials, Credentials::None) {
            self.send_packet(AUTHENTICATE, &[]);
        }
        channel.open(&self.input).map_err(Fault::Protocol)?;
        Ok(channel)
    }
}

#[cfg(test)]
mod tests;
