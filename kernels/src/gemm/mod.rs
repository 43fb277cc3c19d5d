//! Matrix products on the CPU.
//!
//! All products are computed by the register tile of [`tile`]. The other modules prepare its operands ([`panels`],
//! [`transpose`]), divide one result among several threads ([`block`]), and prefetch memory ([`ahead`]).

pub(crate) mod ahead;
pub(crate) mod block;
pub(crate) mod panels;
pub(crate) mod tile;
pub(crate) mod transpose;
