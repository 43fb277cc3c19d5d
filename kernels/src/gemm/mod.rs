//! Matrix products on the CPU.
//!
//! Everything that multiplies comes down to the register tile of [`tile`]. Around it are what its operands have to look
//! like, [`panels`] and [`transpose`], how several threads write one result, [`block`], and which memory is asked for
//! meanwhile, [`ahead`].

pub(crate) mod ahead;
pub(crate) mod block;
pub(crate) mod panels;
pub(crate) mod tile;
pub(crate) mod transpose;
