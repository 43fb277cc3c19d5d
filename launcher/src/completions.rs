//! `mgpurun completions`: scripts by which shells complete the command line.
//!
//! clap makes them. Its script for bash knows options and their values, but not that the words after the program belong to
//! the program: [`bash_dispatch`] adds that.

use std::error::Error;
use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Arg, Command, Parser};
use clap_complete::{Shell, generate};

use crate::{commands, stdout};

/// Print a script that makes a shell complete the command line of mgpurun.
///
/// bash: mgpurun completions bash > ~/.local/share/bash-completion/completions/mgpurun
///
/// zsh: mgpurun completions zsh > a file named _mgpurun in a folder of $fpath
///
/// fish: mgpurun completions fish > ~/.config/fish/completions/mgpurun.fish
///
/// In bash the words after PROGRAM are completed as for PROGRAM itself if the package bash-completion is loaded, and as
/// file names otherwise.
///
/// To start a program named completions: mgpurun -- completions
#[derive(Debug, Parser)]
#[command(name = "mgpurun completions", bin_name = "mgpurun completions", max_term_width = 100)]
pub(crate) struct Args {
    /// The shell.
    #[arg(value_enum)]
    shell: Shell,
}

/// The command, with the arguments from `completions` on.
pub(crate) fn main(arguments: &[OsString]) -> Result<ExitCode, Box<dyn Error>> {
    match stdout::parse(arguments.iter().cloned())? {
        Ok(Args { shell }) => stdout::print(&script(shell)?, ExitCode::SUCCESS),
        Err(code) => Ok(code),
    }
}

fn script(shell: Shell) -> Result<String, Box<dyn Error>> {
    let mut tree = commands::tree().disable_help_subcommand(true);
    let mut script = Vec::new();
    generate(shell, &mut tree, "mgpurun", &mut script);
    let mut script = String::from_utf8(script)?;
    if shell == Shell::Bash {
        script += &bash_dispatch(&tree);
    }
    Ok(script)
}

/// Finds the program in the words before the cursor, and decides who completes the current word.
fn bash_dispatch(tree: &Command) -> String {
    let of_sweep = tree.find_subcommand("sweep").map(options_with_value).unwrap_or_default();
    let names: Vec<&str> = tree.get_subcommands().map(Command::get_name).collect();
    let without_program: Vec<&str> = names.iter().copied().filter(|name| *name != "sweep").collect();
    BASH_DISPATCH
        .replace("@OPTIONS@", &options_with_value(tree))
        .replace("@OPTIONS_OF_SWEEP@", &of_sweep)
        .replace("@COMMANDS@", &names.join(" "))
        .replace("@WITHOUT_PROGRAM@", &without_program.join(" | "))
}

/// The options whose value is the next word, between spaces.
fn options_with_value(command: &Command) -> String {
    let takes_next_word = |option: &&Arg| {
        let least = option.get_num_args().map_or(1, |count| count.min_values());
        option.get_action().takes_values() && least > 0 && !option.is_positional()
    };
    let options = command.get_arguments().filter(takes_next_word);
    let names = options.flat_map(|option| {
        let long = option.get_long_and_visible_aliases().unwrap_or_default();
        let hidden = option.get_all_aliases().unwrap_or_default();
        let short = option.get_short().map(|short| format!("-{short}"));
        long.into_iter().chain(hidden).map(|name| format!("--{name}")).chain(short).collect::<Vec<_>>()
    });
    names.collect::<Vec<_>>().join(" ")
}

