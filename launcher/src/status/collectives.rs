//! The last collectives of the ranks, from the flight recorder: where their sequences part, and a list for each rank.
//!
//! All ranks of a communicator make the same calls in the same order. So a rank that hangs, or has called something
//! else, is found by comparing the sequences: it has not begun a collective in which others are, or has another
//! operation under the same number. Pure, but for reading the page.

use std::collections::BTreeMap;
use std::time::Duration;

use mgpu_control::progress::{
    Operation, ProgressPage, RECORDED, RecordedCollective, RecordedCommunicator, now,
};

use super::bytes;
use crate::ranks::list as rank_list;

/// Most communicators that are compared in a report.
const MAX_COMMUNICATORS: usize = 8;

/// The resolution of times that are not exact.
const COARSE: Duration = Duration::from_millis(10);

/// The recorded collectives of some ranks.
#[derive(Debug)]
pub(crate) struct Histories {
    ranks: Vec<(u32, Vec<RecordedCollective>)>,
    /// Number of ranks whose collectives are recorded on other hosts.
    elsewhere: usize,
}

/// The operations of one kind of one communicator, which all its ranks number in the same way. Launches of graphs are
/// counted apart.
type Sequence = (RecordedCommunicator, bool);

/// How far a rank has come in a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Position {
    sequence: u32,
    has_ended: bool,
}

impl Histories {
    /// Reads the rings of all ranks.
    pub(crate) fn of(page: &ProgressPage) -> Self {
        let (here, elsewhere): (Vec<u32>, Vec<u32>) =
            (0..page.world_size()).partition(|rank| page.host(*rank).is_none());
        let ranks = here.into_iter().map(|rank| (rank, page.collectives(rank))).collect();
        Histories { ranks, elsewhere: elsewhere.len() }
    }

    /// Where the sequences of the ranks part: lines for each communicator in which they do, none if they agree.
    pub(crate) fn divergence(&self, now: Duration) -> Vec<String> {
        let mut sequences: BTreeMap<Sequence, Vec<(u32, Vec<&RecordedCollective>)>> = BTreeMap::new();
        for (rank, history) in &self.ranks {
            for record in history.iter().filter(|record| record.is_collective()) {
                let key = (record.communicator, record.operation == Operation::LaunchGraph);
                let ranks = sequences.entry(key).or_default();
                match ranks.last_mut().filter(|(last, _)| last == rank) {
                    Some((_, records)) => records.push(record),
                    None => ranks.push((*rank, vec![record])),
                }
            }
        }
        let parted = sequences.iter().filter_map(|(key @ (communicator, _), ranks)| {
            let absent = self.absent(*key, ranks);
            let positions = laggards(ranks, !absent.is_empty(), now);
            let lines = [mismatch(ranks), absent, positions].concat();
            (!lines.is_empty()).then(|| {
                let lines = lines.into_iter().map(|line| format!("  {line}"));
                [format!("the ranks part in {}:", title(*communicator))].into_iter().chain(lines)
            })
        });
        let mut lines: Vec<String> = parted.take(MAX_COMMUNICATORS).flatten().collect();
        if !lines.is_empty() && self.elsewhere > 0 {
            lines.push(self.note_of_other_hosts());
        }
        lines
    }

    /// The ranks that have begun no collective of a communicator that all ranks have. Nothing is known of a rank that has
    /// forgotten older collectives.
    fn absent(&self, key: Sequence, ranks: &[(u32, Vec<&RecordedCollective>)]) -> Vec<String> {
        let (RecordedCommunicator::World(_), false) = key else { return Vec::new() };
        let is_complete =
            |history: &[RecordedCollective]| history.first().is_none_or(|first| first.number == 1);
        let is_present = |rank: u32| ranks.iter().any(|(other, _)| *other == rank);
        let absent = self.ranks.iter().filter(|(rank, history)| !is_present(*rank) && is_complete(history));
        let absent: Vec<u32> = absent.map(|(rank, _)| *rank).collect();
        match &absent[..] {
            [] => Vec::new(),
            [_] => vec![format!("{} has begun none of its collectives", names(&absent))],
            _ => vec![format!("{} have begun none of its collectives", names(&absent))],
        }
    }

