//! The cells of a sweep: every number of ranks with every combination of varied options. Pure.

use std::fmt;

/// An option of the program and the values that it takes: `--vary=--placement=shared,host`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Vary {
    /// With its dashes.
    pub(super) flag: String,
    pub(super) values: Values,
}

/// The values of a varied option.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Values {
    /// The option has a value, and these are tried.
    Of(Vec<String>),
    /// The option has no value: it is left out, then given.
    Switch,
}

/// Names of the two values of a [`Values::Switch`].
const SWITCH: [&str; 2] = ["off", "on"];

impl Vary {
    /// The names of its values, in order.
    fn names(&self) -> Vec<String> {
        match &self.values {
            Values::Of(values) => values.clone(),
            Values::Switch => SWITCH.map(str::to_owned).to_vec(),
        }
    }
}

impl std::str::FromStr for Vary {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (flag, values) = match text.split_once('=') {
            Some((flag, values)) => (flag, Values::Of(split_at_commas(values))),
            None => (text, Values::Switch),
        };
        if !flag.starts_with('-') || flag.trim_start_matches('-').is_empty() {
            return Err(format!(
                "`{flag}` is no option of a program; write its dashes too, as in --vary=--batch=64,128"
            ));
        }
        if let Values::Of(values) = &values {
            if values.iter().any(String::is_empty) {
                return Err(format!("a value of {flag} is empty; write --vary={flag}=VALUE,VALUE"));
            }
            if let Some(twice) = first_repeated(values) {
                return Err(format!("{flag} has the value {twice} twice"));
            }
        }
        Ok(Vary { flag: flag.to_owned(), values })
    }
}

/// The parts of `text` between commas; `\,` is a comma within a part.
fn split_at_commas(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            ',' => parts.push(String::new()),
            '\\' if chars.next_if_eq(&',').is_some() => parts.last_mut().expect("never empty").push(','),
            c => parts.last_mut().expect("never empty").push(c),
        }
    }
    parts
}

/// The first element that occurs a second time.
pub(super) fn first_repeated<T: PartialEq>(items: &[T]) -> Option<&T> {
    items.iter().enumerate().find(|(index, item)| items[..*index].contains(item)).map(|(_, item)| item)
}

/// How the work depends on the number of ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Scaling {
    /// The command line is the same for all cells, and so is the total work.
    AsGiven,
    /// The command line is the same for all cells, and is the work of one rank: the total work grows with the ranks.
    Weak,
    /// The total work is the same: the value of this option is divided by the number of ranks.
    Strong(String),
}

impl fmt::Display for Scaling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scaling::AsGiven => f.write_str("the same command line on any number of ranks"),
            Scaling::Weak => f.write_str("weak scaling: the same work for each rank"),
            Scaling::Strong(flag) => write!(f, "strong scaling: {flag} is divided by the number of ranks"),
        }
    }
}

/// A cell of the table: a number of ranks, and a value of every varied option.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cell {
    pub(super) ranks: u32,
    /// In the order of [`Grid::vary`].
    pub(super) values: Vec<String>,
}

/// All cells, and how the command line of each is made.
#[derive(Debug, Clone)]
pub(super) struct Grid {
    /// Ascending.
    pub(super) ranks: Vec<u32>,
    pub(super) vary: Vec<Vary>,
    pub(super) scaling: Scaling,
    /// The program's arguments as the user gave them.
    pub(super) arguments: Vec<String>,
}

impl Grid {
    /// The combinations of values, the last option varying fastest. There is one, which is empty, if nothing varies.
    pub(super) fn combinations(&self) -> Vec<Vec<String>> {
        self.vary.iter().fold(vec![Vec::new()], |combinations, vary| {
            let longer = |values: Vec<String>| {
                vary.names().into_iter().map(move |name| values.iter().cloned().chain([name]).collect())
            };
            combinations.into_iter().flat_map(longer).collect()
        })
    }

