//! Numbers in environment variables, and the errors about them.

use crate::protocol::MAX_WORLD_RANKS;
use crate::{Error, Result};

/// The error of a variable that is missing or has an invalid value.
pub(super) fn variable_error(name: &'static str, problem: String) -> Error {
    Error::Environment { name, problem }
}

/// Checks a world size, so that a typing error does not allocate for millions of ranks.
pub(super) fn check_size(name: &'static str, world_size: u32) -> Result<()> {
    match world_size {
        0 => Err(variable_error(name, "is 0; a world has at least one rank".into())),
        1..=MAX_WORLD_RANKS => Ok(()),
        _ => {
            Err(variable_error(name, format!("is {world_size}; a world has at most {MAX_WORLD_RANKS} ranks")))
        }
    }
}

/// The whole number in the variable `name`, if it is set.
pub(super) fn number(variable: &dyn Fn(&str) -> Option<String>, name: &'static str) -> Result<Option<u32>> {
    let Some(text) = variable(name) else { return Ok(None) };
    let parsed = text.trim().parse().map(Some);
    parsed.map_err(|_| variable_error(name, format!("is `{text}` where a whole number is expected")))
}
