//! Splits the command line into jobs, at every `:` that a program follows.
//!
//! A program's own arguments may contain a lone `:`, so it only separates jobs if what follows can be started: options of
//! ranks, if any, and then the name of a program that exists. `\:` stands for an argument `:`, and after `--` every word
//! is an argument.

use std::ffi::{OsStr, OsString};

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{CommandFactory, FromArgMatches, Parser};

use super::args::{CommandLine, JobArgs, RankArgs};

/// A job of the command line.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) ranks: RankArgs,
    /// The program and its arguments.
    pub(super) command: Vec<OsString>,
}

/// The jobs of a command line.
#[derive(Debug)]
pub(super) struct Jobs {
    pub(super) jobs: Vec<Job>,
    /// Messages about words that may have been meant otherwise.
    pub(super) notices: Vec<String>,
}

/// What a `:` is, by the words behind it.
enum Colon {
    /// It begins this job. The words after the program are arguments, if the flag is set.
    Separator(Job, bool),
    /// It is an argument, with a message for the user if it may have been meant otherwise.
    Argument(Option<String>),
}

/// Splits `command`, the words of the command line `words` from the first program on. `check_program` fails, with the
/// reason, if a name is not that of a program for ranks with these options.
///
/// # Errors
/// If there is no program before the first `:`, or an option of the whole launch is behind one.
pub(super) fn split(
    first: RankArgs,
    command: Vec<OsString>,
    words: &[OsString],
    check_program: impl Fn(&RankArgs, &OsStr) -> Result<(), String>,
) -> Result<Jobs, clap::Error> {
    if command.first().is_some_and(|program| program == ":") {
        let text = "there is no program before the first `:`";
        return Err(CommandLine::command().error(ErrorKind::MissingRequiredArgument, text));
    }
    let mut is_literal = follows_dashes(words, &command);
    let mut notices = Vec::new();
    let mut jobs = Vec::new();
    let mut job = Job { ranks: first, command: Vec::new() };
    let mut rest: Vec<OsString> = command;
    while !rest.is_empty() {
        let mut behind = None;
        let mut words = std::mem::take(&mut rest).into_iter();
        while let Some(word) = words.next() {
            // The program itself is the first word.
            if is_literal || job.command.is_empty() {
                job.command.push(word);
            } else if word == ":" {
                match interpret(words.as_slice(), &check_program)? {
                    Colon::Separator(next, literal) => {
                        behind = Some((next, literal));
                        break;
                    }
                    Colon::Argument(notice) => {
                        notices.extend(notice);
                        job.command.push(word);
                    }
                }
            } else if word == r"\:" {
                job.command.push(":".into());
            } else {
                is_literal = word == "--";
                job.command.push(word);
            }
        }
        if let Some((next, literal)) = behind {
            rest = next.command;
            is_literal = literal;
            jobs.push(std::mem::replace(&mut job, Job { ranks: next.ranks, command: Vec::new() }));
        }
    }
    jobs.push(job);
    Ok(Jobs { jobs, notices })
}

/// True if `command`, the end of `words`, stands behind `--`.
fn follows_dashes(words: &[OsString], command: &[OsString]) -> bool {
    let before = words.len().checked_sub(command.len() + 1).and_then(|index| words.get(index));
    before.is_some_and(|word| word == "--")
}