const BASH_DISPATCH: &str = r#"
# The words after PROGRAM belong to it, up to a colon, which begins another job.
_mgpurun_command_line() {
    local cur=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]}
    local index=1 program=0 word options=" @OPTIONS@ "
    COMPREPLY=()
    # bash splits words at =.
    if [[ $cur == = ]]; then
        cur=
    elif [[ $previous == = ]]; then
        previous=${COMP_WORDS[COMP_CWORD - 2]}
    fi
    if (( COMP_CWORD > 1 )); then
        case ${COMP_WORDS[1]} in
            sweep) index=2 options=" @OPTIONS_OF_SWEEP@ " ;;
            @WITHOUT_PROGRAM@) _mgpurun "$1" "$cur" "$previous"; return ;;
        esac
    fi
    while (( index < COMP_CWORD )); do
        word=${COMP_WORDS[index]}
        if [[ $word == : && ${COMP_WORDS[1]} != sweep ]]; then
            program=0
        elif (( program == 0 )); then
            case $word in
                --) program=$((index + 1)) ;;
                -*)
                    if [[ ${COMP_WORDS[index + 1]} == = ]]; then
                        index=$((index + 2))
                    elif [[ $options == *" $word "* ]]; then
                        index=$((index + 1))
                    fi
                    ;;
                *) program=$index ;;
            esac
        fi
        index=$((index + 1))
    done
    if (( program > 0 && program < COMP_CWORD )); then
        declare -F _command_offset > /dev/null && _command_offset "$program"
    elif (( program == 0 )) && { (( index > COMP_CWORD )) || [[ $cur == -* ]]; }; then
        # An option, or the value of one.
        _mgpurun "$1" "$cur" "$previous"
    else
        local commands=
        (( COMP_CWORD == 1 )) && commands="@COMMANDS@"
        COMPREPLY=($(compgen -W "$commands" -c -- "$cur"))
    fi
}
complete -F _mgpurun_command_line -o nosort -o bashdefault -o default mgpurun
"#;

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// What bash offers for a command line whose last word is completed.
    fn offers(line: &[&str]) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("mgpurun");
        std::fs::write(&file, script(Shell::Bash).unwrap()).unwrap();
        let script = "source \"$1\"; shift; COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); \
                      COMP_LINE=\"$*\"; COMP_POINT=${#COMP_LINE}; \
                      complete -p mgpurun | grep -q _mgpurun_command_line || exit 9; \
                      _mgpurun_command_line mgpurun \"${COMP_WORDS[COMP_CWORD]}\" \"${COMP_WORDS[COMP_CWORD-1]}\"; \
                      printf '%s\\n' \"${COMPREPLY[@]}\"";
        let mut bash = Command::new("bash");
        bash.args(["--norc", "-c", script, "bash"]).arg(&file).args(line);
        let done = bash.output().unwrap();
        assert!(done.status.success(), "{done:?}");
        assert!(done.stderr.is_empty(), "{done:?}");
        String::from_utf8(done.stdout).unwrap().lines().map(str::to_owned).collect()
    }

    #[test]
    fn bash_completes_commands_options_values_and_programs() {
        let has = |line: &[&str], word: &str| offers(line).iter().any(|offer| offer == word);
        assert_eq!(offers(&["mgpurun", "doct"]), ["doctor"]);
        assert!(has(&["mgpurun", "--max-re"], "--max-restarts"));
        assert!(has(&["mgpurun", "-n", "2", "--no-pr"], "--no-prefix"));
        assert_eq!(offers(&["mgpurun", "--backend", "c"]), ["cpu"]);
        assert_eq!(offers(&["mgpurun", "--backend", "=", "c"]), ["cpu"]);
        assert_eq!(offers(&["mgpurun", "--backend", "="]), ["auto", "nccl", "cpu"]);
        assert!(has(&["mgpurun", "doctor", "--js"], "--json"));
        assert!(has(&["mgpurun", "sweep", "-n", "1,2", "--var"], "--vary"));
        assert!(has(&["mgpurun", "completions", "fi"], "fish"));
        // Programs.
        assert!(has(&["mgpurun", "-n", "2", "bas"], "bash"));
        assert!(has(&["mgpurun", "--", "bas"], "bash"));
        assert!(has(&["mgpurun", "-n", "2", "true", ":", "bas"], "bash"));
        assert!(has(&["mgpurun", "sweep", "--out", "x", "bas"], "bash"));
    }

    #[test]
    fn bash_leaves_the_words_after_the_program_to_it() {
        for line in [
            &["mgpurun", "-n", "2", "true", "--max-re"][..],
            &["mgpurun", "--backend", "=", "cpu", "true", "doct"],
            &["mgpurun", "--", "true", "--js"],
            &["mgpurun", "sweep", "-n", "1,2", "true", "--var"],
        ] {
            assert_eq!(offers(line), [""], "{line:?}");
        }
        assert!(offers(&["mgpurun", "true", ":", "--gp"]).contains(&"--gpus".to_owned()));
    }

    #[test]
    fn every_shell_has_a_script_with_options_and_commands() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish, Shell::Elvish, Shell::PowerShell] {
            let script = script(shell).unwrap();
            for word in ["max-restarts", "doctor", "vary"] {
                assert!(script.contains(word), "{shell}: {word}");
            }
        }
    }
}
