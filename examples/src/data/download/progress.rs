//! A progress bar for each file, on terminals.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Whether a download shows its progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// A bar on standard error if that is a terminal, else nothing.
    Terminal,
    /// Nothing.
    Quiet,
}

impl Progress {
    fn target(self) -> ProgressDrawTarget {
        match self {
            // Draws nothing if standard error is not a terminal.
            Progress::Terminal => ProgressDrawTarget::stderr(),
            Progress::Quiet => ProgressDrawTarget::hidden(),
        }
    }

    /// A bar for one file of unknown length.
    pub(super) fn file(self, name: &str) -> Bar {
        let bar = ProgressBar::with_draw_target(None, self.target());
        bar.set_style(style("{msg} {bytes} of {total_bytes} {wide_bar} {bytes_per_sec}"));
        bar.set_message(name.to_owned());
        Bar(bar)
    }

    /// A line that is shown while waiting.
    pub(super) fn waiting(self, text: String) -> Bar {
        let bar = ProgressBar::with_draw_target(None, self.target());
        bar.set_style(style("{msg} ({elapsed})"));
        bar.set_message(text);
        bar.enable_steady_tick(Duration::from_secs(1));
        Bar(bar)
    }
}

/// The template, or indicatif's default bar if it rejects the template.
fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// A bar that disappears when it is dropped.
pub(super) struct Bar(ProgressBar);

impl Bar {
    /// `have` bytes of `total` exist already.
    pub(super) fn begin(&self, have: u64, total: Option<u64>) {
        if let Some(total) = total {
            self.0.set_length(total);
        }
        self.0.set_position(have);
        // The speed is that of this transfer, without the bytes from before.
        self.0.reset_eta();
    }

    /// `bytes` more have arrived.
    pub(super) fn add(&self, bytes: u64) {
        self.0.inc(bytes);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