    /// All cells, in the order of the table.
    pub(super) fn cells(&self) -> Vec<Cell> {
        let of = |values: Vec<String>| {
            self.ranks.iter().map(move |ranks| Cell { ranks: *ranks, values: values.clone() })
        };
        self.combinations().into_iter().flat_map(of).collect()
    }

    /// The arguments of the program in a cell.
    ///
    /// # Errors
    /// If an option is ambiguous, or the value to be divided is missing or not divisible.
    pub(super) fn arguments_of(&self, cell: &Cell) -> Result<Vec<String>, String> {
        let mut arguments = self.arguments.clone();
        for (vary, value) in self.vary.iter().zip(&cell.values) {
            match vary.values {
                Values::Of(_) => set_option(&mut arguments, &vary.flag, value)?,
                Values::Switch => set_switch(&mut arguments, &vary.flag, value == SWITCH[1]),
            }
        }
        if let Scaling::Strong(flag) = &self.scaling {
            divide_option(&mut arguments, flag, cell.ranks)?;
        }
        Ok(arguments)
    }

    /// The cell in words: `-n 2 --placement=shared`.
    pub(super) fn name(&self, cell: &Cell) -> String {
        let options = self.vary.iter().zip(&cell.values);
        let options = options.map(|(vary, value)| format!(" {}={value}", vary.flag));
        format!("-n {}{}", cell.ranks, options.collect::<String>())
    }
}

/// The place of an option's value: the word, and the byte in it where the value begins.
fn find_value(arguments: &[String], flag: &str) -> Result<Option<(usize, usize)>, String> {
    let place = |(index, word): (usize, &String)| {
        let rest = word.strip_prefix(flag)?;
        let separate = rest.is_empty().then_some((index + 1, 0));
        separate.or_else(|| rest.starts_with('=').then_some((index, flag.len() + 1)))
    };
    let mut places = arguments.iter().enumerate().filter_map(place);
    let first = places.next();
    if places.next().is_some() {
        return Err(format!("{flag} occurs twice in the command line of the program; leave one out"));
    }
    if first.is_some_and(|(index, _)| index == arguments.len()) {
        return Err(format!("{flag} at the end of the command line has no value"));
    }
    Ok(first)
}

/// Replaces the value of an option, or appends the option.
fn set_option(arguments: &mut Vec<String>, flag: &str, value: &str) -> Result<(), String> {
    match find_value(arguments, flag)? {
        Some((word, begin)) => arguments[word].replace_range(begin.., value),
        // A value that begins with a dash would be taken for another option if it were a word of its own.
        None if flag.starts_with("--") => arguments.push(format!("{flag}={value}")),
        None => arguments.extend([flag.to_owned(), value.to_owned()]),
    }
    Ok(())
}

fn set_switch(arguments: &mut Vec<String>, flag: &str, on: bool) {
    if on && !arguments.iter().any(|word| word == flag) {
        arguments.push(flag.to_owned());
    }
    if !on {
        arguments.retain(|word| word != flag);
    }
}

