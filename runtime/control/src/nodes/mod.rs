//! Between hosts: the connections of a job whose ranks run on several of them.
//!
//! Every host of such a job is a *node*: one `mgpurun`, its *agent*. The agent of node 0 is also the *coordinator*. It
//! listens ([`NodeListener`]), and every other agent dials it ([`Dialer`]), so the connections form a star. Both sides
//! get the same thing: a [`Link`], over which JSON messages travel. Nothing here blocks or starts a process; a poll loop
//! drives all of it with `fds`, `next_deadline` and `service`.
//!
//! A connection becomes a link in three steps, and no JSON is parsed before the last one:
//!
//! 1. Each side sends its *preamble*, one line of plain text: protocol version, authentication method, hash of the run
//!    id, and a fresh nonce. Different versions, methods and runs reject each other by it, and other programs that
//!    happen to listen on a port or connect to it are recognised.
//! 2. Authentication by [`Credentials`]: a shared secret, or munge, and with both a Noise handshake that also protects
//!    the preambles against changes. Its messages are one packet of each side.
//! 3. Frames: a length and a JSON message each, encrypted unless the credentials are [`Credentials::None`].
//!
//! Above them, `relay` has what the rendezvous servers of different nodes say to each other, and `layout` which ranks are
//! on which node.
//!
//! `handshake` (steps 1 and 2) and `channel` (step 3) are pure: bytes in, bytes out. Sockets and time are in `opening`,
//! `link`, `listener` and `dialer`. A link whose host is gone is given up by the kernel (`tcp`), or because what it was
//! sent is not acknowledged (`unacknowledged`).

mod address;
mod auth;
mod background;
#[doc(hidden)]
pub mod channel;
mod dialer;
#[doc(hidden)]
pub mod handshake;
pub mod host_list;
pub mod layout;
mod link;
mod listener;
mod munge;
mod noise;
mod opening;
mod outbox;
mod port_owner;
mod preamble;
pub mod relay;
mod resolve;
mod tcp;
mod unacknowledged;

pub use address::{Endpoint, owns};
pub use auth::{Credentials, Method, Secret};
pub use dialer::{DialError, Dialer};
pub use layout::Layout;
pub use link::{Link, LinkState, Loss};
pub use listener::{NodeListener, RejectedConnections};
pub use munge::Munge;
pub use port_owner::who_listens;
pub use preamble::RunTag;
pub use relay::{Hub, HubAction, NodeManifest, RankEnd, RelayMessage};
pub use resolve::Lookup;

/// Port of the coordinator if neither the user nor the engine names one: torchrun's.
pub const DEFAULT_PORT: u16 = 29400;

#[cfg(test)]
mod tests;
