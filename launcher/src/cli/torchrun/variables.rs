//! torchrun's variables: `PET_ROLE` sets `--role`, and so on.

use std::fmt::Display;
use std::str::FromStr;
use std::time::Duration;

use mgpu_control::protocol::MGPU_RENDEZVOUS;

use super::parse_seconds;
use crate::nodes::{SettingsError, Surroundings};

/// torchrun's older variable for its `--shutdown-timeout`.
const SHUTDOWN_TIMEOUT: &str = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT";

/// The variables that set options which the command line does not have. An empty one counts as absent.
pub(super) struct Variables<'a> {
    surroundings: &'a Surroundings<'a>,
    /// This process is a rank: the variables were meant for the launcher that has started it.
    is_nested: bool,
}

impl<'a> Variables<'a> {
    pub(super) fn new(surroundings: &'a Surroundings<'a>) -> Self {
        Variables { surroundings, is_nested: surroundings.text(MGPU_RENDEZVOUS).is_some() }
    }

    fn read(&self, name: &str) -> Option<String> {
        self.surroundings.text(name).filter(|_| !self.is_nested)
    }

    /// True if the variable of this option is set.
    pub(super) fn has(&self, name: &str) -> bool {
        self.read(&variable(name)).is_some()
    }

    /// The flag or the variable of an option, for messages.
    pub(super) fn source(&self, is_flag: bool, name: &str) -> String {
        match is_flag {
            true => format!("--{}", name.to_ascii_lowercase().replace('_', "-")),
            false => variable(name),
        }
    }

    /// The text of an option.
    pub(super) fn text(&self, flag: Option<String>, name: &str) -> Option<String> {
        flag.or_else(|| self.read(&variable(name)))
    }

    /// The value of an option.
    ///
    /// # Errors
    /// If the variable has no such value.
    pub(super) fn value<T: FromStr<Err: Display>>(
        &self,
        flag: Option<T>,
        name: &str,
    ) -> Result<Option<T>, SettingsError> {
        if flag.is_some() {
            return Ok(flag);
        }
        let name = variable(name);
        let parse = |text: String| text.trim().parse().map_err(|why: T::Err| wrong(&name, &text, &why));
        self.read(&name).map(parse).transpose()
    }

    /// A switch, for which torchrun takes numbers: 0 is off.
    ///
    /// # Errors
    /// If the variable is no number.
    pub(super) fn switch(&self, flag: bool, name: &str) -> Result<bool, SettingsError> {
        if flag {
            return Ok(true);
        }
        let name = variable(name);
        let parse = |text: String| {
            let number = text.trim().parse::<i64>();
            number.map(|number| number != 0).map_err(|_| wrong(&name, &text, &"it should be 0 or 1"))
        };
        self.read(&name).map_or(Ok(false), parse)
    }

    /// The time between SIGTERM and SIGKILL.
    ///
    /// # Errors
    /// If the variable is no number of seconds.
    pub(super) fn seconds(&self) -> Result<Option<Duration>, SettingsError> {
        let of = |name: String| Some((self.read(&name)?, name));
        let found = of(variable("SHUTDOWN_TIMEOUT")).or_else(|| of(SHUTDOWN_TIMEOUT.to_owned()));
        let parse = |(text, name): (String, String)| {
            parse_seconds(text.trim()).map_err(|why| wrong(&name, &text, &why))
        };
        found.map(parse).transpose()
    }
}

fn variable(name: &str) -> String {
    format!("PET_{name}")
}

fn wrong(name: &str, text: &str, why: &dyn Display) -> SettingsError {
    SettingsError::new(format!("the variable {name} is `{text}`: {why}"))
}
