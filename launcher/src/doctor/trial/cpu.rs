//! Two ranks on the CPU.
//!
//! Their times are compared with what the machine itself needs, not with a table of machines: a large all-reduce with the
//! time that its memory traffic takes alone (`--bound` of `allreduce_perf`), a small one with the time in which two threads
//! pass a cache line to each other, which is measured here.

use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde::Deserialize;

use super::super::report::{Item, Mark};
use super::command::{End, Run, last_line};

/// Sizes of the all-reduces in bytes.
pub(super) const SMALL: u64 = 8;
pub(super) const LARGE: u64 = 8 << 20;
/// Passes of a cache line in a round, and the number of rounds; the fastest counts.
const PASSES: u32 = 200;
const ROUNDS: u32 = 50;
/// How long all rounds may take, however busy the machine is.
const PATIENCE: Duration = Duration::from_millis(300);
/// Up to this multiple of its bound an all-reduce is as fast as it should be. A small one passes a line there and back
/// and computes; a large one was measured at 1 to 2 times its memory traffic on idle machines.
const USUAL_SMALL: f64 = 10.0;
const USUAL_LARGE: f64 = 3.0;

/// A line of output of `allreduce_perf`.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub(super) struct Measured {
    pub(super) bytes: u64,
    pub(super) us_p50: f64,
    us_min: f64,
    #[serde(default)]
    pub(super) busbw_gbps: f64,
    bound_us: Option<f64>,
}

/// The findings on the ranks.
pub(super) fn read(run: &Run, cores: usize) -> Vec<Item> {
    let measured = match measured(run) {
        Ok(measured) => measured,
        Err(why) => return vec![Item::new(Mark::Failed, "two ranks", why)],
    };
    let sizes = measured.len();
    let text = format!("joined, shared memory, and summed correctly ({sizes} sizes of all-reduce)");
    let mut items = vec![Item::new(Mark::Ok, "two ranks", text)];
    let pass = if cores > 1 { pass_of_a_line() } else { None };
    let of = |bytes| measured.iter().find(|line| line.bytes == bytes);
    items.extend(of(SMALL).map(|line| small(line, pass, cores)));
    items.extend(of(LARGE).and_then(|line| large(line, cores)));
    items
}

/// What the ranks have measured.
fn measured(run: &Run) -> Result<Vec<Measured>, String> {
    match run.end {
        End::Exited(_) if run.is_success() => parse(&run.out),
        End::Exited(status) => Err(format!("failed ({status}): {}", last_line(&run.errors))),
        End::Killed | End::Stuck => Err(
            "did not end in time: the cores may be busy with other work (see top), or the control group's CPU quota is used \
             up"
            .to_owned(),
        ),
    }
}

/// The results in the output of `allreduce_perf`.
pub(super) fn parse(out: &str) -> Result<Vec<Measured>, String> {
    let measured: Vec<Measured> = out.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    match measured.is_empty() {
        false => Ok(measured),
        true => {
            Err("printed no result: is the allreduce_perf beside mgpurun of the same release?".to_owned())
        }
    }
}

/// How long a cache line takes from one core to another, in microseconds, as far as that can be measured in
/// [`PATIENCE`]; `None` if no second thread starts, or other work keeps both threads from running at once.
fn pass_of_a_line() -> Option<f64> {
    let deadline = Instant::now() + PATIENCE;
    (0..ROUNDS).map_while(|_| round_of_passes(deadline)).reduce(f64::min)
}

/// The same, from one round; `None` also if the deadline comes first.
fn round_of_passes(deadline: Instant) -> Option<f64> {
    let line = AtomicU32::new(0);
    // Even numbers are for one thread, odd ones for the other.
    let answer = |own: u32| {
        for turn in (own..2 * PASSES).step_by(2) {
            let mut polls = 0u32;
            while line.load(Ordering::Acquire) != turn {
                polls += 1;
                if !polls.is_multiple_of(1 << 14) {
                    std::hint::spin_loop();
                } else if Instant::now() < deadline {
                    // On a busy machine the other thread may need this core.
                    thread::yield_now();
                } else {
                    return false;
                }
            }
            line.store(turn + 1, Ordering::Release);
        }
        true
    };
    thread::scope(|scope| {
        let other = thread::Builder::new().spawn_scoped(scope, || answer(1)).ok()?;
        let started = Instant::now();
        let finished = answer(0);
        let finished = other.join().ok()? && finished;
        finished.then(|| started.elapsed().as_secs_f64() * 1e6 / f64::from(2 * PASSES))
    })
}

