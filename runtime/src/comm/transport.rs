//! What a backend supplies.
//!
//! | transport | ranks |
//! |---|---|
//! | [`solo`](super::solo) | one: every operation is the identity |
//! | [`cpu`](super::cpu) | processes or threads of one host, through shared memory |
//! | [`nccl`](super::nccl) | GPUs of one host, through NCCL and staging memory |
//! | [`background`](super::background) | those of another communicator, whose reductions run on a thread of their own |
//!
//! A transport gets a [`Request`] whose arguments were checked, and matches on its call once. It compares the call with its
//! peers' (by their [`Signature`](super::signature::Signature)), carries it out and returns when the request's buffer may be
//! handed back, or takes that and leaves a [`Pending`](super::Pending) that does. It never waits longer than the world's timeout without any peer making progress, and its
//! errors name the rank that holds the others up. Everything else is the communicator's: faults, the progress page,
//! poisoning, tracing.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::call::Request;
use super::rules::FailureHandler;
use super::{Algorithm, Buffer, DType};
use crate::Result;

/// What the buffers and reductions of a communicator are like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Ranks reach each other's allocated buffers in place.
    pub shares_memory: bool,
    /// Reductions combine in rank order, in an accumulator, and round once: the same bits whatever the algorithm.
    pub sums_in_rank_order: bool,
    /// The payload goes through the memory of GPUs, where a `DeviceCommunicator` would leave it.
    pub device_buffers: bool,
}

/// The contract of the [module](self).
pub(crate) trait Transport: FailureHandler + Send {
    /// Its name, for display alone.
    fn backend(&self) -> &'static str;

    fn capabilities(&self) -> Capabilities;

    /// Memory for `len` zeroed elements. Collective.
    fn allocate(&mut self, dtype: DType, len: usize) -> Result<Buffer>;

    /// Carries out a call, to its end unless it leaves something [pending](Request::pending). By reference: a small operation
    /// takes less time than it would take to move requests and results about.
    fn submit(&mut self, request: &mut Request<'_>) -> Result<()>;

    /// Chooses how the following all-reduces are carried out, if there is a choice.
    fn set_algorithm(&mut self, _: Algorithm) {}

    /// From now on other threads compute on the cores of the ranks while they wait here.
    fn set_oversubscribed(&mut self) {}

    /// Has every collective note in `at`, where that is 0, when the last rank had come to it, if it can tell.
    fn note_arrivals(&mut self, at: Arc<AtomicU64>) {
        drop(at);
    }
}
