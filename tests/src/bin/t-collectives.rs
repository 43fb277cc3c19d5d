//! A rank that runs every collective.

use std::process::ExitCode;

fn main() -> ExitCode {
    match mgpu::World::from_env().and_then(mgpu_tests::collectives::all) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
