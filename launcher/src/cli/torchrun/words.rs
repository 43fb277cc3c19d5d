//! `--tee` of torchrun has a value, `--tee` of mgpurun has none.
//!
//! So the word behind `--tee` is its value only if it has the form of one. This is decided before the line is parsed,
//! because the parser would take any word for an optional value, also the program.

use std::ffi::{OsStr, OsString};

use clap::{Arg, Command, CommandFactory};

use super::super::args::CommandLine;
use crate::output::StreamMap;

const TEE: &str = "tee";

/// What a word of a command line is, before the program.
pub(super) enum Word {
    /// `--tee` or `-t`.
    Tee,
    /// `-t3`, with its value.
    TeeOf(OsString),
    /// An option whose value is the next word.
    BeforeValue,
    /// An option that has no value, or has it in the same word.
    Whole,
    /// The program, or `--` before it.
    End,
}

/// The words of a command line in which `--tee 3`, `-t 3` and `-t3` are written `--tee=3`.
pub(in super::super) fn join_tee_values(words: Vec<OsString>) -> Vec<OsString> {
    let command = CommandLine::command();
    let mut joined = Vec::with_capacity(words.len());
    let mut rest = words.into_iter().peekable();
    joined.extend(rest.next());
    while let Some(word) = rest.peek() {
        let kind = classify(&command, word);
        if let Word::End = kind {
            break;
        }
        let word = rest.next().unwrap_or_default();
        match kind {
            Word::Tee => joined.push(rest.next_if(|next| is_streams(next)).map_or(word, with_value)),
            Word::TeeOf(value) => joined.push(with_value(value)),
            Word::BeforeValue => {
                joined.push(word);
                joined.extend(rest.next());
            }
            Word::Whole | Word::End => joined.push(word),
        }
    }
    joined.extend(rest);
    joined
}

pub(super) fn classify(command: &Command, word: &OsStr) -> Word {
    let Some(word) = word.to_str() else {
        // Only a value can have such bytes, behind a `=`.
        return if word.as_encoded_bytes().starts_with(b"-") { Word::Whole } else { Word::End };
    };
    let kind = |option: Option<&Arg>| match option {
        Some(option) if option.get_id() == TEE => Word::Tee,
        Some(option) if has_value(option) => Word::BeforeValue,
        _ => Word::Whole,
    };
    if let Some(name) = word.strip_prefix("--") {
        let is_named = |option: &&Arg| {
            let aliases = option.get_all_aliases().unwrap_or_default();
            option.get_long() == Some(name) || aliases.contains(&name)
        };
        return if name.is_empty() { Word::End } else { kind(command.get_arguments().find(is_named)) };
    }
    let Some(letters) = word.strip_prefix('-').filter(|letters| !letters.is_empty()) else {
        return Word::End;
    };
    // Several options may share one word: switches, and at last one that has a value.
    for (index, letter) in letters.char_indices() {
        let option = command.get_arguments().find(|option| option.get_short() == Some(letter));
        let behind = &letters[index + letter.len_utf8()..];
        match (kind(option), behind) {
            (Word::Whole, _) => {}
            (Word::Tee, "") if index == 0 => return Word::Tee,
            (Word::Tee, streams) if index == 0 => {
                return Word::TeeOf(streams.strip_prefix('=').unwrap_or(streams).into());
            }
            (Word::BeforeValue, "") => return Word::BeforeValue,
            _ => return Word::Whole,
        }
    }
    Word::Whole
}

fn has_value(option: &Arg) -> bool {
    option.get_action().takes_values() && !option.is_require_equals_set()
}

pub(super) fn is_streams(word: &OsStr) -> bool {
    word.to_str().is_some_and(|word| word.parse::<StreamMap>().is_ok())
}

fn with_value(value: OsString) -> OsString {
    let mut word = OsString::from("--tee=");
    word.push(value);
    word
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn join(line: &str) -> String {
        let words = join_tee_values(line.split(' ').map(OsString::from).collect());
        words.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_word_of_the_form_of_streams_is_the_value_of_tee() {
        for (line, joined) in [
            ("mgpurun --tee 3 prog", "mgpurun --tee=3 prog"),
            ("mgpurun -t 0:1,1:2 prog -t 3", "mgpurun --tee=0:1,1:2 prog -t 3"),
            ("mgpurun -t3 -n 2 --tee prog", "mgpurun --tee=3 -n 2 --tee prog"),
            ("mgpurun -t=3 prog", "mgpurun --tee=3 prog"),
            ("mgpurun --tee=1 3", "mgpurun --tee=1 3"),
            ("mgpurun --tee -- 3", "mgpurun --tee -- 3"),
            ("mgpurun -- --tee 3", "mgpurun -- --tee 3"),
            ("mgpurun --tee 4 x", "mgpurun --tee 4 x"),
            ("mgpurun --log-dir --tee 3 x", "mgpurun --log-dir --tee 3 x"),
            ("mgpurun --log_dir --tee 3 x", "mgpurun --log_dir --tee 3 x"),
            ("mgpurun --log-dir=d -t 3 x", "mgpurun --log-dir=d --tee=3 x"),
            ("mgpurun -n -t 3 x", "mgpurun -n -t 3 x"),
            ("mgpurun -n2 -t 3 x", "mgpurun -n2 --tee=3 x"),
            ("mgpurun -mt 3 x", "mgpurun -mt 3 x"),
            ("mgpurun --unknown -t 3 x", "mgpurun --unknown --tee=3 x"),
            ("mgpurun -t", "mgpurun -t"),
            ("mgpurun - -t 3", "mgpurun - -t 3"),
        ] {
            assert_eq!(join(line), joined);
        }
    }

    proptest! {
        #[test]
        fn words_behind_the_program_stay_as_they_are(words in prop::collection::vec("[-a-t3:=]{0,4}", 0..8)) {
            let own = ["mgpurun", "-t", "1", "prog"].map(OsString::from);
            let given: Vec<OsString> = own.into_iter().chain(words.iter().map(OsString::from)).collect();
            let joined = join_tee_values(given.clone());
            prop_assert_eq!(&joined[..2], &["mgpurun", "--tee=1"].map(OsString::from));
            prop_assert_eq!(&joined[2..], &given[3..]);
        }

        #[test]
        fn any_words_are_accepted(words in prop::collection::vec("[-a-t3:=]{0,4}", 0..8)) {
            let given: Vec<OsString> = words.iter().map(OsString::from).collect();
            prop_assert!(join_tee_values(given.clone()).len() <= given.len());
        }
    }
}
