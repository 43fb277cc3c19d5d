//! Do the hosts of a job reach each other on the interface that NCCL takes?
//!
//! NCCL chooses an interface by its name and never tries it: if it leads nowhere, as `docker0` does, the ranks wait for
//! each other forever. So before NCCL is used, each host predicts the choice ([`interfaces`]) and listens there, and the
//! next host tries to connect ([`NcclEndpoint`]). If one fails, all ranks have to use the interface of the connections that
//! the hosts have. Interfaces that the user has named are kept, and the failure is only told ([`find_unreached`]).
//!
//! With an agent on each host, the agents do this before they start their ranks. Without agents, the first rank of each
//! host does it while the ranks join (`rendezvous/several_hosts`).

pub(crate) mod advice;
mod check;
mod endpoint;
pub mod interfaces;

pub use advice::{NcclAdvice, NcclVariables};
pub use check::{
    ANSWER_LIMIT, MAX_TARGETS, NcclAnswer, NcclCard, NcclTarget, REACH_LIMIT, Unreached, find_unreached,
};
pub use endpoint::NcclEndpoint;
