//! What NVML tells about the GPUs of this machine, and which ranks compute on them.
//!
//! A GPU that has failed may keep the driver busy for seconds or for ever. So a thread reads, and publishes its last
//! readings; nobody waits for it. It is never joined.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nvml::{GpuReading, Nvml};
use serde::Serialize;

use super::snapshot::RunSnapshot;

/// Pause between two readings.
const INTERVAL: Duration = Duration::from_secs(1);

/// Older readings are not shown: the driver hangs.
const MAX_AGE: Duration = Duration::from_secs(10);

/// A GPU at one moment. Values that NVML does not tell are `None`.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct GpuSnapshot {
    /// Its number in the order of PCI addresses.
    pub(crate) index: usize,
    pub(crate) uuid: String,
    pub(crate) name: String,
    /// Share of the last time, up to a second, in which kernels ran: from 0 to 1.
    pub(crate) utilization: Option<f64>,
    pub(crate) used_bytes: Option<u64>,
    pub(crate) total_bytes: Option<u64>,
    pub(crate) temperature_c: Option<u32>,
    /// The ranks that compute on it.
    pub(crate) ranks: Vec<u32>,
}

/// A GPU as NVML has described it, and the processes that compute on it.
type Described = (GpuSnapshot, Vec<u32>);

/// The last readings of all GPUs, and when they were complete.
type Published = Mutex<Option<(Instant, Arc<[Described]>)>>;

/// The GPUs of this machine, if it has NVML. The thread begins to read when they are first asked for, and ends after the
/// drop.
#[derive(Default)]
pub(crate) struct Gpus {
    reader: Option<Reader>,
}

impl Gpus {
    /// The GPUs on which ranks of these runs compute, as last read; all of them if that is not known. None before the first
    /// reading, and while the driver hangs.
    pub(crate) fn of_ranks(&mut self, runs: &[RunSnapshot]) -> Vec<GpuSnapshot> {
        let reader = self.reader.get_or_insert_with(|| {
            Reader::start(INTERVAL, || {
                let nvml = Nvml::open().ok()?;
                let uuids = nvml.uuids().ok()?;
                Some(move || read(&nvml, &uuids))
            })
        });
        with_ranks(&reader.last(Instant::now()), runs)
    }
}

/// A thread that reads again and again, until this is dropped.
struct Reader {
    last: Arc<Published>,
    /// Its end tells the thread to end.
    _alive: Sender<()>,
}

impl Reader {
    /// Starts the thread. It ends at once if `open` returns nothing.
    fn start<R: FnMut() -> Vec<Described>>(
        interval: Duration,
        open: impl FnOnce() -> Option<R> + Send + 'static,
    ) -> Self {
        let (alive, watched) = channel();
        let last = Arc::new(Published::default());
        let published = Arc::clone(&last);
        // If the thread cannot be started, no GPU is known.
        let _ = std::thread::Builder::new().name("gpus".into()).spawn(move || {
            if let Some(mut read) = open() {
                repeat(&watched, interval, || {
                    let readings = read().into();
                    *published.lock().unwrap_or_else(PoisonError::into_inner) =
                        Some((Instant::now(), readings));
                });
            }
        });
        Reader { last, _alive: alive }
    }

    /// The last readings, unless they are too old.
    fn last(&self, now: Instant) -> Arc<[Described]> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match &*last {
            Some((read, readings)) if now.saturating_duration_since(*read) <= MAX_AGE => Arc::clone(readings),
            _ => Arc::default(),
        }
    }
}

/// Calls `act` with a pause of this length after each call, until the sender of `alive` is gone.
fn repeat(alive: &Receiver<()>, pause: Duration, mut act: impl FnMut()) {
    loop {
        act();
        if alive.recv_timeout(pause) == Err(RecvTimeoutError::Disconnected) {
            return;
        }
    }
}

