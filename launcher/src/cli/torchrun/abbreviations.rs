//! torchrun's options may be abbreviated, as its parser (argparse) allows it: `--nproc 2` is `--nproc-per-node 2`.
//!
//! mgpurun's own options may not, because a new option could change what an old script means. So abbreviations count only in
//! a line of torchrun, and an abbreviated option makes the line one of torchrun only if it begins no option of mgpurun.

use std::ffi::{OsStr, OsString};

use clap::{Command, CommandFactory};

use super::super::args::CommandLine;
use super::words::{Word, classify, is_streams};

/// torchrun's options, and whether only torchrun has them.
const OPTIONS: [(&str, bool); 32] = [
    ("nnodes", false),
    ("nproc-per-node", true),
    ("rdzv-backend", true),
    ("rdzv-endpoint", false),
    ("rdzv-id", false),
    ("rdzv-conf", true),
    ("standalone", false),
    ("max-restarts", false),
    ("monitor-interval", true),
    ("start-method", true),
    ("event-log-handler", true),
    ("role", true),
    ("module", true),
    ("no-python", true),
    ("run-path", true),
    ("log-dir", false),
    ("redirects", true),
    ("tee", false),
    ("log-line-prefix-template", false),
    ("local-ranks-filter", true),
    ("duplicate-stdout-filters", false),
    ("duplicate-stderr-filters", false),
    ("node-rank", false),
    ("master-addr", true),
    ("master-port", true),
    ("local-addr", false),
    ("logs-specs", false),
    ("numa-binding", true),
    ("signals-to-handle", true),
    ("shutdown-timeout", true),
    ("virtual-local-rank", true),
    ("print-completion", false),
];

/// The words of a command line, in which the options of a line of torchrun are not abbreviated.
pub(in super::super) fn expand(words: Vec<OsString>) -> Vec<OsString> {
    let command = CommandLine::command();
    let (mut expanded, mut is_torchrun) = (words.clone(), false);
    let mut index = 1;
    while let Some(word) = words.get(index) {
        let full = full_name(&command, word);
        is_torchrun |= full.as_ref().map_or_else(|| is_only_torchruns(&command, word), |full| full.decides);
        if let Some(full) = full {
            expanded[index] = full.word;
        }
        let next_is_streams = words.get(index + 1).is_some_and(|next| is_streams(next));
        index += match classify(&command, &expanded[index]) {
            Word::End => break,
            Word::BeforeValue => 2,
            Word::Tee if next_is_streams => {
                is_torchrun = true;
                2
            }
            Word::TeeOf(_) => {
                is_torchrun = true;
                1
            }
            Word::Tee | Word::Whole => 1,
        };
    }
    if is_torchrun { expanded } else { words }
}

/// An abbreviated option.
struct Full {
    /// The word with the whole name.
    word: OsString,
    /// It makes the line one of torchrun.
    decides: bool,
}

/// The option of torchrun that a word abbreviates, if it is the only one.
fn full_name(command: &Command, word: &OsStr) -> Option<Full> {
    let (name, value) = long(word)?;
    let beginning = name.replace('_', "-");
    if beginning.is_empty() || is_option(command, name) {
        return None;
    }
    let mut found = OPTIONS.iter().filter(|(option, _)| option.starts_with(&beginning));
    let (Some((option, is_only)), None) = (found.next(), found.next()) else { return None };
    let begins_own = command
        .get_arguments()
        .filter_map(|option| option.get_long())
        .any(|own| own.starts_with(&beginning) && OPTIONS.iter().all(|(of_torchrun, _)| *of_torchrun != own));
    Some(Full { word: format!("--{option}{value}").into(), decides: *is_only && !begins_own })
}

/// Whether a word is an option that only torchrun has, by its whole name or a letter.
fn is_only_torchruns(command: &Command, word: &OsStr) -> bool {
    if let Some((name, _)) = long(word) {
        let name = name.replace('_', "-");
        return OPTIONS.contains(&(name.as_str(), true));
    }
    let Some(letters) = word.to_str().and_then(|word| word.strip_prefix('-')) else { return false };
    let options = letters
        .chars()
        .map(|letter| command.get_arguments().find(|option| option.get_short() == Some(letter)));
    // Behind an option with a value is the value.
    let mut has_value = false;
    let of_word = options.take_while(|option| {
        let is_one = !has_value;
        has_value |= option.is_some_and(|option| option.get_action().takes_values());
        is_one
    });
    of_word.flatten().filter_map(|option| option.get_long()).any(|name| OPTIONS.contains(&(name, true)))
}

