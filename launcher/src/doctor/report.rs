//! Formats findings as text in columns: a mark, a name and a text. As JSON they have the same entries.

use std::fmt;
use std::path::Path;

use serde::Serialize;

/// Width of a line, unless a single word is longer.
const WIDTH: usize = 96;
/// Spaces in front of an item, and the width of its mark.
const MARGIN: usize = 2;
const MARK: usize = 9;

/// The kind of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Mark {
    /// Usable.
    Ok,
    /// Worth knowing; does not prevent a run.
    Note,
    /// Missing.
    Missing,
    /// It was tested, and failed.
    Failed,
}

impl Mark {
    fn word(self) -> &'static str {
        match self {
            Mark::Ok => "ok",
            Mark::Note => "note",
            Mark::Missing => "missing",
            Mark::Failed => "failed",
        }
    }
}

/// One finding.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Item {
    pub(super) mark: Mark,
    pub(super) name: String,
    pub(super) text: String,
    /// The path of a library, if it was found, and its version, if the name of the file or of its package says it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) file: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) version: Option<String>,
}

impl Item {
    pub(super) fn new(mark: Mark, name: impl Into<String>, text: impl Into<String>) -> Self {
        Item { mark, name: name.into(), text: text.into(), file: None, version: None }
    }

    /// A usable library; `version` if its file or its package says it.
    pub(super) fn library(name: &str, file: &Path, version: Option<String>) -> Self {
        let file = file.display().to_string();
        let text = match &version {
            Some(version) => format!("{file}, version {version}"),
            None => file.clone(),
        };
        Item { file: Some(file), version, ..Item::new(Mark::Ok, name, text) }
    }
}

/// Findings on one topic.
#[derive(Debug, Serialize)]
pub(super) struct Section {
    pub(super) title: &'static str,
    pub(super) items: Vec<Item>,
}

/// The report.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) sections: Vec<Section>,
    pub(super) verdict: String,
    /// The titles of sections of which the text only counts what is missing. If there are any, the verdict comes first.
    #[serde(skip)]
    pub(super) folded: Vec<&'static str>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let items = self.sections.iter().flat_map(|section| &section.items);
        let names = items.map(|item| item.name.chars().count()).max().unwrap_or(0) + 2;
        if !self.folded.is_empty() {
            writeln!(f, "{}\n", fold(&self.verdict, 0))?;
        }
        for section in &self.sections {
            if self.folded.contains(&section.title) {
                let missing = section.items.iter().filter(|item| item.mark == Mark::Missing).count();
                writeln!(f, "{}: {missing} missing (--all lists them)", section.title)?;
                continue;
            }
            writeln!(f, "{}", section.title)?;
            for item in &section.items {
                let start = MARGIN + MARK + names;
                let text = fold(&item.text, start);
                writeln!(f, "{:MARGIN$}{:MARK$}{:names$}{text}", "", item.mark.word(), item.name)?;
            }
            writeln!(f)?;
        }
        match self.folded.is_empty() {
            true => writeln!(f, "{}", fold(&self.verdict, 0)),
            false => Ok(()),
        }
    }
}

/// Wraps text that begins in column `start`.
fn fold(text: &str, start: usize) -> String {
    let (mut folded, mut column) = (String::new(), start);
    // Files may contain anything: control characters are removed.
    let words = text.split_whitespace();
    for word in words.map(|word| word.chars().filter(|c| !c.is_control()).collect::<String>()) {
        let length = word.chars().count();
        if folded.is_empty() {
            column += length;
        } else if column + 1 + length > WIDTH {
            folded += "\n";
            folded += &" ".repeat(start);
            column = start + length;
        } else {
            folded += " ";
            column += 1 + length;
        }
        folded += &word;
    }
    folded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_wrapped_and_indented() {
        let words = "word ".repeat(40);
        let folded = fold(&words, 20);
        assert!(folded.lines().skip(1).all(|line| line.starts_with(&" ".repeat(20)) && line.len() <= WIDTH));
        assert_eq!(folded.split_whitespace().count(), 40);
        let long = "x".repeat(200);
        assert_eq!(fold(&format!("a {long} b"), 2), format!("a\n  {long}\n  b"));
        assert_eq!(fold("\u{1b}[31m", 0), "[31m");
    }
}