fn read(nvml: &Nvml, uuids: &[String]) -> Vec<Described> {
    let describe = |(index, uuid): (usize, &String)| {
        let GpuReading { name, utilization_percent, memory, temperature_c } = nvml.read(uuid).ok()?;
        let gpu = GpuSnapshot {
            index,
            uuid: uuid.clone(),
            name,
            utilization: utilization_percent.map(|percent| f64::from(percent) / 100.0),
            used_bytes: memory.map(|(used, _)| used),
            total_bytes: memory.map(|(_, total)| total),
            temperature_c,
            ranks: Vec::new(),
        };
        Some((gpu, nvml.processes(uuid).unwrap_or_default()))
    };
    uuids.iter().enumerate().filter_map(describe).collect()
}

/// The GPUs with the ranks that compute on them: only those that have some, if any has.
fn with_ranks(described: &[Described], runs: &[RunSnapshot]) -> Vec<GpuSnapshot> {
    let with_ranks = |(gpu, processes): &Described| {
        let ranks = runs.iter().flat_map(|run| &run.ranks);
        let ranks = ranks.filter(|rank| rank.host.is_none() && processes.contains(&rank.pid));
        GpuSnapshot { ranks: ranks.map(|rank| rank.rank).collect(), ..gpu.clone() }
    };
    let gpus: Vec<GpuSnapshot> = described.iter().map(with_ranks).collect();
    match gpus.iter().any(|gpu| !gpu.ranks.is_empty()) {
        true => gpus.into_iter().filter(|gpu| !gpu.ranks.is_empty()).collect(),
        false => gpus,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use mgpu_control::progress::ProgressPage;

    use super::*;
    use crate::status::totals::Totals;

    fn described(index: usize) -> Described {
        let gpu = GpuSnapshot {
            index,
            uuid: format!("GPU-{index}"),
            name: "a GPU".into(),
            utilization: None,
            used_bytes: None,
            total_bytes: None,
            temperature_c: None,
            ranks: Vec::new(),
        };
        (gpu, vec![100 + index as u32])
    }

    #[test]
    fn a_driver_that_hangs_stops_nobody_else() {
        // Each reading waits for a word, as in a driver that hangs.
        let (driver, answers) = sync_channel::<usize>(0);
        let reader = Reader::start(Duration::ZERO, move || {
            Some(move || (0..answers.recv().unwrap_or_default()).map(described).collect())
        });
        let count = |at| reader.last(at).len();
        assert_eq!(count(Instant::now()), 0);
        for gpus in [2, 1] {
            driver.send(gpus).unwrap();
            while count(Instant::now()) != gpus {
                std::thread::yield_now();
            }
        }
        // It hangs: the readings become too old.
        assert_eq!(count(Instant::now() + MAX_AGE * 2), 0);
        let published = Arc::downgrade(&reader.last);
        drop(reader);
        drop(driver);
        // The thread ends.
        while published.strong_count() > 0 {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_machine_without_a_driver_has_no_gpus() {
        let reader = Reader::start(Duration::ZERO, || None::<fn() -> Vec<Described>>);
        while Arc::strong_count(&reader.last) > 1 {
            std::thread::yield_now();
        }
        assert!(reader.last(Instant::now()).is_empty());
    }

    #[test]
    fn gpus_without_ranks_are_left_out_if_any_has_some() {
        let all = [described(0), described(1)];
        assert_eq!(with_ranks(&all, &[]).len(), 2);
        let (page, _fd) = ProgressPage::create(2).unwrap();
        page.join(1, 1001);
        let runs = [RunSnapshot::of(None, &page, &Totals::new(2))];
        let own = [all[0].clone(), (all[1].0.clone(), vec![7, 1001])];
        let shown = with_ranks(&own, &runs);
        assert_eq!(shown.len(), 1);
        assert_eq!((shown[0].index, &shown[0].ranks[..]), (1, &[1][..]));
    }
}