/// The finding on a small all-reduce; `pass` is the time of a cache line between cores in microseconds.
fn small(line: &Measured, pass: Option<f64>, cores: usize) -> Item {
    let name = format!("{SMALL} B");
    let median = line.us_p50;
    match pass {
        None => {
            let why = match cores {
                0..2 => too_few(cores),
                _ => "not compared, since other work keeps the cores busy (see top)".to_owned(),
            };
            Item::new(Mark::Note, name, format!("{median:.2} us: {why}"))
        }
        Some(pass) => {
            let ratio = median / pass;
            let text = format!(
                "{median:.2} us, {ratio:.1} times a cache line's way between two cores ({pass:.2} us)"
            );
            judge(name, text, ratio <= USUAL_SMALL, line)
        }
    }
}

/// The finding on a large all-reduce.
fn large(line: &Measured, cores: usize) -> Option<Item> {
    let bound = line.bound_us.filter(|bound| *bound > 0.0)?;
    let (name, median, ratio) = (format!("{} MiB", LARGE >> 20), line.us_p50, line.us_p50 / bound);
    let text = format!("{median:.0} us, {ratio:.1} times its memory traffic alone ({bound:.0} us)");
    Some(match cores {
        ..2 => Item::new(Mark::Note, name, format!("{text}: {}", too_few(cores))),
        _ => judge(name, text, ratio <= USUAL_LARGE, line),
    })
}

fn too_few(cores: usize) -> String {
    format!("two ranks share {cores} core; give mgpurun two (taskset, the container's --cpus)")
}

fn judge(name: String, text: String, is_usual: bool, line: &Measured) -> Item {
    if is_usual {
        return Item::new(Mark::Ok, name, text);
    }
    // One fast run shows that the machine can do it, and something else ran in the meantime.
    let why = if line.us_min * 2.0 < line.us_p50 {
        format!(
            "the fastest took {:.2} us, so other work uses the cores: look with top, and repeat",
            line.us_min
        )
    } else {
        "the cores may be hyperthreads of one, far apart (see NUMA), or slowed by a hypervisor".to_owned()
    };
    Item::new(Mark::Note, name, format!("{text}; {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(us_p50: f64, us_min: f64, bound_us: Option<f64>) -> Measured {
        Measured { bytes: SMALL, us_p50, us_min, busbw_gbps: 0.0, bound_us }
    }

    #[test]
    fn results_are_read_among_other_lines() {
        let out =
            "a notice\n{\"bytes\":8,\"us_p50\":0.5,\"us_min\":0.4,\"bound_us\":0.1,\"algo\":\"auto\"}\n";
        assert_eq!(parse(out), Ok(vec![line(0.5, 0.4, Some(0.1))]));
        assert!(parse("{}").unwrap_err().contains("printed no result"));
    }

    #[test]
    fn a_slow_result_says_why() {
        let fast = small(&line(0.5, 0.4, None), Some(0.1), 2);
        assert!(fast.mark == Mark::Ok && fast.text.contains("5.0 times"), "{fast:?}");
        let disturbed = small(&line(50.0, 0.4, None), Some(0.1), 2);
        assert!(disturbed.mark == Mark::Note && disturbed.text.contains("other work"), "{disturbed:?}");
        let far = small(&line(50.0, 45.0, None), Some(0.1), 2);
        assert!(far.mark == Mark::Note && far.text.contains("NUMA"), "{far:?}");
        let alone = small(&line(5.0, 4.0, None), None, 1);
        assert!(alone.mark == Mark::Note && alone.text.contains("share 1 core"), "{alone:?}");
        let crowded = small(&line(5.0, 4.0, None), None, 2);
        assert!(crowded.mark == Mark::Note && crowded.text.contains("keeps the cores busy"), "{crowded:?}");
        assert_eq!(large(&line(900.0, 800.0, Some(600.0)), 2).map(|item| item.mark), Some(Mark::Ok));
        assert_eq!(large(&line(9000.0, 800.0, Some(600.0)), 2).map(|item| item.mark), Some(Mark::Note));
        assert_eq!(large(&line(900.0, 800.0, Some(600.0)), 1).map(|item| item.mark), Some(Mark::Note));
        assert!(large(&line(900.0, 800.0, None), 2).is_none());
    }

    #[test]
    fn a_cache_line_is_passed_between_threads() {
        assert!(round_of_passes(Instant::now() + Duration::from_secs(60)).is_some_and(|pass| pass > 0.0));
    }
}
