#![allow(missing_docs)]
pub mod digits;
pub const SIDE: usize = 28;
pub const IMAGE_LEN: usize = SIDE * SIDE;
pub const CLASSES: usize = 10;
#[derive(Clone, Copy)]
pub enum Split { Train, Test }
