//! Training curves: collected during training and written where the user asked for them.
//!
//! A point is the loss of a step on rank 0 (of its own batch), or the results of all ranks in an epoch or, with
//! `--log-every`, in some steps. `plot` redraws everything after each epoch; `events` appends to a file that
//! TensorBoard follows.

mod bitmap;
mod events;
mod plot;

use std::path::{Path, PathBuf};

use events::EventFile;
use mgpu::output_file;

use super::byproducts::{ByProduct, cannot_write};
use super::report::EpochReport;
use super::training_log::LogLine;

const PLOT: &str = "--plot";

/// The requested curves, on rank 0.
#[derive(Debug, Default)]
pub(super) struct Curves {
    plot: Option<ByProduct<Plot>>,
    events: Option<ByProduct<EventFile>>,
}

/// Where to draw, and the points so far.
#[derive(Debug)]
struct Plot {
    path: PathBuf,
    title: String,
    points: Points,
}

/// The points of all curves.
#[derive(Debug, Default)]
struct Points {
    /// Number of steps done, and the loss of the last one.
    losses: Vec<(u64, f64)>,
    epochs: Vec<EpochPoint>,
}

/// The results of an epoch: accuracies from 0 to 1.
#[derive(Debug, Clone, Copy)]
struct EpochPoint {
    /// Number of steps at its end.
    step: u64,
    train_accuracy: f64,
    test_loss: Option<f64>,
    test_accuracy: Option<f64>,
}

impl Curves {
    /// Curves drawn to the file `plot` under a title, and appended to a new file in the folder `events`, if given.
    ///
    /// # Errors
    /// If one of them cannot be written; the error names it.
    pub(super) fn new(plot: Option<&Path>, title: String, events: Option<&Path>) -> Result<Self, String> {
        if let Some(path) = plot {
            // Fail before training rather than after an epoch.
            output_file::check(path).map_err(|error| cannot_write(PLOT, path, &error))?;
        }
        let plot =
            plot.map(|path| ByProduct::new(Plot { path: path.to_owned(), title, points: Points::default() }));
        let events = events.map(EventFile::create).transpose()?;
        Ok(Curves { plot, events: events.map(ByProduct::new) })
    }

    /// Adds the loss of the last of `step` steps.
    pub(super) fn step(&mut self, step: u64, loss: f64) {
        if let Some(plot) = &mut self.plot {
            plot.update(|plot| {
                plot.points.losses.push((step, loss));
                Ok(())
            });
        }
        if let Some(events) = &mut self.events {
            events.update(|events| events.append(step, &[("train/step_loss", loss)]));
        }
    }

    /// Adds the results of some steps, on all ranks.
    pub(super) fn log(&mut self, line: &LogLine) {
        if let Some(events) = &mut self.events {
            let values = [
                ("log/loss", line.loss),
                ("log/accuracy", line.accuracy),
                ("log/images_per_s", line.images_per_s),
            ];
            events.update(|events| events.append(line.step, &values));
        }
    }

    /// Adds the results of an epoch.
    pub(super) fn epoch(&mut self, report: &EpochReport) {
        if let Some(plot) = &mut self.plot {
            let point = EpochPoint {
                step: report.step,
                train_accuracy: report.train_acc,
                test_loss: report.test_loss,
                test_accuracy: report.test_acc,
            };
            plot.update(|plot| {
                plot.points.epochs.push(point);
                plot::draw(plot)
            });
        }
        if let Some(events) = &mut self.events {
            let train = [
                ("train/loss", Some(report.train_loss)),
                ("train/accuracy", Some(report.train_acc)),
                ("train/l2_loss", report.l2_loss),
                ("train/images_per_s", Some(report.images_per_s)),
                ("train/communication", report.communication),
                ("test/loss", report.test_loss),
                ("test/accuracy", report.test_acc),
                ("test/accuracy_of_average", report.test_acc_average),
            ];
            let known: Vec<_> = train.into_iter().filter_map(|(tag, value)| Some((tag, value?))).collect();
            events.update(|events| {
                events.append(report.step, &known)?;
                events.flush()
            });
        }
    }
}
