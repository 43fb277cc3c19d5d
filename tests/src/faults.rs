//! The axes of the fault matrix: how the payload of an all-reduce travels, and what a rank may do wrong in it.

use mgpu::Algorithm;

/// An all-reduce of f32 whose payload travels in a certain way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PayloadPath {
    /// The name on the command line of `t-misbehave`.
    pub name: &'static str,
    /// Elements.
    pub len: usize,
    /// In an arena, rather than in private memory.
    pub in_arena: bool,
    /// What the communicator is told to use.
    pub algorithm: Algorithm,
    /// What it calls the path in its errors.
    pub path: &'static str,
    /// Its path for other collectives than the all-reduce, which choose none by algorithm.
    pub usual_path: &'static str,
}

const AUTO: PayloadPath =
    PayloadPath { name: "", len: 0, in_arena: true, algorithm: Algorithm::Auto, path: "", usual_path: "" };

/// All ways.
pub const PAYLOAD_PATHS: [PayloadPath; 6] = [
    PayloadPath { name: "inline", len: 1, path: "inline", usual_path: "inline", ..AUTO },
    PayloadPath { name: "eager", len: 150, path: "eager", usual_path: "eager", ..AUTO },
    PayloadPath { name: "private", len: 2048, in_arena: false, path: "eager", usual_path: "eager", ..AUTO },
    PayloadPath { name: "direct", len: 1 << 18, path: "direct", usual_path: "direct", ..AUTO },
    // Four chunks.
    PayloadPath { name: "staged", len: 1 << 18, in_arena: false, path: "staged", usual_path: "staged", ..AUTO },
    PayloadPath {
        name: "ring",
        len: 1 << 18,
        algorithm: Algorithm::Ring,
        path: "ring",
        usual_path: "direct",
        ..AUTO
    },
];

impl PayloadPath {
    /// The way of this name.
    pub fn named(name: &str) -> Option<PayloadPath> {
        PAYLOAD_PATHS.into_iter().find(|payload| payload.name == name)
    }

    /// Another algorithm than the way's.
    pub fn other_algorithm(&self) -> Algorithm {
        if self.algorithm == Algorithm::Ring { Algorithm::Direct } else { Algorithm::Ring }
    }
}
