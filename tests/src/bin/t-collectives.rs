//! A rank that runs one of the bodies of `mgpu_tests::collectives`: `t-collectives BODY`.

use std::process::ExitCode;

use mgpu::World;
use mgpu_tests::collectives;

fn main() -> ExitCode {
    let body = match std::env::args().nth(1).as_deref() {
        Some("all") => collectives::all,
        Some("two-communicators") => collectives::two_communicators,
        Some("messages-during-a-ring") => collectives::messages_during_a_ring,
        Some("large-private") => collectives::large_private,
        Some("groups") => collectives::groups,
        Some("shortage") => collectives::shortage,
        other => panic!("unknown body {other:?}"),
    };
    match World::from_env().and_then(body) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
