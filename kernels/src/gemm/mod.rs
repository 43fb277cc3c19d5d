//! Matrix products on the CPU.
//!
//! Everything that multiplies comes down to the register tile of [`tile`]. Around it are what its operands have to look
//! like, [`panels`] and [`transpose`], and how several threads write one result, [`block`].

pub(crate) mod block;
pub(crate) mod panels;
pub(crate) mod tile;
pub(crate) mod transpose;
