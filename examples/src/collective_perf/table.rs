//! Results of other programs, and the table that compares them with ours.

use std::fmt::Write;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use serde::Deserialize;

use super::collective::Collective;
use super::{Failure, Line};

/// One result of another program.
#[derive(Debug, Deserialize)]
struct PeerLine {
    #[serde(rename = "impl")]
    implementation: String,
    ranks: u32,
    bytes: usize,
    us_p50: f64,
    #[serde(default = "all_reduce")]
    collective: Collective,
}

fn all_reduce() -> Collective {
    Collective::AllReduce
}

/// Results of other programs.
#[derive(Debug)]
pub(super) struct Peers {
    lines: Vec<PeerLine>,
}

impl Peers {
    /// Reads a file of JSON lines. Ignores empty lines and unknown keys.
    pub(super) fn read(path: &Path) -> Result<Self, Failure> {
        let unreadable = |error| Failure::PeerFile { path: path.into(), problem: format!("{error}") };
        Self::parse(path, BufReader::new(File::open(path).map_err(unreadable)?))
    }

    fn parse(path: &Path, text: impl BufRead) -> Result<Self, Failure> {
        let mut lines = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let wrong = |problem| Failure::PeerLine { path: path.into(), line: index + 1, problem };
            let line = line.map_err(|error| wrong(error.to_string()))?;
            if line.trim().is_empty() {
                continue;
            }
            let line: PeerLine =
                serde_json::from_str(&line).map_err(|error| wrong(format!("not a measurement: {error}")))?;
            if line.us_p50 <= 0.0 {
                return Err(wrong(format!("us_p50 is {}, not a time", line.us_p50)));
            }
            lines.push(line);
        }
        Ok(Peers { lines })
    }

    /// A table of our times, those of each peer and their ratio, by size. A ratio above 1 means that the peer is
    /// slower.
    pub(super) fn table(&self, collective: Collective, ranks: u32, ours: &[Line]) -> String {
        let comparable = |line: &&PeerLine| line.collective == collective && line.ranks == ranks;
        let lines: Vec<&PeerLine> = self.lines.iter().filter(comparable).collect();
        let plural = if ranks == 1 { "" } else { "s" };
        let heading = format!("{collective} on {ranks} rank{plural}");
        if lines.is_empty() {
            return format!("no peer has results for {heading}\n");
        }
        let mut peers: Vec<&str> = Vec::new();
        for line in &lines {
            if !peers.contains(&line.implementation.as_str()) {
                peers.push(&line.implementation);
            }
        }
        let mut table =
            format!("{heading}: microseconds, and the ratio to ours\n{:>12} {:>12}", "bytes", "ours");
        for peer in &peers {
            let _ = write!(table, " {peer:>12}   ratio");
        }
        table.push('\n');
        for our in ours {
            let _ = write!(table, "{:>12} {:>12.2}", our.bytes, our.us_p50);
            for peer in &peers {
                let same = |line: &&&PeerLine| line.implementation == *peer && line.bytes == our.bytes;
                let times = lines.iter().filter(same).map(|line| line.us_p50).collect();
                let _ = match median(times) {
                    Some(time) => write!(table, " {time:>12.2} {:>7.2}", time / our.us_p50),
                    None => write!(table, " {:>12} {:>7}", "-", "-"),
                };
            }
            table.push('\n');
        }
        table
    }
}

/// The upper median: a peer may have several results for one size.
fn median(mut times: Vec<f64>) -> Option<f64> {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::super::args::Buffers;
    use super::*;

    fn parse(text: &str) -> Result<Peers, String> {
        Peers::parse(Path::new("peers.jsonl"), text.as_bytes()).map_err(|failure| failure.to_string())
    }

    fn ours(bytes: usize, us_p50: f64) -> Line {
        Line {
            implementation: "mgpu",
            ranks: 2,
            bytes,
            us_p50,
            us_min: us_p50,
            busbw_gbps: 0.0,
            algo: "auto",
            dtype: "f32",
            op: "sum",
            checked: true,
            collective: Collective::AllReduce,
            backend: "cpu",
            device: None,
            buffers: Buffers::Arena,
            bound_us: None,
            scale_gbps: None,
        }
    }

    #[test]
    fn the_table_lists_peers_beside_our_times() {
        let peers = parse(concat!(
            r#"{"impl":"mpich","ranks":2,"bytes":4,"us_p50":1.5,"us_min":1}"#,
            "\n\n",
            r#"{"impl":"gloo","ranks":2,"bytes":16,"us_p50":50,"collective":"all_reduce"}"#,
            "\n",
            r#"{"impl":"mpich","ranks":4,"bytes":16,"us_p50":7.25}"#,
            "\n",
            r#"{"impl":"openmpi","ranks":2,"bytes":16,"us_p50":7.25,"collective":"broadcast"}"#,
            "\n",
            r#"{"impl":"mpich","ranks":2,"bytes":4,"us_p50":2.5}"#,
            "\n",
            r#"{"impl":"mpich","ranks":2,"bytes":4,"us_p50":2}"#,
        ))
        .unwrap();
        let table = peers.table(Collective::AllReduce, 2, &[ours(4, 0.5), ours(16, 1.0)]);
        let expected = [
            "all_reduce on 2 ranks: microseconds, and the ratio to ours",
            "       bytes         ours        mpich   ratio         gloo   ratio",
            "           4         0.50         2.00    4.00            -       -",
            "          16         1.00            -       -        50.00   50.00",
        ];
        assert_eq!(table.lines().collect::<Vec<_>>(), expected);
        let none = peers.table(Collective::Reduce, 1, &[]);
        assert_eq!(none, "no peer has results for reduce on 1 rank\n");
    }

    #[test]
    fn parse_errors_name_the_line() {
        let good = r#"{"impl":"a","ranks":2,"bytes":4,"us_p50":1}"#;
        let error_of = |line: &str| parse(&format!("{good}\n\n{line}")).unwrap_err();
        for (line, problem) in [
            ("mpiexec: warning", "not a measurement: expected value"),
            (r#"{"impl":"a","ranks":2,"bytes":4}"#, "missing field `us_p50`"),
            (r#"{"impl":"a","ranks":-2,"bytes":4,"us_p50":1}"#, "invalid value"),
            (r#"{"impl":"a","ranks":2,"bytes":4,"us_p50":1,"collective":"sort"}"#, "unknown variant `sort`"),
            (r#"{"impl":"a","ranks":2,"bytes":4,"us_p50":0}"#, "us_p50 is 0, not a time"),
        ] {
            let error = error_of(line);
            assert!(error.starts_with("peers.jsonl:3: ") && error.contains(problem), "{error}");
        }
        assert!(
            Peers::parse(Path::new("p"), &b"\xff\n"[..]).is_err_and(|e| e.to_string().starts_with("p:1: "))
        );
        let missing = Peers::read(Path::new("/nonexistent/peers.jsonl")).unwrap_err().to_string();
        assert!(missing.starts_with("/nonexistent/peers.jsonl: No such file"), "{missing}");
    }
}
