//! The documentation: links lead somewhere, and command lines are accepted by the programs they name.
//!
//! A line that begins with `$ ` in a `console` block is a command line. Programs of this project parse it for real:
//! `mgpurun` by `--dry-run`, the others with a rendezvous that does not exist, so that a line with a wrong flag or value ends
//! with a usage error (exit code 2), and any other with the failure to join (1). Commands of cargo must be in `.ci`, scripts
//! must exist and know their flags. A block that cannot be checked has `<!-- not run: why -->` before it.
//!
//! A command of `mgpurun` with output below it is run, and must print every line that is shown; numbers may differ.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use mgpu_tests::example_programs;
use mgpu_tests::process::{command, run};

const USAGE_ERROR: Option<i32> = Some(2);
const CANNOT_JOIN: Option<i32> = Some(1);

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the tests are in a folder of the repository")
        .to_owned()
}

/// Every page of documentation.
fn pages() -> Vec<PathBuf> {
    let named = [
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "bench/README.md",
        "examples/README.md",
    ];
    let mut pages: Vec<PathBuf> = named.iter().map(|name| root().join(name)).collect();
    let entries = fs::read_dir(root().join("docs/src")).expect("docs/src can be read");
    pages.extend(
        entries
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|ext| ext == "md")),
    );
    pages.sort();
    pages
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The lines outside fenced blocks, with their numbers from 1 and without inline code.
fn prose(text: &str) -> Vec<(usize, String)> {
    let mut fenced = false;
    let mut lines = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            lines.push((index + 1, line.split('`').step_by(2).collect::<Vec<_>>().join("`")));
        }
    }
    lines
}

/// The anchors of a page's headings, as GitHub and mdBook make them.
fn anchors(text: &str) -> HashSet<String> {
    let mut fenced = false;
    let mut found = HashSet::new();
    for line in text.lines() {
        fenced ^= line.trim_start().starts_with("```");
        let heading = line.trim_start_matches('#');
        if fenced || heading.len() == line.len() || !heading.starts_with(' ') {
            continue;
        }
        let kept = heading.trim().to_lowercase();
        let kept = kept.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        found.insert(kept.map(|c| if c == ' ' { '-' } else { c }).collect());
    }
    found
}

/// The targets of `[text](target)` in a line.
fn targets(line: &str) -> Vec<&str> {
    line.split("](").skip(1).filter_map(|rest| rest.split(')').next()).collect()
}

/// Broken relative links of a page. Links of a page in `book` must stay inside it: the site has nothing else.
fn broken_links(page: &Path, book: &Path) -> Vec<String> {
    let (text, folder) = (read(page), page.parent().expect("a page is in a folder"));
    let mut problems = Vec::new();
    for (number, line) in prose(&text) {
        for target in targets(&line).into_iter().filter(|target| !target.contains("://")) {
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            let path = if file.is_empty() { page.to_owned() } else { folder.join(file) };
            let place = format!("{}:{number}: {target}", page.display());
            match path.canonicalize() {
                Err(_) => problems.push(format!("{place}: there is no such file")),
                Ok(path) if page.starts_with(book) && !path.starts_with(book.canonicalize().unwrap()) => {
                    problems.push(format!("{place}: it is outside the book"));
                }
                Ok(path) if !anchor.is_empty() && !anchors(&read(&path)).contains(anchor) => {
                    problems.push(format!("{place}: there is no such heading"));
                }
                Ok(_) => {}
            }
        }
    }
    problems
}

/// The command lines of a page's `console` blocks, with their line numbers, except in blocks that are marked as not run.
fn command_lines(text: &str) -> Vec<(usize, String)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found: Vec<(usize, String)> = Vec::new();
    let (mut in_console, mut fenced, mut last_prose) = (false, false, "");
    for (index, line) in lines.iter().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
            let why = last_prose.strip_prefix("<!-- not run:").and_then(|rest| rest.strip_suffix("-->"));
            in_console = fenced && line.trim() == "```console" && why.is_none_or(|why| why.trim().is_empty());
        } else if in_console {
            let continues = index > 0 && lines[index - 1].ends_with('\\');
            match (line.strip_prefix("$ "), found.last_mut()) {
                (Some(command), _) => found.push((index + 1, command.trim_end_matches('\\').to_owned())),
                (None, Some((_, command))) if continues => *command += line.trim_end_matches('\\'),
                _ => {}
            }
        } else if !fenced && !line.trim().is_empty() {
            last_prose = line.trim();
        }
    }
    found
}

