//! Environment variables with numbers in them, and what is said about those that are wrong.

use crate::protocol::MAX_RANKS;
use crate::{Error, Result};

/// The error of a variable whose value will not do, or which is missing.
pub(super) fn wrong(name: &'static str, problem: String) -> Error {
    Error::Environment { name, problem }
}

/// Is this a size of a world? What is made for so many ranks should not be attempted for a typing error.
pub(super) fn check_size(name: &'static str, world_size: u32) -> Result<()> {
    match world_size {
        0 => Err(wrong(name, "is 0; a world has at least one rank".into())),
        1..=MAX_RANKS => Ok(()),
        _ => Err(wrong(name, format!("is {world_size}; a world has at most {MAX_RANKS} ranks"))),
    }
}

/// The whole number in the variable `name`, if that is set.
pub(super) fn number(variable: &dyn Fn(&str) -> Option<String>, name: &'static str) -> Result<Option<u32>> {
    let Some(text) = variable(name) else { return Ok(None) };
    let parsed = text.trim().parse().map(Some);
    parsed.map_err(|_| wrong(name, format!("is `{text}` where a whole number is expected")))
}
