//! The lines of a results file, and of the output with `--json`: one JSON object each, told apart by the key `event`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::summary::Summary;
use crate::cli::quote;

/// A line.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub(super) enum Record {
    /// What is measured, and where: the first line.
    Sweep(Conditions),
    /// A run has ended.
    Run(Run),
    /// A row of the table; only in the output, because it follows from the runs.
    Row(Row),
}

/// Everything that must be the same in all runs that are compared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Conditions {
    /// Program and arguments as the user gave them.
    pub(super) command: Vec<String>,
    /// In words.
    pub(super) scaling: String,
    /// Options of the launches.
    pub(super) launch_options: Vec<String>,
    /// Processor, cores and GPUs.
    pub(super) machine: String,
}

impl Conditions {
    /// Program and arguments, quoted for a shell.
    pub(super) fn command_line(&self) -> String {
        join_quoted(&self.command)
    }

    /// The first difference to the conditions in a results file, in words.
    pub(super) fn difference(&self, filed: &Conditions) -> Option<String> {
        let join = |words: &[String]| format!("`{}`", join_quoted(words));
        let pairs = [
            ("command", join(&filed.command), join(&self.command)),
            ("scaling", filed.scaling.clone(), self.scaling.clone()),
            ("options of the launches", join(&filed.launch_options), join(&self.launch_options)),
            ("machine", filed.machine.clone(), self.machine.clone()),
        ];
        let different = pairs.into_iter().find(|(_, filed, now)| filed != now);
        different.map(|(what, filed, now)| format!("its {what}: {filed}, not {now}"))
    }
}

/// Words, quoted for a shell.
pub(super) fn join_quoted(words: &[String]) -> String {
    words.iter().map(|word| quote(word)).collect::<Vec<_>>().join(" ")
}

/// A run of a cell.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Run {
    pub(super) ranks: u32,
    /// The varied options and their values.
    pub(super) vary: BTreeMap<String, String>,
    /// Counted from 1.
    pub(super) repeat: u32,
    /// There were more ranks than devices.
    pub(super) oversubscribed: bool,
    /// Program and arguments as they were run.
    pub(super) command: Vec<String>,
    /// The exit code of the launch.
    pub(super) exit_code: u8,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<String>,
    /// From the start of the launch to its end.
    pub(super) wall_s: f64,
    /// Peak resident memory of each rank's process, if the kernel tells.
    pub(super) peak_rss_mib: Vec<Option<u64>>,
    /// The last JSON object that the program printed.
    pub(super) result: Option<Map<String, Value>>,
}

impl Run {
    pub(super) fn failed(&self) -> bool {
        self.exit_code != 0
    }

    /// True if `other` is of the same cell and the same round.
    pub(super) fn is_same_run(&self, other: &Run) -> bool {
        (self.ranks, &self.vary, self.repeat) == (other.ranks, &other.vary, other.repeat)
    }
}

/// A row of the table: a cell, over all of its runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Row {
    pub(super) ranks: u32,
    pub(super) vary: BTreeMap<String, String>,
    pub(super) oversubscribed: bool,
    /// Runs that have ended, and how many of them failed.
    pub(super) runs: u32,
    pub(super) failed: u32,
    /// Exit code and error of the last run that failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) exit_code: Option<u8>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<String>,
    /// By the name of the figure.
    pub(super) figures: BTreeMap<String, Summary>,
    /// Peak resident memory of each rank: the maximum over runs.
    pub(super) peak_rss_mib: Vec<Option<u64>>,
}