    fn note_of_other_hosts(&self) -> String {
        let ranks = if self.elsewhere == 1 { "rank" } else { "ranks" };
        format!(
            "  the collectives of {} {ranks} on other hosts are recorded there: `mgpurun ps --collectives` on those hosts \
             shows them",
            self.elsewhere
        )
    }

    /// The last `count` collectives of each rank, oldest first.
    pub(crate) fn list(&self, page: &ProgressPage, count: usize) -> String {
        let now = now();
        let mut text: String = self.divergence(now).iter().map(|line| format!("{line}\n")).collect();
        for (rank, history) in &self.ranks {
            let shown = &history[history.len().saturating_sub(count)..];
            let total = page.recorded(*rank);
            match shown.len() {
                0 => text += &format!("rank {rank}: no collective\n"),
                1 => text += &format!("rank {rank}: the last of {total} collectives\n"),
                shown => text += &format!("rank {rank}: the last {shown} of {total} collectives\n"),
            }
            text += &table(shown, now);
        }
        if self.elsewhere > 0 {
            text += &format!("{}\n", self.note_of_other_hosts().trim_start());
        }
        text
    }

    /// The collectives of a rank as lines, the newest first.
    pub(crate) fn newest_first(&self, rank: u32) -> Vec<String> {
        let history = self.ranks.iter().find(|(other, _)| *other == rank).map(|(_, history)| history);
        let newest_first: Vec<RecordedCollective> = history.into_iter().flatten().rev().copied().collect();
        table(&newest_first, now()).lines().map(str::to_owned).collect()
    }
}

/// The largest useful argument of [`Histories::list`].
pub(crate) const MOST: usize = RECORDED;

/// The first number under which ranks have recorded different calls.
fn mismatch(ranks: &[(u32, Vec<&RecordedCollective>)]) -> Vec<String> {
    let mut calls: BTreeMap<u32, Vec<(u32, &RecordedCollective)>> = BTreeMap::new();
    for (rank, records) in ranks {
        for record in records {
            calls.entry(record.sequence).or_default().push((*rank, record));
        }
    }
    let differ = |a: &RecordedCollective, b: &RecordedCollective| {
        a.operation != b.operation || has_equal_sizes(a.operation) && a.bytes != b.bytes
    };
    let first = calls.into_values().find(|calls| calls.iter().any(|(_, call)| differ(call, calls[0].1)));
    let Some(mut rest) = first else { return Vec::new() };
    let mut said = Vec::new();
    while let Some((_, call)) = rest.first().copied() {
        let (same, others): (Vec<_>, Vec<_>) = rest.into_iter().partition(|(_, other)| !differ(call, other));
        let same: Vec<u32> = same.into_iter().map(|(rank, _)| rank).collect();
        said.push(format!("{} called {}", names(&same), describe(call)));
        rest = others;
    }
    vec![format!("different calls: {}", said.join("; "))]
}

/// Whether all ranks pass the same number of bytes.
fn has_equal_sizes(operation: Operation) -> bool {
    !matches!(operation, Operation::AllToAllV | Operation::Connect)
}

