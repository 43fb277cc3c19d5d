//! Everything that two agents say before the first message, as a pure byte machine for both roles.
//!
//! ```text
//! side that dials                                     side that listens
//!   its preamble                                 →
//!                                                ←      its preamble
//!   packet A: [credential,] first Noise message  →
//!                                                ←      packet A: second Noise message
//!                                                    or packet R: why authentication failed
//! ```
//!
//! With munge the first packet begins with a credential, whose payload is the key of the Noise handshake. The machine
//! asks for the credential to be made or read (`take_request`) and continues with the answer.
//!
//! The listener says nothing to a peer that does not begin like mgpurun. Both preambles are the prologue of the Noise
//! handshake: if somebody changed a byte of them on the way, for instance to make both sides believe that the other one
//! wants no authentication, it fails. The listener's nonce makes sure that the first Noise message was made for this
//! connection, so after one message from each side both are authenticated. Without authentication the packets are
//! empty.
//!
//! A peer can make this machine keep one preamble or one packet, less than 4 KiB, and no allocation depends on a
//! length that it sends.

use std::fmt;

use zeroize::Zeroizing;

use super::auth::Credentials;
use super::channel::Channel;
use super::munge::{Munge, MungeAnswer, MungeRequest};
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
    NotMgpurun(String),
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
            Fault::NotMgpurun(why)
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
    /// Waits for munge: the dialer for a credential with this key.
    Credential { key: Zeroizing<[u8; 32]> },
    /// Waits for munge: the listener for the payload of the credential that came with this Noise message.
    Payload { message: Vec<u8> },
    /// Waits for the packet of the other side. No Noise handshake yet: the packet brings its key, or there is none.
    Packet { noise: Option<NoiseHandshake> },
    /// Has succeeded or failed.
    Over,
}

