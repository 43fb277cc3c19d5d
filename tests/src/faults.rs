//! The axes of the fault matrix: the path of an all-reduce's payload, and the faults of a rank in it.

use mgpu::Algorithm;

/// An f32 all-reduce whose payload takes a given path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PayloadPath {
    /// The name on the command line of `t-misbehave`.
    pub name: &'static str,
    /// Elements.
    pub len: usize,
    /// In an arena instead of private memory.
    pub in_arena: bool,
    /// The algorithm set on the communicator.
    pub algorithm: Algorithm,
    /// The name of the path in errors.
    pub path: &'static str,
    /// The path of other collectives, which do not depend on the algorithm.
    pub usual_path: &'static str,
}

const AUTO: PayloadPath =
    PayloadPath { name: "", len: 0, in_arena: true, algorithm: Algorithm::Auto, path: "", usual_path: "" };

/// All payload paths.
pub const PAYLOAD_PATHS: [PayloadPath; 6] = [
    PayloadPath { name: "inline", len: 1, path: "inline", usual_path: "inline", ..AUTO },
    PayloadPath { name: "eager", len: 150, path: "eager", usual_path: "eager", ..AUTO },
    // One block.
    PayloadPath { name: "private", len: 2048, in_arena: false, path: "staged", usual_path: "staged", ..AUTO },
    PayloadPath { name: "direct", len: 1 << 18, path: "direct", usual_path: "direct", ..AUTO },
    // Several blocks.
    PayloadPath {
        name: "staged",
        len: 1 << 18,
        in_arena: false,
        path: "staged",
        usual_path: "staged",
        ..AUTO
    },
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
    /// The payload path of this name.
    pub fn named(name: &str) -> Option<PayloadPath> {
        PAYLOAD_PATHS.into_iter().find(|payload| payload.name == name)
    }

    /// An algorithm other than this one's.
    pub fn other_algorithm(&self) -> Algorithm {
        if self.algorithm == Algorithm::Ring { Algorithm::Direct } else { Algorithm::Ring }
    }
}
