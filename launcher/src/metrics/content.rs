//! The answers: read from the progress pages, at most twice a second however many clients ask.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mgpu_control::progress::ProgressPage;
use serde::Serialize;

use super::http::Resource;
use super::{Board, openmetrics};
use crate::status::gpus::{GpuSnapshot, Gpus};
use crate::status::snapshot::RunSnapshot;
use crate::status::totals::{SAMPLE_INTERVAL, Totals};

/// Answers are at most so old.
const MAX_AGE: Duration = Duration::from_millis(500);

const PAGE: &str = include_str!("live.html");

/// What is served, and the totals that grow between two answers.
pub(super) struct Content {
    board: Board,
    jobs: Vec<Watched>,
    next_sample: Instant,
    gpus: Gpus,
    last: Option<Last>,
}

/// A job whose page is read.
struct Watched {
    job: Option<u32>,
    page: Arc<ProgressPage>,
    totals: Totals,
}

/// The last answers.
struct Last {
    made: Instant,
    metrics: Arc<[u8]>,
    status: Arc<[u8]>,
}

/// The numbers of the page.
#[derive(Serialize)]
struct Status<'a> {
    runs: &'a [RunSnapshot],
    /// For each run: its steps and samples a second, and the rank that the others wait for most.
    rates: Vec<(f64, Option<f64>, Option<u32>)>,
    gpus: &'a [GpuSnapshot],
}

impl Content {
    pub(super) fn new(board: Board) -> Self {
        Content { board, jobs: Vec::new(), next_sample: Instant::now(), gpus: Gpus::default(), last: None }
    }

    /// When [`sample`](Self::sample) has to be called.
    pub(super) fn next_sample(&self) -> Instant {
        self.next_sample
    }

    /// Reads the pages if it is time to.
    pub(super) fn sample(&mut self, now: Instant) {
        if now < self.next_sample {
            return;
        }
        self.next_sample = now + SAMPLE_INTERVAL;
        for (job, page) in self.board.pages() {
            let known = self.jobs.iter().position(|watched| watched.job == job);
            let totals = Totals::new(page.world_size());
            match known {
                // Its ranks were restarted.
                Some(index) if !Arc::ptr_eq(&self.jobs[index].page, &page) => {
                    self.jobs[index] = Watched { job, page, totals };
                }
                Some(_) => {}
                None => self.jobs.push(Watched { job, page, totals }),
            }
        }
        for Watched { page, totals, .. } in &mut self.jobs {
            totals.sample(page, now);
        }
    }

    /// The content type and the body of a resource.
    pub(super) fn answer(&mut self, resource: Resource, now: Instant) -> (&'static str, Arc<[u8]>) {
        if resource == Resource::Page {
            return ("text/html; charset=utf-8", PAGE.as_bytes().into());
        }
        if self.last.as_ref().is_none_or(|last| now.duration_since(last.made) >= MAX_AGE) {
            self.last = Some(self.make(now));
        }
        match (&self.last, resource) {
            (Some(last), Resource::Metrics) => (openmetrics::CONTENT_TYPE, Arc::clone(&last.metrics)),
            (Some(last), _) => ("application/json", Arc::clone(&last.status)),
            (None, _) => ("text/plain", Arc::default()),
        }
    }

    fn make(&mut self, made: Instant) -> Last {
        let snapshot = |watched: &Watched| RunSnapshot::of(watched.job, &watched.page, &watched.totals);
        let runs: Vec<RunSnapshot> = self.jobs.iter().map(snapshot).collect();
        let gpus = self.gpus.of_ranks(&runs);
        let rates = runs.iter().map(|run| {
            (run.steps_per_s(), run.samples_per_s(), run.straggler().map(|straggler| straggler.rank))
        });
        let status = Status { runs: &runs, rates: rates.collect(), gpus: &gpus };
        // Numbers and texts: this cannot fail.
        let status = serde_json::to_vec(&status).unwrap_or_default();
        Last { made, metrics: openmetrics::text(&runs, &gpus).into_bytes().into(), status: status.into() }
    }
}