/// Decides what a `:` before these words is.
fn interpret(
    words: &[OsString],
    check_program: &impl Fn(&RankArgs, &OsStr) -> Result<(), String>,
) -> Result<Colon, clap::Error> {
    let line = || [OsString::from("mgpurun")].into_iter().chain(words.iter().cloned());
    let has_options = words.first().is_some_and(|word| word.as_encoded_bytes().starts_with(b"-"));
    let doubt = |why: &str| {
        let words: Vec<_> = words.iter().take(3).map(|word| word.to_string_lossy()).collect();
        let text = format!(
            "the `:` before `{}` is passed to the program as an argument, since {why}",
            words.join(" ")
        );
        has_options.then_some(text)
    };
    match JobArgs::try_parse_from(line()) {
        Ok(JobArgs { ranks, command }) => {
            let name = command.first().map(OsString::as_os_str).unwrap_or_default();
            Ok(match check_program(&ranks, name) {
                Ok(()) => {
                    let literal = follows_dashes(words, &command);
                    Colon::Separator(Job { ranks, command }, literal)
                }
                Err(why) => Colon::Argument(doubt(&why)),
            })
        }
        Err(error) if error.kind() == ErrorKind::UnknownArgument => {
            match launch_option(line(), check_program) {
                Some(option) => {
                    let text = format!(
                        "{option} concerns the whole launch: write it before the first program, not behind a `:` (`\\:` passes a colon to the program)"
                    );
                    Err(CommandLine::command().error(ErrorKind::ArgumentConflict, text))
                }
                None => Ok(Colon::Argument(None)),
            }
        }
        Err(error) => {
            let text = error.to_string();
            let why = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
            Ok(Colon::Argument(doubt(why)))
        }
    }
}