/// Who is ahead and who is behind; nothing if nobody is, unless `others_are_behind`. Ranks that have left the newest collective while others are in it are not behind.
fn laggards(
    ranks: &[(u32, Vec<&RecordedCollective>)],
    others_are_behind: bool,
    now: Duration,
) -> Vec<String> {
    let mut groups: BTreeMap<Position, Vec<(u32, &RecordedCollective)>> = BTreeMap::new();
    for (rank, records) in ranks {
        if let Some(last) = records.last() {
            let position = Position { sequence: last.sequence, has_ended: last.end.is_some() };
            groups.entry(position).or_default().push((*rank, last));
        }
    }
    let newest = groups.keys().next_back().map_or(0, |newest| newest.sequence);
    // A rank is behind if another one has begun a collective that it has not begun.
    if !others_are_behind && groups.keys().all(|position| position.sequence == newest) {
        return Vec::new();
    }
    let line = |(position, group): (&Position, &Vec<(u32, &RecordedCollective)>)| {
        let members: Vec<u32> = group.iter().map(|(rank, _)| *rank).collect();
        let (names, plural) = (names(&members), members.len() > 1);
        let (last, is) = (group[0].1, if plural { "are" } else { "is" });
        let latest = |time: &dyn Fn(&RecordedCollective) -> Duration| {
            let times = group.iter().map(|(_, record)| now.saturating_sub(time(record)));
            times.min().unwrap_or_default().as_secs_f64()
        };
        let (since, ended) =
            (latest(&|record| record.begin), latest(&|record| record.end.unwrap_or(record.begin)));
        let begun = if last.on_device { "enqueued" } else { "ended" };
        let behind = match position.sequence < newest {
            true => {
                format!(", and {} not begun #{}", if plural { "have" } else { "has" }, position.sequence + 1)
            }
            false => String::new(),
        };
        match position.has_ended {
            true => format!("{names} {is} after {}, {begun} {ended:.1} s ago{behind}", describe(last)),
            false => format!("{names} {is} in {} since {since:.1} s{behind}", describe(last)),
        }
    };
    groups.iter().map(line).collect()
}

/// "rank 3", "ranks 0, 2-5".
fn names(ranks: &[u32]) -> String {
    let word = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{word} {}", rank_list(ranks))
}

fn title(communicator: RecordedCommunicator) -> String {
    match communicator {
        RecordedCommunicator::World(number) => format!("communicator {number}"),
        RecordedCommunicator::Group { number, first } => format!("group {number} (with rank {first})"),
    }
}

/// "all_reduce #2042 (4.2 MB, tag 3)".
fn describe(record: &RecordedCollective) -> String {
    let RecordedCollective { operation, sequence, bytes: size, tag, .. } = record;
    let details: Vec<String> = [(*size > 0).then(|| bytes(*size)), tag.map(|tag| format!("tag {tag}"))]
        .into_iter()
        .flatten()
        .collect();
    let details = if details.is_empty() { String::new() } else { format!(" ({})", details.join(", ")) };
    format!("{} #{sequence}{details}", operation.name())
}

