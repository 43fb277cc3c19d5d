//! Matrix products on the CPU.
//!
//! All products are computed by the register tile of [`tile`]. The other modules prepare its operands ([`panels`],
//! [`transpose`]), divide one result among several threads ([`block`]), and prefetch memory ([`prefetch`]).

pub(crate) mod block;
pub(crate) mod panels;
pub(crate) mod prefetch;
pub(crate) mod tile;
pub(crate) mod transpose;
