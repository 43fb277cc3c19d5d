//! Curves of a training: kept while it runs, and written where the user asked for them.
//!
//! A point is a step's loss on rank 0 (of its own batch), or what an epoch gave on all ranks. `plot` draws them all, after every
//! epoch anew; `events` appends each to a file that TensorBoard follows.

mod events;
mod plot;

use std::path::{Path, PathBuf};

use events::EventFile;

use super::report::EpochReport;

/// What was asked for, on rank 0.
#[derive(Debug, Default)]
pub(super) struct Curves {
    /// Where to draw, and the points so far.
    plot: Option<(PathBuf, Points)>,
    events: Option<EventFile>,
}

/// Points of all curves.
#[derive(Debug, Default)]
struct Points {
    /// Steps made, and the loss of the last one.
    losses: Vec<(u64, f64)>,
    epochs: Vec<EpochPoint>,
}

/// What an epoch gave: accuracies from 0 to 1.
#[derive(Debug, Clone, Copy)]
struct EpochPoint {
    /// Steps made by its end.
    step: u64,
    train_accuracy: f64,
    test_loss: Option<f64>,
    test_accuracy: Option<f64>,
}

impl Curves {
    /// Curves drawn to the file `plot` and appended to a new file in the folder `events`, where they are given.
    ///
    /// # Errors
    /// If one of them cannot be written; it is named.
    pub(super) fn new(plot: Option<&Path>, events: Option<&Path>) -> Result<Self, String> {
        let plot = plot.map(|path| (path.to_owned(), Points::default()));
        if let Some((path, points)) = &plot {
            // Better known now than after an epoch.
            plot::draw(points, path)?;
        }
        Ok(Curves { plot, events: events.map(EventFile::create).transpose()? })
    }

    /// The loss of the last of `step` steps.
    pub(super) fn step(&mut self, step: u64, loss: f64) -> Result<(), String> {
        if let Some((_, points)) = &mut self.plot {
            points.losses.push((step, loss));
        }
        match &mut self.events {
            Some(events) => events.append(step, &[("train/step_loss", loss)]),
            None => Ok(()),
        }
    }

    /// What an epoch gave.
    pub(super) fn epoch(&mut self, report: &EpochReport) -> Result<(), String> {
        if let Some((path, points)) = &mut self.plot {
            points.epochs.push(EpochPoint {
                step: report.step,
                train_accuracy: report.train_acc,
                test_loss: report.test_loss,
                test_accuracy: report.test_acc,
            });
            plot::draw(points, path)?;
        }
        if let Some(events) = &mut self.events {
            let train = [
                ("train/loss", Some(report.train_loss)),
                ("train/accuracy", Some(report.train_acc)),
                ("train/images_per_s", Some(report.images_per_s)),
                ("train/communication", report.communication),
                ("test/loss", report.test_loss),
                ("test/accuracy", report.test_acc),
                ("test/accuracy_of_average", report.test_acc_average),
            ];
            let known: Vec<_> = train.into_iter().filter_map(|(tag, value)| Some((tag, value?))).collect();
            events.append(report.step, &known)?;
            events.flush()?;
        }
        Ok(())
    }
}
