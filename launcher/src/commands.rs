//! All commands of `mgpurun` as one description, for shell completion and man pages.
//!
//! `mgpurun` itself parses its command line in two steps (see [`cli`](crate::cli)), so that any program can be started.

use clap::{Command, CommandFactory, ValueHint};

use crate::cli::CommandLine;
use crate::{completions, doctor, man_pages, status, stop, sweep, top};

/// `mgpurun` with its commands.
pub(crate) fn tree() -> Command {
    let starts_a_program = |command: Command| {
        command.mut_arg("command", |program| program.value_hint(ValueHint::CommandWithArguments))
    };
    starts_a_program(CommandLine::command())
        .subcommand_negates_reqs(true)
        .subcommand(doctor::Args::command().name("doctor"))
        .subcommand(status::runs::Args::command().name("ps"))
        .subcommand(stop::Args::command().name("stop"))
        .subcommand(starts_a_program(sweep::Args::command().name("sweep")))
        .subcommand(top::Args::command().name("top"))
        .subcommand(completions::Args::command().name("completions"))
        .subcommand(man_pages::Args::command().name("man"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_is_valid_and_its_commands_have_a_description() {
        let tree = tree();
        tree.clone().debug_assert();
        for command in tree.get_subcommands() {
            assert!(command.get_about().is_some(), "{}", command.get_name());
        }
    }
}