/// The first option of a launch, if these words are options and a program that exists.
fn launch_option(
    words: impl Iterator<Item = OsString>,
    check_program: &impl Fn(&RankArgs, &OsStr) -> Result<(), String>,
) -> Option<String> {
    let matches = CommandLine::command().try_get_matches_from(words).ok()?;
    let line = CommandLine::from_arg_matches(&matches).ok()?;
    check_program(&line.ranks, line.command.first()?).ok()?;
    let of_ranks = JobArgs::command();
    let is_given = |id: &str| matches.value_source(id) == Some(ValueSource::CommandLine);
    let of_launch = CommandLine::command();
    let mut given = of_launch.get_arguments().filter(|option| {
        let id = option.get_id();
        is_given(id.as_str()) && of_ranks.get_arguments().all(|other| other.get_id() != id)
    });
    given.find_map(|option| Some(format!("--{}", option.get_long()?)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::plan::Ranks;

    /// Ranks and words of a job.
    type Words = (Ranks, Vec<String>);

    /// The jobs of a command line on a machine with the programs `a`, `b` and `c`, and the messages about it.
    fn jobs(line: &[&str]) -> Result<(Vec<Words>, Vec<String>), clap::Error> {
        let words: Vec<OsString> = [&["mgpurun"], line].concat().into_iter().map(OsString::from).collect();
        let CommandLine { ranks, command, .. } = CommandLine::try_parse_from(words.clone())?;
        let check = |_: &RankArgs, name: &OsStr| match ["a", "b", "c"].iter().any(|program| name == *program)
        {
            true => Ok(()),
            false => Err(format!("there is no program `{}`", name.display())),
        };
        let Jobs { jobs, notices } = split(ranks, command, &words, check)?;
        let text = |words: Vec<OsString>| words.into_iter().map(|word| word.into_string().unwrap()).collect();
        Ok((
            jobs.into_iter().map(|job| (job.ranks.ranks.unwrap_or(Ranks::Auto), text(job.command))).collect(),
            notices,
        ))
    }

    fn commands(line: &str) -> Vec<String> {
        let line: Vec<&str> = line.split(' ').collect();
        let (jobs, _) = jobs(&line).unwrap();
        jobs.into_iter().map(|(_, words)| words.join(" ")).collect()
    }

    #[test]
    fn a_colon_before_a_program_begins_a_job() {
        let (split, notices) =
            jobs(&["-n", "2", "a", "x", ":", "-n", "3", "--bind", "core", "b", ":", "c", "-n", "9"]).unwrap();
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        assert_eq!(
            split,
            [
                (Ranks::Count(2), words(&["a", "x"])),
                (Ranks::Count(3), words(&["b"])),
                (Ranks::Auto, words(&["c", "-n", "9"])),
            ]
        );
        assert_eq!(notices, [] as [String; 0]);
    }

    #[test]
    fn other_colons_are_arguments() {
        for (line, expected) in [
            ("a :", &["a :"][..]),
            ("a x : y", &["a x : y"]),
            ("a : : b", &["a :", "b"]),
            ("a x:b : -n 2 d", &["a x:b : -n 2 d"]),
            (r"a \: b : b \: \:", &["a : b", "b : :"]),
            ("-- a : b", &["a : b"]),
            (r"-- a \: b", &[r"a \: b"]),
            ("a -- : b", &["a -- : b"]),
            ("a : -- b : c", &["a", "b : c"]),
            ("a : -x b", &["a : -x b"]),
            ("a : --help", &["a : --help"]),
            ("--log-dir : a : b", &["a", "b"]),
        ] {
            assert_eq!(commands(line), expected, "{line}");
        }
    }

    #[test]
    fn colons_that_may_have_been_meant_otherwise_are_reported() {
        for (line, text) in [
            (
                "a : -n 2 trian --x",
                Some(
                    "before `-n 2 trian` is passed to the program as an argument, since there is no program `trian`",
                ),
            ),
            ("a : -n two b", Some("since invalid value 'two' for '--ranks <N|auto>'")),
            ("a : -n 2", Some("since the following required arguments were not provided")),
            ("a : y", None),
            ("a : -x y", None),
        ] {
            let (_, notices) = jobs(&line.split(' ').collect::<Vec<_>>()).unwrap();
            match text {
                Some(text) => assert!(notices.len() == 1 && notices[0].contains(text), "{line}: {notices:?}"),
                None => assert_eq!(notices, [] as [String; 0], "{line}"),
            }
        }
    }

    #[test]
    fn options_of_the_launch_stand_before_the_first_program() {
        for (line, text) in [
            ("a : -n 2 --timeout 5 b", "--timeout concerns the whole launch"),
            ("a : --tee --log-dir x b", "--log-dir concerns the whole launch"),
            (": b", "there is no program before the first `:`"),
            ("-n 2 : b", "there is no program before the first `:`"),
        ] {
            let error = jobs(&line.split(' ').collect::<Vec<_>>()).unwrap_err();
            assert!(error.to_string().contains(text), "{line}: {error}");
            assert_eq!(error.exit_code(), 2);
        }
    }

    proptest! {
        #[test]
        fn no_word_is_lost(words in prop::collection::vec(prop::sample::select(vec!["a", "b", "x", ":", "-n", "2", "--"]), 0..12)) {
            let line = [&["a"], &words[..]].concat();
            let Ok((jobs, _)) = jobs(&line) else { return Err(TestCaseError::fail("a line that begins with a program")) };
            // Joined again, the jobs are the line without the options of the later ones.
            let joined: Vec<String> = jobs.iter().map(|(_, words)| words.join(" ")).collect();
            let is_within = |wanted: &str| {
                let mut line = line.iter();
                wanted.split(' ').all(|word| line.any(|other| *other == word))
            };
            prop_assert!(is_within(&joined.join(" : ")), "{joined:?}");
            prop_assert!(jobs.iter().all(|(_, words)| ["a", "b"].contains(&words[0].as_str())), "{joined:?}");
        }

        #[test]
        fn escaped_colons_and_words_after_dashes_are_arguments(words in prop::collection::vec("[abx:]{1,2}", 0..12)) {
            let escaped: Vec<String> = words.iter().map(|word| if word == ":" { r"\:".into() } else { word.clone() }).collect();
            let line: Vec<&str> = std::iter::once("a").chain(escaped.iter().map(String::as_str)).collect();
            let expected = [vec!["a".to_owned()], words.clone()].concat();
            prop_assert_eq!(&jobs(&line).unwrap().0[0].1, &expected);
            let line: Vec<&str> = ["--", "a"].into_iter().chain(words.iter().map(String::as_str)).collect();
            prop_assert_eq!(&jobs(&line).unwrap().0[0].1, &expected);
        }
    }
}
