//! A launcher with a short timeout for readers of its output: `t-impatient RANKS SCRIPT`.

use std::process::ExitCode;
use std::time::Duration;

use mgpurun::{Launch, OutputOptions};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [ranks, script] = &arguments[..] else { panic!("usage: t-impatient RANKS SCRIPT") };
    let ranks = ranks.parse().expect("RANKS is a number");
    let output = OutputOptions { patience: Duration::from_millis(50), ..OutputOptions::default() };
    let launch = Launch::new("/bin/sh").arguments(["-c", script]).ranks(ranks).output(output);
    ExitCode::from(launch.run().expect("a shell can be started").exit_code)
}