/// A command line as a shell would split it: one list of words for each command of a chain or pipe. Comments are left out.
fn split(line: &str) -> Vec<Vec<String>> {
    let mut commands = vec![Vec::new()];
    let (mut word, mut quote, mut begun) = (String::new(), None, false);
    for c in line.chars().chain([' ']) {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (Some(_), c) => word.push(c),
            (None, '\'' | '"') => (quote, begun) = (Some(c), true),
            (None, '#') if !begun => break,
            (None, ' ' | '|' | '&' | ';') => {
                if begun {
                    commands.last_mut().expect("there is always one").push(std::mem::take(&mut word));
                    begun = false;
                }
                if c != ' ' {
                    commands.push(Vec::new());
                }
            }
            (None, c) => {
                word.push(c);
                begun = true;
            }
        }
    }
    commands.retain(|words| !words.is_empty());
    commands
}

/// The programs of this project, under their own names.
struct Programs {
    folder: tempfile::TempDir,
    names: Vec<&'static str>,
}

impl Programs {
    fn link() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mgpurun = ("mgpurun", env!("CARGO_BIN_EXE_t-mgpurun"));
        let programs: Vec<_> = std::iter::once(mgpurun).chain(example_programs!()).collect();
        for (name, path) in &programs {
            std::os::unix::fs::symlink(path, folder.path().join(name)).unwrap();
        }
        Programs { folder, names: programs.into_iter().map(|(name, _)| name).collect() }
    }

    /// Runs a program of this project with a rendezvous that does not exist.
    fn run(&self, words: &[String]) -> mgpu_tests::process::Finished {
        self.run_in(words, &[("MGPU_RENDEZVOUS", "nowhere")])
    }

    /// Runs a program of this project, as a shell that finds it in PATH would.
    fn run_in(&self, words: &[String], variables: &[(&str, &str)]) -> mgpu_tests::process::Finished {
        let path = std::env::var("PATH").unwrap_or_default();
        let mut program = command(self.folder.path().join(&words[0]));
        program.args(&words[1..]).current_dir(self.folder.path()).envs(variables.iter().copied());
        run(program.env("PATH", format!("{}:{path}", self.folder.path().display())))
    }

    /// What is wrong with a command, if anything.
    fn problem(&self, words: &[String]) -> Option<String> {
        let is_variable = |word: &&String| {
            let name = word.split_once('=').map(|(name, _)| name);
            name.is_some_and(|name| name.chars().all(|c| c.is_ascii_uppercase() || c == '_'))
        };
        let mut words: Vec<String> = words.iter().skip_while(is_variable).cloned().collect();
        let first = words.first()?.trim_start_matches("target/release/").to_owned();
        words[0] = first.clone();
        match first.as_str() {
            "mgpurun"
                if matches!(words.get(1).map(String::as_str), Some("doctor" | "ps" | "stop" | "top")) =>
            {
                words.push("--help".to_owned());
                let finished = self.run(&words);
                (finished.code != Some(0)).then_some(finished.stderr)
            }
            "mgpurun" if words.get(1).is_some_and(|word| word == "sweep") => {
                // Also on a machine with fewer devices than the page has ranks. It prints a launch for each cell.
                words.splice(2..2, ["--dry-run", "--oversubscribe"].map(str::to_owned));
                let finished = self.run(&words);
                if finished.code != Some(0) {
                    return Some(finished.stderr);
                }
                self.problem(split(finished.stdout.lines().last()?).first()?)
            }
            "mgpurun" => {
                if !words.contains(&"--dry-run".to_owned()) {
                    words.insert(1, "--dry-run".to_owned());
                }
                let finished = self.run(&words);
                if finished.code != Some(0) {
                    return Some(finished.stderr);
                }
                // The last line is what the last rank would run.
                let ranks_run = split(finished.stdout.lines().last()?);
                let mut rank = ranks_run.first()?.clone();
                rank[0] = Path::new(&rank[0]).file_name()?.to_str()?.to_owned();
                self.names.contains(&rank[0].as_str()).then(|| self.problem(&rank))?
            }
            "gpu_check" => {
                words.push("--help".to_owned());
                let finished = self.run(&words);
                (finished.code != Some(0)).then_some(finished.stderr)
            }
            name if self.names.contains(&name) => {
                let finished = self.run(&words);
                assert!(
                    finished.code == CANNOT_JOIN || finished.code == USAGE_ERROR,
                    "{words:?}: {finished:#?}"
                );
                (finished.code == USAGE_ERROR).then_some(finished.stderr)
            }
            "cargo" => {
                let checks = read(&root().join(".ci/run")) + &read(&root().join(".ci/full"));
                (!checks.contains(&words.join(" "))).then(|| "it is not in .ci/run or .ci/full".to_owned())
            }
            "python3" => script_problem(&words[1..]),
            name if name.starts_with("bench/") => script_problem(&words),
            "echo" => None,
            _ => Some("cannot check this command: put <!-- not run: why --> before its block".to_owned()),
        }
    }
}