fn divide_option(arguments: &mut [String], flag: &str, ranks: u32) -> Result<(), String> {
    let Some((word, begin)) = find_value(arguments, flag)? else {
        return Err(format!(
            "--strong divides {flag} by the number of ranks, but the command line of the program has no {flag}; add \
             it, with the total over all ranks, or name another option: --strong=FLAG"
        ));
    };
    let value = &arguments[word][begin..];
    let total: u64 = value.parse().map_err(|_| {
        format!("--strong divides {flag} by the number of ranks, but `{value}` is not a whole number")
    })?;
    if total == 0 || !total.is_multiple_of(u64::from(ranks)) {
        return Err(format!(
            "--strong: {flag} {total} cannot be divided by {ranks} ranks; choose a multiple of every number of ranks"
        ));
    }
    let share = (total / u64::from(ranks)).to_string();
    arguments[word].replace_range(begin.., &share);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    fn grid(ranks: &[u32], vary: &[&str], scaling: Scaling, arguments: &str) -> Grid {
        let vary = vary.iter().map(|text| text.parse().unwrap()).collect();
        Grid { ranks: ranks.to_vec(), vary, scaling, arguments: words(arguments) }
    }

    fn strong(flag: &str) -> Scaling {
        Scaling::Strong(flag.to_owned())
    }

    /// The command lines of all cells.
    fn lines(grid: &Grid) -> Vec<String> {
        let line =
            |cell: &Cell| format!("{} | {}", grid.name(cell), grid.arguments_of(cell).unwrap().join(" "));
        grid.cells().iter().map(line).collect()
    }

    #[test]
    fn cells_are_all_combinations() {
        let vary = ["--placement=shared,host", "--overlap"];
        insta::assert_debug_snapshot!(
            lines(&grid(&[1, 2], &vary, strong("--batch"), "--batch=64 --placement x --overlap -v")), @r#"
        [
            "-n 1 --placement=shared --overlap=off | --batch=64 --placement shared -v",
            "-n 2 --placement=shared --overlap=off | --batch=32 --placement shared -v",
            "-n 1 --placement=shared --overlap=on | --batch=64 --placement shared --overlap -v",
            "-n 2 --placement=shared --overlap=on | --batch=32 --placement shared --overlap -v",
            "-n 1 --placement=host --overlap=off | --batch=64 --placement host -v",
            "-n 2 --placement=host --overlap=off | --batch=32 --placement host -v",
            "-n 1 --placement=host --overlap=on | --batch=64 --placement host --overlap -v",
            "-n 2 --placement=host --overlap=on | --batch=32 --placement host --overlap -v",
        ]
        "#);
        assert_eq!(lines(&grid(&[3], &[], Scaling::Weak, "a b")), ["-n 3 | a b"]);
    }

    #[test]
    fn options_that_are_missing_are_appended() {
        let grid = grid(&[2], &["--lr=-1", "-b=6", "--x=a\\,b\\"], strong("-b"), "run");
        assert_eq!(lines(&grid), ["-n 2 --lr=-1 -b=6 --x=a,b\\ | run --lr=-1 -b 3 --x=a,b\\"]);
    }

    #[test]
    fn an_option_is_not_taken_for_a_longer_one() {
        let grid = grid(&[2], &[], strong("--batch"), "--batch-norm 3 --batch 8 --batches=5");
        assert_eq!(lines(&grid), ["-n 2 | --batch-norm 3 --batch 4 --batches=5"]);
    }

    #[test]
    fn values_that_cannot_be_divided_are_refused() {
        for (arguments, text) in [
            ("--lr 1", "no --batch; add it, with the total over all ranks, or name another option"),
            ("--batch", "--batch at the end of the command line has no value"),
            ("--batch=", "`` is not a whole number"),
            ("--batch many", "`many` is not a whole number"),
            ("--batch 0", "cannot be divided by 4 ranks"),
            ("--batch 10", "--batch 10 cannot be divided by 4 ranks; choose a multiple of every number"),
            ("--batch 8 --batch=8", "--batch occurs twice"),
        ] {
            let grid = grid(&[4], &[], strong("--batch"), arguments);
            let error = grid.arguments_of(&grid.cells()[0]).unwrap_err();
            assert!(error.contains(text), "`{text}` should be in: {error}");
        }
    }

    #[test]
    fn options_to_vary_are_parsed() {
        for (text, error) in [
            ("placement=a", "`placement` is no option of a program"),
            ("--=a", "`--` is no option"),
            ("", "`` is no option"),
            ("--a=", "a value of --a is empty"),
            ("--a=1,,2", "a value of --a is empty"),
            ("--a=1,2,1", "--a has the value 1 twice"),
        ] {
            let found = text.parse::<Vary>().unwrap_err();
            assert!(found.contains(error), "`{error}` should be in: {found}");
        }
        assert_eq!("--a=b=c".parse::<Vary>().unwrap().values, Values::Of(vec!["b=c".into()]));
    }
}
