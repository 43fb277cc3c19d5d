//! The interface of a backend.
//!
//! | transport | ranks |
//! |---|---|
//! | [`solo`](super::solo) | one: every operation is the identity |
//! | [`cpu`](super::cpu) | processes or threads of one host, through shared memory |
//! | [`hosts`](super::hosts) | processes of several hosts, over TCP or UCX |
//! | [`nccl`](super::nccl) | GPUs of one host, through NCCL and staging memory |
//! | [`background`](super::background) | those of another communicator, whose reductions run on a background thread |
//!
//! A transport gets a [`Request`] with valid arguments, and matches on its call once. It compares the call with those
//! of its peers (by their [`Signature`](super::signature::Signature)), executes it, and returns when the request's
//! buffer can be given back; or it takes the buffer and leaves a [`Pending`](super::Pending). It never waits longer
//! than the world's timeout while no peer makes progress, and its errors name the rank that blocks the others. The
//! communicator does everything else: fault injection, the progress page, poisoning, tracing.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::adopt::Adoption;
use super::call::Request;
use super::rules::{FailureHandler, Rules};
use super::split::SplitGroup;
use super::{Algorithm, Buffer, Communicator, DType};
use crate::Result;
use crate::shm::ReplacedPages;

/// Properties of a communicator's buffers and reductions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Ranks access each other's allocated buffers in place.
    pub shares_memory: bool,
    /// Reductions combine in rank order, in an accumulator, and round once: all algorithms give the same bits.
    pub sums_in_rank_order: bool,
    /// Payloads of host buffers are copied through GPU memory; a `DeviceCommunicator` avoids the copies.
    pub device_buffers: bool,
    /// The ranks of the host are more than its cores; false where that is not known.
    pub shares_cores: bool,
    /// Host buffers cross a network between hosts, so that every operation costs its latency.
    pub crosses_network: bool,
}

/// The contract of the [module](self).
pub(crate) trait Transport: FailureHandler + Send {
    /// Its name, for display only.
    fn backend(&self) -> &'static str;

    fn capabilities(&self) -> Capabilities;

    /// Memory for `len` zeroed elements. Collective.
    fn allocate(&mut self, dtype: DType, len: usize) -> Result<Buffer>;

    /// Whether it can put arenas in the place of a program's own pages: [`adopt_pages`](Self::adopt_pages).
    fn replaces_pages(&self) -> bool {
        false
    }

    /// Puts an arena in the place of pages of the caller's own, as the caller of
    /// [`adopt_in_place`](Communicator::adopt_in_place) has promised. Collective.
    fn adopt_pages(&mut self, _: &Adoption<'_>) -> Result<(Buffer, ReplacedPages)> {
        unreachable!("a transport that replaces no pages")
    }

    /// Whether it is done with the caller's memory when [`submit`](Self::submit) returns, also with an error.
    fn releases_memory(&self) -> bool {
        false
    }

    /// Executes a call to its end, unless it sets [`Request::pending`]. By reference: moving requests and results
    /// would take longer than a small operation.
    fn submit(&mut self, request: &mut Request<'_>) -> Result<()>;

    /// Connects this rank with the other members of a group of several of its ranks. Collective among the members.
    fn connect_group(&mut self, group: &SplitGroup, rules: Rules) -> Result<Communicator>;

    /// Takes part in a split in which this rank gets no group of several ranks, while others
    /// [connect](Self::connect_group) theirs. Does nothing unless the transport needs all ranks for that.
    fn connect_no_group(&mut self) -> Result<()> {
        Ok(())
    }

    /// Chooses the algorithm of the following all-reduces, if there is a choice.
    fn set_algorithm(&mut self, _: Algorithm) {}

    /// Declares that other threads compute on the ranks' cores.
    fn set_oversubscribed(&mut self) {}

    /// Bytes of payload that this rank has moved between ranks, if the transport counts them.
    fn traffic(&self) -> Option<u64> {
        None
    }

    /// Makes every collective store the time at which the last rank arrived in `at`, if that is 0 and the transport
    /// knows it.
    fn record_arrivals(&mut self, at: Arc<AtomicU64>) {
        drop(at);
    }
}
