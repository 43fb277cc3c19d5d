//! An engine that this architecture does not have.

use super::TileEngine;

/// There is none.
pub(super) fn engine() -> Option<&'static dyn TileEngine> {
    None
}

/// Not asked about an engine that does not exist.
#[allow(dead_code, reason = "one of two modules has it")]
pub(super) fn is_faster_than_f32() -> bool {
    false
}