/// What is wrong with a call of a script. The script must exist, and its text, or that of the Python file beside it, must
/// contain the flags.
fn script_problem(words: &[String]) -> Option<String> {
    let path = root().join(&words[0]);
    let Ok(metadata) = fs::metadata(&path) else { return Some("there is no such script".to_owned()) };
    if path.extension().is_some_and(|extension| extension == "sh")
        && metadata.permissions().mode() & 0o111 == 0
    {
        return Some("it cannot be executed".to_owned());
    }
    let text = read(&path) + &fs::read_to_string(path.with_extension("py")).unwrap_or_default();
    let unknown = words[1..].iter().find(|word| word.starts_with("--") && !text.contains(word.as_str()));
    unknown.map(|flag| format!("it does not know {flag}"))
}

/// Command lines of a page that are not accepted.
fn refused_commands(page: &Path, programs: &Programs) -> Vec<String> {
    let mut problems = Vec::new();
    for (number, line) in command_lines(&read(page)) {
        for words in split(&line) {
            if let Some(problem) = programs.problem(&words) {
                problems.push(format!("{}:{number}: {}: {problem}", page.display(), words.join(" ")));
            }
        }
    }
    problems
}

/// A line without what differs from run to run: numbers, widths of columns, and whether a rank that waits is awake.
fn shape(line: &str) -> String {
    let words = line.split_whitespace().map(|word| match word {
        "running" => "sleeping",
        _ if word.contains(|c: char| c.is_ascii_digit()) => "#",
        _ => word,
    });
    words.collect::<Vec<_>>().join(" ")
}

/// Commands of mgpurun with the output that a page shows below them. A line that ends in `…` shows the beginning only.
fn samples(text: &str) -> Vec<(String, Vec<String>)> {
    let lines: Vec<&str> = text.lines().collect();
    let shown = |number: usize| {
        lines[number..].iter().take_while(|line| !line.starts_with("$ ") && !line.starts_with("```"))
    };
    let with_output = command_lines(text).into_iter().map(|(number, line)| {
        // The kernel's names for waits differ between versions.
        let shown = shown(number).filter(|line| **line != "…" && !line.contains("system call"));
        (line, shown.map(|line| (*line).to_owned()).collect::<Vec<_>>())
    });
    with_output.filter(|(line, shown)| line.contains("mgpurun") && !shown.is_empty()).collect()
}

#[test]
fn samples_of_output_are_what_is_printed() {
    let programs = Programs::link();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let texts: Vec<String> = pages().iter().map(|page| read(page)).collect();
    let samples: Vec<_> = texts.iter().flat_map(|text| samples(text)).collect();
    assert!(samples.len() >= 4, "{samples:#?}");
    for (line, shown) in samples {
        if line.contains("--bind") && cores != 2 {
            eprintln!("skipped: {line}: its sample is of a machine with two cores, this one has {cores}");
            continue;
        }
        let mut words = split(&line).pop().expect("a command");
        words[0] = words[0].trim_start_matches("target/release/").to_owned();
        if words.iter().any(|word| word == "train_mnist") {
            // A short training prints the same lines.
            words.extend(["--steps", "20"].map(str::to_owned));
        }
        let finished = programs.run_in(&words, &[("MGPU_THREADS", "1")]);
        let printed: Vec<String> =
            finished.stdout.lines().chain(finished.stderr.lines()).map(shape).collect();
        for expected in &shown {
            let found = match shape(expected).strip_suffix('…') {
                Some(beginning) => printed.iter().any(|line| line.starts_with(beginning.trim_end())),
                None => printed.contains(&shape(expected)),
            };
            assert!(
                found,
                "`{line}` does not print\n  {expected}\nbut\n{}{}",
                finished.stdout, finished.stderr
            );
        }
    }
}

