//! The results, as lines and as JSON.

use std::fmt;
use std::io;
use std::path::Path;

use mgpu_kernels::cuda::Device;
use serde::Serialize;

use crate::print::outln;

/// The machine of the checks.
#[derive(Debug, Serialize)]
pub(super) struct Machine {
    device: String,
    uuid: String,
    architecture: String,
    multiprocessors: u32,
    /// CUDA version of the driver.
    driver: String,
    compiler: Option<String>,
    version: &'static str,
}

impl Machine {
    pub(super) fn of(device: &Device, compiler: Option<(u32, u32)>) -> Self {
        let version = |(major, minor): (u32, u32)| format!("{major}.{minor}");
        Machine {
            device: device.name().to_owned(),
            uuid: device.uuid().to_owned(),
            architecture: version(device.architecture()),
            multiprocessors: device.multiprocessors(),
            driver: version(device.driver()),
            compiler: compiler.map(version),
            version: env!("CARGO_PKG_VERSION"),
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}, compute capability {}, {} multiprocessors, driver for CUDA {}, NVRTC {}",
            self.device,
            self.architecture,
            self.multiprocessors,
            self.driver,
            self.compiler.as_deref().unwrap_or("not found")
        )
    }
}

/// One check.
#[derive(Debug, Serialize)]
pub(super) struct Check {
    pub(super) name: String,
    pub(super) shape: String,
    pub(super) precision: &'static str,
    /// The largest error, relative to the scale that the bound refers to; null if a value is not finite.
    pub(super) error: f64,
    pub(super) bound: f64,
    /// Other failures.
    pub(super) problem: Option<String>,
    pub(super) ok: bool,
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Check { name, shape, precision, error, bound, .. } = self;
        let verdict = if self.ok { "ok    " } else { "FAILED" };
        write!(f, "{verdict} {name:<26} {precision:<5} {shape:<44} error {error:.1e} of {bound:.1e}")?;
        match &self.problem {
            Some(problem) => write!(f, ": {problem}"),
            None => Ok(()),
        }
    }
}

/// All checks so far.
#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) checks: Vec<Check>,
    pub(super) failed: usize,
}

impl Report {
    pub(super) fn push(&mut self, check: Check) {
        outln!("{check}");
        self.failed += usize::from(!check.ok);
        self.checks.push(check);
    }
}

/// The JSON summary.
#[derive(Debug, Serialize)]
pub(super) struct Summary<'a> {
    #[serde(flatten)]
    pub(super) machine: Machine,
    pub(super) seed: u64,
    pub(super) quick: bool,
    pub(super) failed: usize,
    pub(super) unreached: Vec<&'a str>,
    pub(super) error: Option<String>,
    pub(super) checks: Vec<Check>,
}

/// Writes one JSON object, if a file was requested.
pub(super) fn write(path: Option<&Path>, value: &impl Serialize) -> io::Result<()> {
    let Some(path) = path else { return Ok(()) };
    let text = serde_json::to_string(value)? + "\n";
    let with_path = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    mgpu::whole_file::write(path, text.as_bytes()).map_err(with_path)
}