/// One side of a handshake.
pub struct Handshake {
    role: Role,
    credentials: Credentials,
    preamble: Preamble,
    /// Both preambles, the dialer's first.
    prologue: String,
    request: Option<MungeRequest>,
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
            prologue: String::new(),
            request: None,
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
        let result = self.read_input();
        self.note_end(result)
    }

    /// What munge has to do before the handshake can continue.
    pub(super) fn take_request(&mut self) -> Option<(Munge, MungeRequest)> {
        match &self.credentials {
            Credentials::Munge(munge) => self.request.take().map(|request| (munge.clone(), request)),
            _ => None,
        }
    }

    /// Continues with the answer to the request, as [`advance`](Self::advance).
    pub(super) fn answer(&mut self, answer: Result<MungeAnswer, String>) -> Result<Option<Channel>, Fault> {
        let result = self.read_answer(answer);
        self.note_end(result)
    }

    fn note_end(&mut self, result: Result<Option<Channel>, Fault>) -> Result<Option<Channel>, Fault> {
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

    fn read_input(&mut self) -> Result<Option<Channel>, Fault> {
        if matches!(self.stage, Stage::Preamble) {
            let Some(length) = preamble_length(&self.input)? else { return Ok(None) };
            let line: Vec<u8> = self.input.drain(..length).collect();
            self.exchange_preambles(&String::from_utf8_lossy(&line))?;
        }
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Packet { noise } => match self.take_packet()? {
                Some((kind, body)) => self.read_packet(noise, kind, &body),
                None => {
                    self.stage = Stage::Packet { noise };
                    Ok(None)
                }
            },
            _ if !self.input.is_empty() => Err(Fault::Protocol("sent more than it was asked for".into())),
            stage => {
                self.stage = stage;
                Ok(None)
            }
        }
    }

    fn exchange_preambles(&mut self, theirs: &str) -> Result<(), Fault> {
        let own = self.preamble.line();
        if self.role == Role::Listener {
            // Also if it does not match: the other side then says the same.
            self.output.extend(own.bytes());
        }
        self.preamble.check(theirs)?;
        self.prologue = match self.role {
            Role::Dialer => own + theirs,
            Role::Listener => theirs.to_owned() + &own,
        };
        self.stage = match (self.role, &self.credentials) {
            (Role::Dialer, Credentials::None) => {
                self.send_packet(AUTHENTICATE, &[]);
                Stage::Packet { noise: None }
            }
            (Role::Dialer, Credentials::Secret(secret)) => {
                let secret = secret.clone();
                self.start_noise(secret.key(), &[])?
            }
            (Role::Dialer, Credentials::Munge(_)) => {
                let key = Zeroizing::new(noise::random().map_err(Fault::Connection)?);
                let payload = [&self.connection_hash()[..], &key[..]].concat();
                self.request = Some(MungeRequest::Encode(payload.into()));
                Stage::Credential { key }
            }
            (Role::Listener, _) => Stage::Packet { noise: None },
        };
        Ok(())
    }

    /// Stands for this connection in a credential.
    fn connection_hash(&self) -> [u8; 32] {
        noise::hash("munge", &[self.prologue.as_bytes()])
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

    /// Sends the dialer's packet: a credential if there is one, and the first Noise message.
    fn start_noise(&mut self, key: &[u8; 32], credential: &[u8]) -> Result<Stage, Fault> {
        let mut noise = NoiseHandshake::initiator(key, self.prologue.as_bytes());
        let message = noise.write().map_err(Fault::Connection)?;
        self.send_packet(AUTHENTICATE, &[credential, &message].concat());
        Ok(Stage::Packet { noise: Some(noise) })
    }

    fn read_packet(
        &mut self,
        noise: Option<NoiseHandshake>,
        kind: u8,
        body: &[u8],
    ) -> Result<Option<Channel>, Fault> {
        if kind == REFUSE {
            let why: String =
                String::from_utf8_lossy(body).chars().filter(|char| !char.is_control()).collect();
            return Err(Fault::Authentication(format!(
                "refused authentication by `{}`: {why}",
                self.preamble.method
            )));
        }
        match (&self.credentials, noise) {
            (Credentials::None, _) if body.is_empty() => self.finish(Channel::plain()).map(Some),
            (Credentials::None, _) => {
                Err(Fault::Protocol("sent credentials, and none were asked for".into()))
            }
            (_, Some(noise)) => self.finish_noise(noise, body).map(Some),
            (Credentials::Secret(secret), None) => {
                let noise = NoiseHandshake::responder(secret.key(), self.prologue.as_bytes());
                self.finish_noise(noise, body).map(Some)
            }
            (Credentials::Munge(_), None) => {
                let credential = body.len().saturating_sub(NoiseHandshake::FIRST_MESSAGE);
                self.request = Some(MungeRequest::Decode(body[..credential].to_vec()));
                self.stage = Stage::Payload { message: body[credential..].to_vec() };
                Ok(None)
            }
        }
    }

    fn read_answer(&mut self, answer: Result<MungeAnswer, String>) -> Result<Option<Channel>, Fault> {
        match (std::mem::replace(&mut self.stage, Stage::Over), answer) {
            (Stage::Credential { key }, Ok(MungeAnswer::Credential(credential))) => {
                self.stage = self.start_noise(&key, &credential)?;
                Ok(None)
            }
            (Stage::Payload { message }, Ok(MungeAnswer::Payload(payload, user))) => {
                let noise = self.check_payload(&payload, user).map_err(|why| self.refuse(&why))?;
                self.finish_noise(noise, &message).map(Some)
            }
            (Stage::Payload { .. }, Err(why)) => {
                Err(self.refuse(&format!("{why}; both hosts need the same munge key, user and time")))
            }
            (_, Err(why)) => {
                Err(Fault::Authentication(format!("wants authentication by `munge`, and here: {why}")))
            }
            _ => Err(Fault::Authentication("wants authentication by `munge`, and here it failed".into())),
        }
    }

    /// The Noise handshake with the key of a credential.
    fn check_payload(&self, payload: &[u8], user: u32) -> Result<NoiseHandshake, String> {
        let own = match &self.credentials {
            Credentials::Munge(munge) => munge.user(),
            _ => return Err("munge was not asked for".into()),
        };
        if user != own {
            return Err(format!("the credential is of user {user}, the coordinator runs as user {own}"));
        }
        let parts = payload.split_first_chunk::<32>().map(|(hash, key)| (*hash, <&[u8; 32]>::try_from(key)));
        match parts {
            Some((hash, Ok(key))) if hash == self.connection_hash() => {
                Ok(NoiseHandshake::responder(key, self.prologue.as_bytes()))
            }
            _ => Err("the credential was made for another connection".into()),
        }
    }

    /// Checks the Noise message of the other side, and answers it if this side listens.
    fn finish_noise(&mut self, mut noise: NoiseHandshake, message: &[u8]) -> Result<Channel, Fault> {
        if !noise.read(message) {
            return Err(self.refuse(match self.credentials {
                Credentials::Munge(_) => "the credential is not of this connection",
                _ => {
                    "the secrets differ; check that MGPU_SECRET_FILE or MGPU_SECRET is the same on all hosts"
                }
            }));
        }
        if self.role == Role::Listener {
            let body = noise.write().map_err(Fault::Connection)?;
            self.send_packet(AUTHENTICATE, &body);
        }
        let keys = noise.finish().map_err(Fault::Protocol)?;
        self.finish(Channel::encrypted(keys))
    }

    /// The other side failed authentication. It is told so if it has dialled.
    fn refuse(&mut self, why: &str) -> Fault {
        if self.role == Role::Listener {
            self.send_packet(REFUSE, &why.as_bytes()[..why.len().min(MAX_PACKET)]);
        }
        Fault::Authentication(format!("failed authentication by `{}`: {why}", self.preamble.method))
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