/// The name of a long option, and what follows: a value with its `=`, or nothing.
fn long(word: &OsStr) -> Option<(&str, &str)> {
    let name = word.to_str()?.strip_prefix("--")?;
    Some(name.find('=').map_or((name, ""), |at| name.split_at(at)))
}

fn is_option(command: &Command, name: &str) -> bool {
    name == "help"
        || name == "version"
        || command.get_arguments().any(|option| {
            let aliases = option.get_all_aliases().unwrap_or_default();
            option.get_long() == Some(name) || aliases.contains(&name)
        })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::is_torchrun;
    use super::*;
    use clap::Parser;

    fn expanded(line: &str) -> String {
        let words = expand(line.split(' ').map(OsString::from).collect());
        words.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn options_of_a_line_of_torchrun_may_be_abbreviated() {
        for (line, full) in [
            ("mgpurun --nproc 2 x", "mgpurun --nproc-per-node 2 x"),
            (
                "mgpurun --nproc_p=2 --max 3 x --max 3",
                "mgpurun --nproc-per-node=2 --max-restarts 3 x --max 3",
            ),
            ("mgpurun -m --stand x", "mgpurun -m --standalone x"),
            ("mgpurun -r 3 --log-d d x", "mgpurun -r 3 --log-dir d x"),
            ("mgpurun --rdzv_b c10d --rdzv_e h:1 x", "mgpurun --rdzv-backend c10d --rdzv-endpoint h:1 x"),
            ("mgpurun --max 3 -t 3 x", "mgpurun --max-restarts 3 -t 3 x"),
            ("mgpurun --no-p --role a x", "mgpurun --no-python --role a x"),
            // Not a line of torchrun.
            ("mgpurun --max 3 x", "mgpurun --max 3 x"),
            ("mgpurun --no-p x", "mgpurun --no-p x"),
            ("mgpurun -n 2 --stand x", "mgpurun -n 2 --stand x"),
            ("mgpurun -nm --stand x", "mgpurun -nm --stand x"),
            // Several options, none, or a value.
            ("mgpurun --role a --no x", "mgpurun --role a --no x"),
            ("mgpurun --role --nproc x", "mgpurun --role --nproc x"),
            ("mgpurun --role a --unknown x", "mgpurun --role a --unknown x"),
            ("mgpurun -- --nproc 2", "mgpurun -- --nproc 2"),
            ("mgpurun x --nproc 2", "mgpurun x --nproc 2"),
            ("mgpurun", "mgpurun"),
        ] {
            assert_eq!(expanded(line), full);
        }
    }

    #[test]
    fn the_list_is_that_of_the_parser() {
        let command = CommandLine::command();
        for (name, is_only) in OPTIONS {
            let option = command.get_arguments().find(|option| option.get_long() == Some(name));
            let option = option.unwrap_or_else(|| panic!("--{name}"));
            // Values that each option accepts.
            let values = ["1", "a", "node", "SIGXCPU", "127.0.0.1:1"];
            let lines = values.iter().map(|value| match option.get_action().takes_values() {
                true => vec!["mgpurun".to_owned(), format!("--{name}={value}"), "x".to_owned()],
                false => vec!["mgpurun".to_owned(), format!("--{name}"), "x".to_owned()],
            });
            let parsed = lines.filter_map(|line| CommandLine::try_parse_from(line).ok()).next();
            if let Some(line) = parsed {
                let is_tee = name == "tee";
                assert_eq!(is_torchrun(&line), is_only || is_tee, "--{name}");
            }
        }
    }

    proptest! {
        #[test]
        fn words_behind_the_program_stay_as_they_are(words in prop::collection::vec("[-a-t3:=_]{0,8}", 0..8)) {
            let own = ["mgpurun", "--role=a", "prog"].map(OsString::from);
            let given: Vec<OsString> = own.into_iter().chain(words.iter().map(OsString::from)).collect();
            prop_assert_eq!(expand(given.clone()), given);
        }

        #[test]
        fn any_words_are_accepted(words in prop::collection::vec("[-a-t3:=_]{0,8}", 0..8)) {
            let given: Vec<OsString> = words.iter().map(OsString::from).collect();
            prop_assert_eq!(expand(given.clone()).len(), given.len());
        }
    }
}