fn table(records: &[RecordedCollective], now: Duration) -> String {
    let row = |record: &RecordedCollective| {
        let RecordedCollective { communicator, operation, sequence, bytes: size, tag, begin, end, .. } =
            record;
        let communicator = match communicator {
            RecordedCommunicator::World(number) => number.to_string(),
            RecordedCommunicator::Group { number, first } => format!("group {number}.{first}"),
        };
        let ago = format!("{:.1} s ago", now.saturating_sub(*begin).as_secs_f64());
        let took = match end.map(|end| end.saturating_sub(*begin)) {
            None => "running".into(),
            Some(_) if record.on_device => "enqueued".into(),
            Some(took) if !record.is_exact && took < COARSE => format!("< {} ms", COARSE.as_millis()),
            Some(took) => format!("{:.3} ms", took.as_secs_f64() * 1e3),
        };
        let tag = tag.map_or_else(|| "-".into(), |tag| tag.to_string());
        [format!("#{sequence}"), communicator, operation.name().to_owned(), bytes(*size), tag, ago, took]
    };
    if records.is_empty() {
        return String::new();
    }
    let titles = ["", "communicator", "operation", "bytes", "tag", "began", "took"].map(str::to_owned);
    let rows: Vec<[String; 7]> = [titles].into_iter().chain(records.iter().map(row)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or_default();
    let widths: [usize; 7] = std::array::from_fn(width);
    let line = |row: &[String; 7]| {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
        format!("  {}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(100);

    fn record(operation: Operation, sequence: u32, size: u64, end: Option<u64>) -> RecordedCollective {
        RecordedCollective {
            number: sequence.into(),
            communicator: RecordedCommunicator::World(1),
            operation,
            sequence,
            bytes: size,
            tag: (operation == Operation::AllReduce).then_some(3),
            on_device: false,
            begin: Duration::from_secs(90),
            end: end.map(Duration::from_secs),
            is_exact: true,
        }
    }

    fn histories(ranks: Vec<Vec<RecordedCollective>>) -> Histories {
        Histories { ranks: (0..).zip(ranks).collect(), elsewhere: 0 }
    }

    #[test]
    fn a_rank_that_has_not_begun_a_collective_is_named() {
        let gathered = record(Operation::AllGather, 26, 64, Some(91));
        let reducing = record(Operation::AllReduce, 27, 4_200_000, None);
        let all = histories(vec![
            vec![gathered, reducing],
            vec![gathered],
            vec![gathered, reducing],
            vec![gathered, reducing],
        ]);
        assert_eq!(
            all.divergence(NOW),
            [
                "the ranks part in communicator 1:",
                "  rank 1 is after all_gather #26 (64 B), ended 9.0 s ago, and has not begun #27",
                "  ranks 0,2-3 are in all_reduce #27 (4.2 MB, tag 3) since 10.0 s",
            ]
        );
        let partial = Histories { elsewhere: 2, ..all };
        assert!(partial.divergence(NOW)[3].contains("2 ranks on other hosts"));
    }

    #[test]
    fn a_rank_without_any_collective_is_named() {
        let reducing = record(Operation::AllReduce, 1, 8, None);
        let all = histories(vec![vec![reducing], vec![], vec![reducing], vec![]]);
        assert_eq!(
            all.divergence(NOW),
            [
                "the ranks part in communicator 1:",
                "  ranks 1,3 have begun none of its collectives",
                "  ranks 0,2 are in all_reduce #1 (8 B, tag 3) since 10.0 s"
            ]
        );
    }

    #[test]
    fn different_calls_under_one_number_are_named() {
        let (reduce, smaller) =
            (record(Operation::AllReduce, 5, 400, None), record(Operation::AllReduce, 5, 40, None));
        let barrier = record(Operation::Barrier, 5, 0, None);
        let all = histories(vec![vec![reduce], vec![barrier], vec![reduce], vec![smaller]]);
        assert_eq!(
            all.divergence(NOW),
            [
                "the ranks part in communicator 1:",
                "  different calls: ranks 0,2 called all_reduce #5 (400 B, tag 3); rank 1 called barrier #5; rank 3 \
                 called all_reduce #5 (40 B, tag 3)",
            ]
        );
        // Each rank passes its own number of bytes.
        let exchange = |bytes| vec![record(Operation::AllToAllV, 5, bytes, None)];
        assert!(histories(vec![exchange(1), exchange(2)]).divergence(NOW).is_empty());
    }

    #[test]
    fn ranks_that_agree_part_nowhere() {
        let (ended, running) =
            (record(Operation::AllReduce, 5, 400, Some(95)), record(Operation::AllReduce, 5, 400, None));
        assert!(histories(vec![vec![ended], vec![running]]).divergence(NOW).is_empty());
        // Groups of one split are different communicators, and so are launches and messages.
        let in_group = |first, sequence| RecordedCollective {
            communicator: RecordedCommunicator::Group { number: 1, first },
            ..record(Operation::AllReduce, sequence, 400, None)
        };
        // One that has forgotten its first collectives may have been in any communicator.
        let later = histories(vec![vec![ended], vec![in_group(0, 900)]]);
        assert!(later.divergence(NOW).is_empty());
        let launch = record(Operation::LaunchGraph, 900, 0, Some(95));
        let message = record(Operation::Send, 77, 400, None);
        let all = histories(vec![vec![in_group(0, 1), launch], vec![in_group(1, 9), launch, message]]);
        assert!(all.divergence(NOW).is_empty());
    }

    #[test]
    fn the_list_shows_the_last_collectives() {
        let coarse = RecordedCollective {
            is_exact: false,
            communicator: RecordedCommunicator::Group { number: 2, first: 4 },
            ..record(Operation::Barrier, 1, 0, Some(90))
        };
        let on_device =
            RecordedCollective { on_device: true, ..record(Operation::AllReduce, 2, 4096, Some(91)) };
        let rows = [coarse, on_device, record(Operation::AllReduce, 3, 4_200_000, Some(92))];
        let text = table(&[rows.as_slice(), &[record(Operation::Broadcast, 4, 8, None)]].concat(), NOW);
        insta::assert_snapshot!(text);
    }
}
