//! The last lines of every rank in a file without a name, for `mgpurun top`, which finds it among the launcher's
//! descriptors.
//!
//! A file and not a mapping: it is written by ordinary system calls, a few times a second at most for each rank, however
//! much the rank writes. A reader may see the beginning of one version and the end of another; it is a text for people.

use std::collections::{BTreeSet, VecDeque};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::resource::{Resource, getrlimit};

/// Name of the file in `/proc/PID/fd`.
const NAME: &str = "mgpu-last-lines";

/// Distinguishes such a file of this version.
const MAGIC: u32 = 0x6d67_7401;

/// Room for each rank: the length of the text, and the text.
const SLOT: usize = 2048;

/// The header: magic number, the first rank of the world, the number of ranks.
const HEADER: usize = 12;

/// A rank's lines are written at most so often.
const INTERVAL: Duration = Duration::from_millis(250);

/// The writer.
pub(super) struct Tails {
    file: File,
    written: Vec<Option<Instant>>,
    /// Ranks with lines that are not written yet.
    waiting: BTreeSet<u32>,
}

impl Tails {
    /// For these ranks; `None` if the kernel has no such files: nobody depends on it.
    pub(super) fn create(first: u32, ranks: u32) -> Option<Self> {
        // A write beyond the limit on the size of files would kill a process that has not blocked SIGXFSZ.
        let (limit, _) = getrlimit(Resource::RLIMIT_FSIZE).ok()?;
        if limit < offset(ranks) {
            return None;
        }
        let file: OwnedFd = memfd_create(NAME, MFdFlags::MFD_CLOEXEC).ok()?;
        let mut tails = Tails { file: file.into(), written: Vec::new(), waiting: BTreeSet::new() };
        tails.set_ranks(first, ranks);
        Some(tails)
    }

    /// Begins again, for other ranks.
    pub(super) fn set_ranks(&mut self, first: u32, ranks: u32) {
        self.waiting.clear();
        self.written = vec![None; ranks as usize];
        let header = [MAGIC, first, ranks].map(u32::to_le_bytes).concat();
        // Whatever fails: the last lines are shown less completely.
        let _ = self.file.set_len(0);
        let _ = self.file.write_all_at(&header, 0);
    }

    /// The lines of the rank with this index have changed.
    pub(super) fn note(&mut self, rank: u32, last: &VecDeque<Vec<u8>>, now: Instant) {
        let Some(written) = self.written.get_mut(rank as usize) else { return };
        if written.is_some_and(|at| now.duration_since(at) < INTERVAL) {
            self.waiting.insert(rank);
            return;
        }
        *written = Some(now);
        self.waiting.remove(&rank);
        let slot = slot(last);
        let _ = self.file.write_all_at(&slot, offset(rank));
    }

    /// When lines that wait have to be written.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let waiting = self.waiting.iter().filter_map(|rank| self.written[*rank as usize]);
        waiting.map(|at| at + INTERVAL).min()
    }

    /// The ranks whose lines are due.
    pub(super) fn due(&self, now: Instant) -> Vec<u32> {
        let is_due = |rank: &u32| self.written[*rank as usize].is_none_or(|at| at + INTERVAL <= now);
        self.waiting.iter().copied().filter(is_due).collect()
    }
}

fn offset(rank: u32) -> u64 {
    HEADER as u64 + u64::from(rank) * SLOT as u64
}

/// Length and text: the newest lines, as many as fit.
fn slot(last: &VecDeque<Vec<u8>>) -> Vec<u8> {
    let (mut lines, mut room) = (Vec::new(), SLOT - size_of::<u32>());
    for line in last.iter().rev() {
        let line = &line[..line.len().min(room)];
        lines.push(line);
        room -= line.len();
        if room == 0 {
            break;
        }
        room -= 1;
    }
    lines.reverse();
    let text = lines.join(&b'\n');
    let text = &text[..text.len().min(SLOT - size_of::<u32>())];
    [&(text.len() as u32).to_le_bytes()[..], text].concat()
}

/// The last lines of the ranks of a launcher.
#[derive(Debug)]
pub(crate) struct TailReader {
    file: File,
}

