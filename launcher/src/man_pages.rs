//! `mgpurun man`: the manual pages of `mgpurun` and its commands, made from their help.

use std::error::Error;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Command, Parser};
use clap_mangen::Man;

use crate::{commands, stdout};

/// Print the manual page, or write one for each command to a folder.
///
/// Without DIR the page of mgpurun is printed; `mgpurun man | man -l -` shows it. With DIR the pages mgpurun.1,
/// mgpurun-doctor.1 and so on are written there: `mgpurun man ~/.local/share/man/man1` makes `man mgpurun` work. DIR is
/// created if it is missing; pages of an earlier version are replaced.
///
/// To start a program named man: mgpurun -- man
#[derive(Debug, Parser)]
#[command(name = "mgpurun man", bin_name = "mgpurun man", max_term_width = 100)]
pub(crate) struct Args {
    /// Folder to write the pages to.
    #[arg(value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    folder: Option<PathBuf>,
}

/// The command, with the arguments from `man` on.
pub(crate) fn main(arguments: &[OsString]) -> Result<ExitCode, Box<dyn Error>> {
    let args: Args = match stdout::parse(arguments.iter().cloned())? {
        Ok(args) => args,
        Err(code) => return Ok(code),
    };
    let pages = pages()?;
    let Some(folder) = &args.folder else { return stdout::print(&pages[0].1, ExitCode::SUCCESS) };
    write(folder, &pages)?;
    let names: String = pages.iter().map(|(name, _)| format!("{}\n", folder.join(name).display())).collect();
    stdout::print(&names, ExitCode::SUCCESS)
}

/// Writes the pages to `folder`.
fn write(folder: &Path, pages: &[(String, String)]) -> Result<(), String> {
    fs::create_dir_all(folder)
        .map_err(|error| format!("cannot create {}: {error}; give another DIR", folder.display()))?;
    for (name, page) in pages {
        let path = folder.join(name);
        fs::write(&path, page)
            .map_err(|error| format!("cannot write {}: {error}; give another DIR", path.display()))?;
    }
    Ok(())
}

/// The file names and texts of all pages, that of `mgpurun` first.
fn pages() -> Result<Vec<(String, String)>, Box<dyn Error>> {
    // Adds the help of each command to its subcommands, such as --help.
    let mut tree = commands::tree().disable_help_subcommand(true);
    tree.build();
    let own = page("mgpurun", tree.clone())?;
    let commands = tree.get_subcommands().map(|command| {
        let name = format!("mgpurun-{}", command.get_name());
        page(&name, command.clone())
    });
    std::iter::once(Ok(own)).chain(commands).collect()
}

fn page(name: &str, command: Command) -> Result<(String, String), Box<dyn Error>> {
    let command = command.display_name(name);
    let mut text = Vec::new();
    Man::new(command).render(&mut text)?;
    Ok((format!("{name}.1"), String::from_utf8(text)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_page_with_its_options() {
        let pages = pages().unwrap();
        let names: Vec<&str> = pages.iter().map(|(name, _)| name.as_str()).collect();
        let expected = [
            "mgpurun.1",
            "mgpurun-doctor.1",
            "mgpurun-ps.1",
            "mgpurun-stop.1",
            "mgpurun-sweep.1",
            "mgpurun-top.1",
        ];
        assert_eq!(names[..6], expected);
        for (page, option) in [(0, "max\\-restarts"), (1, "nodes"), (3, "wait"), (4, "vary")] {
            assert!(pages[page].1.contains(&format!("\\-\\-{option}")), "{}", pages[page].1);
        }
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = write(&file.path().join("man1"), &[]).unwrap_err();
        assert!(error.starts_with(&format!("cannot create {}", file.path().display())), "{error}");
    }
}
