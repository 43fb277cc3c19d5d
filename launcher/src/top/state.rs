//! What is selected, how it is sorted, and what a key changes. Pure.

use super::keys::Key;
use crate::status::gpus::GpuSnapshot;
use crate::status::snapshot::{RankSnapshot, RunSnapshot};

/// What is drawn.
#[derive(Debug)]
pub(super) struct Shown<'a> {
    pub(super) runs: &'a [RunSnapshot],
    pub(super) gpus: &'a [GpuSnapshot],
    /// Lines about the opened rank.
    pub(super) details: Option<Vec<String>>,
    /// The last lines of the selected rank, oldest first.
    pub(super) last_lines: Vec<String>,
}

/// The order of the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Order {
    #[default]
    Rank,
    Communication,
    Late,
    Memory,
    Idle,
}

impl Order {
    const ALL: [Order; 5] = [Order::Rank, Order::Communication, Order::Late, Order::Memory, Order::Idle];

    fn next(self) -> Self {
        let index = Self::ALL.iter().position(|order| *order == self).unwrap_or_default();
        Self::ALL[(index + 1) % Self::ALL.len()]
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Order::Rank => "rank",
            Order::Communication => "comm",
            Order::Late => "late",
            Order::Memory => "memory",
            Order::Idle => "idle",
        }
    }

    /// Largest first, except for ranks.
    fn compare(self, a: &RankSnapshot, b: &RankSnapshot) -> std::cmp::Ordering {
        let by_value = match self {
            Order::Rank => return a.rank.cmp(&b.rank),
            Order::Communication => b.rates.communicating.total_cmp(&a.rates.communicating),
            Order::Late => b.rates.waited_for.total_cmp(&a.rates.waited_for),
            Order::Memory => b.resident_bytes.cmp(&a.resident_bytes),
            Order::Idle => b.idle_s.total_cmp(&a.idle_s),
        };
        by_value.then(a.rank.cmp(&b.rank))
    }
}

/// What a key asks for beyond the view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Command {
    Quit,
    /// End the run of this launcher.
    Stop(u32),
}

/// The state of the view.
#[derive(Debug, Default)]
pub(super) struct State {
    /// The index of the run that is shown.
    pub(super) run: usize,
    /// The selected rank.
    pub(super) rank: u32,
    /// The selected rank is shown in detail.
    pub(super) is_opened: bool,
    pub(super) order: Order,
    pub(super) is_reversed: bool,
    /// The user is asked whether this launcher's run should end.
    pub(super) asks_to_stop: Option<u32>,
    /// The result of the last command.
    pub(super) told: Option<String>,
}

/// How far PageUp and PageDown go.
const PAGE: usize = 10;

impl State {
    /// The rank that is shown in detail.
    pub(super) fn opened(&self) -> Option<u32> {
        self.is_opened.then_some(self.rank)
    }

    /// Adapts to the runs that exist now.
    pub(super) fn settle(&mut self, runs: &[RunSnapshot]) {
        self.run = self.run.min(runs.len().saturating_sub(1));
        let ranks = runs.get(self.run).map_or(0, |run| run.ranks.len() as u32);
        self.rank = self.rank.min(ranks.saturating_sub(1));
    }

    /// The ranks of a run in the chosen order.
    pub(super) fn sorted<'a>(&self, run: &'a RunSnapshot) -> Vec<&'a RankSnapshot> {
        let mut ranks: Vec<&RankSnapshot> = run.ranks.iter().collect();
        ranks.sort_by(|a, b| self.order.compare(a, b));
        if self.is_reversed {
            ranks.reverse();
        }
        ranks
    }

    /// Handles a key.
    pub(super) fn handle(&mut self, key: Key, runs: &[RunSnapshot]) -> Option<Command> {
        self.settle(runs);
        if let Some(launcher) = self.asks_to_stop.take() {
            return matches!(key, Key::Char('y' | 'Y')).then_some(Command::Stop(launcher));
        }
        self.told = None;
        match key {
            Key::Char('q') => return Some(Command::Quit),
            Key::Escape if self.is_opened => self.is_opened = false,
            Key::Escape => return Some(Command::Quit),
            Key::Enter => self.is_opened = !self.is_opened,
            Key::Char('s') => self.order = self.order.next(),
            Key::Char('r') => self.is_reversed = !self.is_reversed,
            Key::Char('x') => self.asks_to_stop = runs.get(self.run).map(|run| run.launcher),
            Key::Tab => {
                self.run = (self.run + 1) % runs.len().max(1);
                self.settle(runs);
            }
            Key::Up | Key::Char('k') => self.select(runs, |place, _| place.saturating_sub(1)),
            Key::Down | Key::Char('j') => self.select(runs, |place, _| place + 1),
            Key::PageUp => self.select(runs, |place, _| place.saturating_sub(PAGE)),
            Key::PageDown => self.select(runs, |place, _| place + PAGE),
            Key::Home => self.select(runs, |_, _| 0),
            Key::End => self.select(runs, |_, last| last),
            Key::Char(_) => {}
        }
        None
    }

    /// Selects the rank at another place of the order.
    fn select(&mut self, runs: &[RunSnapshot], to: impl Fn(usize, usize) -> usize) {
        let Some(run) = runs.get(self.run) else { return };
        let sorted = self.sorted(run);
        let place = sorted.iter().position(|rank| rank.rank == self.rank).unwrap_or_default();
        let last = sorted.len().saturating_sub(1);
        if let Some(rank) = sorted.get(to(place, last).min(last)) {
            self.rank = rank.rank;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::view::tests::run;
    use super::*;

    #[test]
    fn keys_select_sort_and_ask() {
        let (runs, mut state) = ([run(42, 4), run(43, 2)], State::default());
        let mut press = |keys: &[Key]| {
            let done = keys.iter().filter_map(|key| state.handle(*key, &runs)).collect::<Vec<_>>();
            (state.run, state.rank, state.opened(), done)
        };
        assert_eq!(press(&[Key::Down, Key::Char('j'), Key::Enter]), (0, 2, Some(2), vec![]));
        assert_eq!(press(&[Key::End, Key::Down, Key::Escape]), (0, 3, None, vec![]));
        // Sorted by the time in which others wait for a rank: rank 1 comes first.
        assert_eq!(press(&[Key::Char('s'), Key::Char('s'), Key::Home]).1, 1);
        assert_eq!(press(&[Key::Char('r'), Key::End]).1, 1);
        assert_eq!(press(&[Key::Tab]), (1, 1, None, vec![]));
        // Anything but y is no.
        assert_eq!(press(&[Key::Char('x'), Key::Enter, Key::PageUp]).3, []);
        assert_eq!(press(&[Key::Char('x'), Key::Char('y')]).3, [Command::Stop(43)]);
        assert_eq!(press(&[Key::Tab, Key::Escape]).3, [Command::Quit]);
    }

    #[test]
    fn runs_that_end_leave_a_valid_selection() {
        let mut state = State { run: 3, rank: 9, ..State::default() };
        state.settle(&[run(1, 2)]);
        assert_eq!((state.run, state.rank), (0, 1));
        state.settle(&[]);
        for key in [Key::Down, Key::End, Key::Tab, Key::Char('x'), Key::Enter] {
            assert_eq!(state.handle(key, &[]), None);
        }
        assert_eq!((state.run, state.rank), (0, 0));
    }
}