impl TailReader {
    /// Whether a descriptor with this target in `/proc/PID/fd` may be such a file.
    pub(crate) fn is_named(target: &str) -> bool {
        target.trim_end_matches(" (deleted)").strip_prefix("/memfd:") == Some(NAME)
    }

    pub(crate) fn new(file: File) -> Self {
        TailReader { file }
    }

    /// The last lines of a rank of the world, oldest first; empty if they are not known.
    pub(crate) fn lines(&self, rank: u32) -> Vec<String> {
        self.read(rank).map_or_else(Vec::new, |text| text.lines().map(str::to_owned).collect())
    }

    fn read(&self, rank: u32) -> Option<String> {
        let mut header = [0; HEADER];
        self.file.read_exact_at(&mut header, 0).ok()?;
        let number = |index: usize| {
            header[index * 4..].first_chunk().map(|bytes| u32::from_le_bytes(*bytes)).unwrap_or_default()
        };
        let index = rank.checked_sub(number(1)).filter(|index| *index < number(2))?;
        if number(0) != MAGIC {
            return None;
        }
        let mut slot = vec![0; SLOT];
        let mut read = 0;
        // The last slot may be shorter.
        while let Ok(count @ 1..) = self.file.read_at(&mut slot[read..], offset(index) + read as u64) {
            read += count;
        }
        let length = u32::from_le_bytes(*slot.first_chunk()?) as usize;
        let text = slot.get(4..4 + length.min(SLOT - 4))?;
        Some(String::from_utf8_lossy(text).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last(lines: &[&str]) -> VecDeque<Vec<u8>> {
        lines.iter().map(|line| line.as_bytes().to_vec()).collect()
    }

    #[test]
    fn the_last_lines_of_each_rank_are_read_elsewhere() {
        let mut tails = Tails::create(4, 3).unwrap();
        let reader = TailReader::new(tails.file.try_clone().unwrap());
        let start = Instant::now();
        assert_eq!(reader.lines(4), [""; 0]);
        tails.note(1, &last(&["a", "", "b"]), start);
        tails.note(2, &last(&["é"]), start);
        assert_eq!(
            (reader.lines(5), reader.lines(6)),
            (vec!["a".into(), String::new(), "b".into()], vec!["é".into()])
        );
        // The next lines wait a little.
        tails.note(1, &last(&["c"]), start + INTERVAL / 2);
        assert_eq!((reader.lines(5).len(), tails.next_deadline()), (3, Some(start + INTERVAL)));
        assert_eq!((tails.due(start), tails.due(start + INTERVAL)), (vec![], vec![1]));
        tails.note(1, &last(&["c"]), start + INTERVAL);
        assert_eq!((reader.lines(5), tails.next_deadline()), (vec!["c".to_owned()], None));
        for rank in [0, 3, 7, u32::MAX] {
            assert_eq!(reader.lines(rank), [""; 0]);
        }
        tails.set_ranks(0, 1);
        assert_eq!((reader.lines(5), reader.lines(0)), (vec![], vec![]));
        tails.note(7, &last(&["x"]), start);
    }

    #[test]
    fn long_lines_are_cut_and_old_ones_left_out() {
        let long = "x".repeat(3 * SLOT);
        for lines in [vec![long.as_str()], vec!["old", &long[..SLOT - 4]], vec![&long[..1500]; 10]] {
            let slot = slot(&last(&lines));
            assert!(slot.len() <= SLOT, "{}", slot.len());
            assert!(!slot[4..].starts_with(b"old"));
        }
        assert_eq!(slot(&last(&["a", "b"]))[4..], *b"a\nb");
        assert_eq!(slot(&last(&[])), [0; 4]);
    }

    #[test]
    fn other_files_have_no_lines() {
        assert_eq!(TailReader::new(File::open("/proc/self/status").unwrap()).lines(0), [""; 0]);
        assert!(TailReader::is_named("/memfd:mgpu-last-lines (deleted)"));
        assert!(!TailReader::is_named("/tmp/mgpu-last-lines"));
    }
}