#[test]
fn relative_links_resolve() {
    let book = root().join("docs/src");
    let problems: Vec<String> = pages().iter().flat_map(|page| broken_links(page, &book)).collect();
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn the_summary_lists_every_page_of_the_book() {
    let folder = root().join("docs/src");
    let summary = read(&folder.join("SUMMARY.md"));
    let listed: HashSet<PathBuf> =
        summary.lines().flat_map(targets).map(|target| folder.join(target)).collect();
    let missing: Vec<PathBuf> = pages()
        .into_iter()
        .filter(|page| page.starts_with(&folder) && !page.ends_with("SUMMARY.md") && !listed.contains(page))
        .collect();
    assert!(missing.is_empty(), "not in SUMMARY.md: {missing:?}");
}

#[test]
fn command_lines_are_accepted() {
    let programs = Programs::link();
    let problems: Vec<String> = pages().iter().flat_map(|page| refused_commands(page, &programs)).collect();
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn the_readme_has_commands_of_every_kind() {
    let commands: Vec<Vec<String>> =
        command_lines(&read(&root().join("README.md"))).iter().flat_map(|(_, line)| split(line)).collect();
    for first in ["cargo", "target/release/mgpurun", "mgpurun", "train_mnist"] {
        assert!(commands.iter().any(|words| words[0] == first), "no line with {first} in {commands:?}");
    }
}

#[test]
fn figures_are_those_of_the_result_files() {
    if command("python3").arg("--version").output().is_err() {
        println!("skipped: no python3");
        return;
    }
    run(command(root().join("bench/readme.py")).arg("--check")).expect(0, &[]);
}

/// The model of an all-reduce over hosts: its formulas against schedules that are played out, and its fit.
#[test]
fn the_cost_model_agrees_with_schedules() {
    if command("python3").arg("--version").output().is_err() {
        println!("skipped: no python3");
        return;
    }
    run(&mut command(root().join("bench/cost_model_test.py"))).expect(0, &[]);
}

/// The benchmark of placements runs each of them, counts the bytes of its formula, and has a table of each figure.
#[test]
fn placements_are_measured_and_summarised() {
    if command("python3").arg("--version").output().is_err() {
        println!("skipped: no python3");
        return;
    }
    let programs = Programs::link();
    let result = programs.folder.path().join("placements.json");
    let mut measure = command(root().join("bench/placements.py"));
    measure.args(["lenet5", "--quick", "--ranks", "2", "--out"]).arg(&result);
    measure.env("BIN", programs.folder.path()).env_remove("MGPU_DATA");
    run(&mut measure).expect(0, &["round 1: lenet5, ranks: 2, layers: "]);
    let made: serde_json::Value = serde_json::from_str(&read(&result)).unwrap();
    let figures = made["figures"].as_array().unwrap();
    let placements: Vec<_> = figures.iter().map(|figure| figure["placement"].as_str().unwrap()).collect();
    assert_eq!(placements, ["replicated", "shared", "host", "layers"]);
    for figure in figures {
        let bytes = &figure["bytes"][0];
        if let Some(measured) = bytes["measured"].as_f64() {
            let ratio = measured / bytes["formula"].as_f64().unwrap();
            assert!((0.95..1.05).contains(&ratio), "{figure:#}");
        }
    }
    let mut summarise = command(root().join("bench/summarise_placements.py"));
    let tables =
        run(summarise.arg(&result)).expect(0, &["speed", "traffic", "memory", "shares"]).stdout.clone();
    // The cells of a network on two ranks, and those that were not measured.
    assert!(tables.contains("`lenet5` | 2 | "), "{tables}");
    assert!(tables.contains("`host`, 1 rank | not measured"), "{tables}");
}

/// The page "What to do next on GPUs": passes by the share of the step that they lose against the bound, each with the
/// kernel that training selects and the best other candidate.
#[test]
fn what_to_do_next_is_sorted_by_the_time_lost() {
    if command("python3").arg("--version").output().is_err() {
        println!("skipped: no python3");
        return;
    }
    let fixture = root().join("tests/fixtures/gpu-next.json");
    let finished = run(command(root().join("bench/gpu_next.py")).arg(fixture));
    finished.expect(0, &["Bounds: 800 TFLOP/s in bf16, 3,000 GB/s"]);
    let rows: Vec<_> = finished.stdout.lines().filter(|line| line.starts_with("| `")).collect();
    let expected = [
        // Steps, the farthest from their bounds first.
        "| `lenet5` | 1,024 | 400 | 15 | 26.7 |",
        "| `conv6` | 1,024 | 5,000 | 3,162 | 1.6 |",
        // Passes in bf16: 822 of 5,000 µs; 2 × 42; 3 of 400.
        "| `conv6` | 1,024 | conv 128 5x5 of 128x28x28 | forward | cuDNN 1 (else built in: 3,000 µs) | 2,000 | 822 | 23.6% |",
        "| `conv6` | 1,024 | conv 128 3x3 of 128x7x7, 2 × | backward weights | cuDNN 1 (else cuDNN 1 bf16: 40 µs) | 60 | 18 | 1.7% |",
        "| `lenet5` | 1,024 | dense 10 of 84 | forward | cuBLASLt 1 (else built in: 4 µs) | 3 | 0 | 0.7% |",
        // Stages of the profile, without the time of their passes: 2,120 - 2,000 µs. No pass of the backward one is timed.
        "| `conv6` | 1,024 | pool, backward | 250 | 0 | 5.0% |",
        "| `conv6` | 1,024 | optimizer | 150 | 0 | 3.0% |",
        "| `conv6` | 1,024 | conv 128 5x5 same of 128x28x28, relu: beyond its passes, forward | 120 | 0 | 2.4% |",
        "| `conv6` | 1,024 | pool, forward | 100 | 0 | 2.0% |",
    ];
    assert_eq!(rows, expected);
}

#[test]
fn wrong_links_and_commands_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("page.md");
    let text = "# A page\n\n[here](#a-page) [gone](gone.md) [part](#nothing) `[code](gone.md)` [web](https://example.org)\n\n\
        ```console\n$ mgpurun -n 2 train_mnist --steps 5   # a comment\n$ mgpurun -n 2 --nonsense train_mnist\n\
        $ mgpurun -n 2 train_mnist --steps five\n$ train_mnist --resume && echo done\n$ bench/train.sh --wrong\nno command\n\
        $ cargo frobnicate\n$ srun -n 2 train_mnist\n$ golden_check --conv direct \\\n    --precision f64 FILE\n\
        $ mgpurun sweep -n 1,64 --strong -- train_mnist --batch 64\n$ mgpurun sweep -n 1,2 --strong -- train_mnist\n\
        $ mgpurun sweep --vary=--steps=five -- train_mnist\n```\n\n\
        <!-- not run: no such launcher here -->\n\n```console\n$ srun -n 2 train_mnist --nonsense\n```\n";
    fs::write(&page, text).unwrap();
    let problems = |found: Vec<String>| -> Vec<String> {
        found
            .iter()
            .map(|problem| problem.strip_prefix(&format!("{}:", page.display())).unwrap().to_owned())
            .collect()
    };
    let links = problems(broken_links(&page, Path::new("/nonexistent")));
    assert_eq!(links, ["3: gone.md: there is no such file", "3: #nothing: there is no such heading"]);
    let commands = problems(refused_commands(&page, &Programs::link()));
    let expected = [
        ("7: ", "unexpected argument '--nonsense'"),
        ("8: ", "invalid value 'five'"),
        ("9: ", "--checkpoint-dir"),
        ("10: ", "it does not know --wrong"),
        ("12: ", "not in .ci/run or .ci/full"),
        ("13: ", "<!-- not run: why -->"),
        ("14: ", "invalid value 'f64'"),
        ("17: ", "--strong divides --batch"),
        ("18: ", "invalid value 'five'"),
    ];
    assert_eq!(commands.len(), expected.len(), "{commands:#?}");
    for (problem, (line, text)) in commands.iter().zip(expected) {
        assert!(problem.starts_with(line) && problem.contains(text), "no {line}{text} in {problem}");
    }
}

/// A file that is neither a program in `tests/Cargo.toml` nor a module of one would not be tested, in silence.
#[test]
fn every_suite_is_part_of_a_program() {
    let suites = root().join("tests/tests");
    let manifest = read(&root().join("tests/Cargo.toml"));
    let is_program = |name: &str| manifest.contains(&format!("path = \"tests/{name}.rs\""));
    let entries = fs::read_dir(&suites).expect("tests/tests can be read");
    let files =
        entries.map(|entry| entry.expect("an entry of a folder").path()).filter(|path| path.is_file());
    let names: Vec<String> =
        files.map(|path| path.file_stem().expect("a file name").to_string_lossy().into_owned()).collect();
    let programs = names.iter().filter(|name| is_program(name));
    let modules: String = programs.map(|name| read(&suites.join(format!("{name}.rs")))).collect();
    let is_module = |name: &str| modules.lines().any(|line| line == format!("mod {name};"));
    let untested: Vec<_> = names.iter().filter(|name| !is_program(name) && !is_module(name)).collect();
    assert!(untested.is_empty() && modules.contains("mod supervision;"), "in no program: {untested:?}");
}

#[test]
fn lines_are_split_as_a_shell_would() {
    let words = |line: &str| -> Vec<Vec<String>> { split(line) };
    assert_eq!(words("a 'b c' d\"e f\"g  # h"), [["a", "b c", "de fg"]]);
    assert_eq!(words("a && b|c #"), [["a"], ["b"], ["c"]]);
    assert_eq!(words("a x#y ''"), [["a", "x#y", ""]]);
    assert_eq!(words("# only a comment"), Vec::<Vec<String>>::new());
}
