//! Matrix products on the CPU.
//!
//! A [`product`] is computed in register tiles ([`tile`]). The other modules prepare its operands ([`panels`],
//! [`transpose`]), divide one result among several threads ([`block`]), and prefetch memory ([`prefetch`]).

pub(crate) mod block;
pub(crate) mod panels;
pub(crate) mod prefetch;
pub(crate) mod product;
mod tile;
pub(crate) mod transpose;
