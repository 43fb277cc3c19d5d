//! Small checkpoints with known values.

use mgpu::Layout;
use mgpu::checkpoint::{Checkpoint, Snapshot};

/// Names of the arenas.
pub const ARENAS: [&str; 2] = ["weights", "exp_avg"];

/// Tensors of both arenas.
pub fn layout() -> Layout {
    let mut layout = Layout::new();
    layout.push("0.weight", [30, 40]);
    layout.push("0.bias", [30]);
    layout
}

/// The values of arena `arena` after `step` steps of run `run`.
pub fn values(arena: &str, step: u64, run: u64) -> Vec<f32> {
    let first = step * 1_000_000 + run * 10_000 + arena.len() as u64;
    (0..layout().len() as u64).map(|index| (first + index) as f32 / 7.0).collect()
}

/// The checkpoint of that step and run.
pub fn snapshot(step: u64, run: u64) -> Snapshot {
    let mut snapshot = Snapshot::new(step).with_state(serde_json::json!({ "run": run }));
    for arena in ARENAS {
        snapshot.add(arena, &layout(), values(arena, step, run));
    }
    snapshot
}

/// The step and the run of a checkpoint.
///
/// # Panics
/// If its contents differ from [`snapshot`] in any bit.
pub fn identify(checkpoint: &Checkpoint) -> (u64, u64) {
    let manifest = checkpoint.manifest();
    let run = manifest.state["run"].as_u64().expect("the number of a run");
    for arena in ARENAS {
        let loaded = checkpoint.load(arena, &layout()).unwrap_or_else(|error| panic!("{error}"));
        let expected = values(arena, manifest.step, run);
        assert!(loaded.iter().map(|x| x.to_bits()).eq(expected.iter().map(|x| x.to_bits())), "{arena}");
    }
    (manifest.step, run)
}
