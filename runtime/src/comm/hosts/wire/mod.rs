//! The wire: how frames and posted payload travel between this rank and the other ranks of a communicator.
//!
//! Operations know only this interface. They queue small frames through the [`Sender`], post the payload of a large one
//! in a [`Transfer`], and drive the wire until what they need has arrived. Nothing here blocks, except for
//! [`poll`](Wire::poll) and [`close`](Sender::close), within the time that they are given.
//!
//! Frames of one rank for another arrive in the order in which they were queued. Posted payload travels beside them: a
//! frame may overtake it, but a rank posts payload of an operation only after it has queued its arrival there.
//!
//! The end of a connection is not an error of the wire. It is noted, because a peer that needs nothing more may leave.

pub(super) mod choice;
pub(super) mod spin;
pub(super) mod tcp;
pub(super) mod ucx;

use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) use super::board::Watch;
use super::frame::Header;
use super::transfer::Transfer;

/// A small frame from `from`.
pub(super) struct Frame {
    pub(super) from: u32,
    pub(super) header: Header,
    pub(super) payload: Vec<u8>,
}

/// Bytes from `from` that are no valid frame.
#[derive(Debug)]
pub(super) struct BadFrame {
    pub(super) from: u32,
    pub(super) problem: String,
}

/// How a connection ended.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) at: Instant,
    /// As a predicate of the peer.
    pub(super) how: String,
}

impl Ended {
    pub(super) fn now(how: impl Into<String>) -> Self {
        Ended { at: Instant::now(), how: how.into() }
    }
}

/// The connections of one rank, by rank in the communicator.
pub(super) trait Wire: Send {
    /// The side that only sends small frames, for whoever shares it.
    fn sender(&self) -> &Arc<dyn Sender>;

    /// Sends as much as there is room for, and uses what has arrived already.
    ///
    /// # Errors
    /// If a peer has sent something invalid.
    fn advance(&mut self, transfer: &mut Transfer<'_>) -> Result<(), BadFrame>;

    /// Waits for at most `patience` until something can be sent or has arrived, or `watch` is over, and takes all that has
    /// arrived. It may return earlier. Returns whether anything has moved, or may have; if not, nothing that had arrived before
    /// is left to take.
    ///
    /// # Errors
    /// If a peer has sent something invalid.
    fn poll(
        &mut self,
        transfer: &mut Transfer<'_>,
        patience: Duration,
        watch: &Watch<'_>,
    ) -> Result<bool, BadFrame>;

    /// The next small frame, in the order of their arrival.
    fn next_frame(&mut self) -> Option<Frame>;

    /// How the connection to `peer` has ended, if it has. Frames that were sent before may still arrive.
    fn ended(&self, peer: u32) -> Option<&Ended>;

    /// Stops using the memory of `transfer`, which is not complete, after an error. The communicator is only good for an
    /// abort then.
    fn abandon(&mut self, transfer: &mut Transfer<'_>);

    /// Declares that other threads compute on the rank's core: waits sleep at once.
    fn set_oversubscribed(&mut self) {}
}

/// The sending side of a [`Wire`], which the thread of an operation shares with whoever aborts.
pub(super) trait Sender: Send + Sync {
    /// Queues a small frame for `peer`. It is lost if the connection has ended.
    fn queue(&self, peer: u32, header: Header, payload: &[u8]);

    /// Whether there is nothing queued for `peer`.
    fn is_flushed(&self, peer: u32) -> bool;

    /// Sends every peer an abort frame after what was queued, and nothing after it. Other threads that send are
    /// interrupted.
    fn abort(&self, header: Header, payload: &[u8]);

    /// Ends all connections so that peers get everything that was sent. Waits for them for at most `patience`.
    fn close(&self, patience: Duration);
}
