//! What a checkpoint will hold, in memory: copies, so that the training may change the originals meanwhile.

use std::fmt;

use serde_json::Value;

use super::Position;
use crate::{DataParallel, Layout, Result};

/// Everything that a checkpoint will hold.
///
/// Made where the training runs, handed to [`Writer::save`](super::Writer::save); from then on it belongs to the thread that
/// writes.
#[derive(Debug)]
pub struct Snapshot {
    pub(super) step: u64,
    pub(super) position: Option<Position>,
    pub(super) state: Value,
    pub(super) arenas: Vec<SnapshotArena>,
}

/// One flat arena with its layout.
#[derive(Debug)]
pub(super) struct SnapshotArena {
    /// Name of the file, without extension.
    pub(super) name: String,
    pub(super) layout: Layout,
    pub(super) values: Values,
}

/// The values of an arena.
pub(super) enum Values {
    Ready(Vec<f32>),
    /// To be made by the thread that writes.
    Deferred(Box<dyn FnOnce() -> Vec<f32> + Send>),
}

impl Values {
    pub(super) fn make(self) -> Vec<f32> {
        match self {
            Values::Ready(values) => values,
            Values::Deferred(make) => make(),
        }
    }
}

impl fmt::Debug for Values {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Values::Ready(values) => write!(f, "{} values", values.len()),
            Values::Deferred(_) => f.write_str("values yet to be made"),
        }
    }
}

impl Snapshot {
    /// After `step` training steps, with nothing in it yet.
    pub fn new(step: u64) -> Self {
        Snapshot { step, position: None, state: Value::Null, arenas: Vec::new() }
    }

    /// The weights and the optimizer's state of `model`, whole, on rank 0; `None` on the others. Collective where the
    /// optimizer is sharded.
    ///
    /// What [`DataParallel::restore`] asks for on the way back, on any number of ranks.
    ///
    /// # Errors
    /// As [`DataParallel::arenas`].
    pub fn of(model: &mut DataParallel) -> Result<Option<Self>> {
        let (layout, step, rank) = (model.layout().clone(), model.steps(), model.comm().rank());
        let arenas = model.arenas()?;
        if rank > 0 {
            return Ok(None);
        }
        let mut snapshot = Snapshot::new(step);
        for (name, values) in arenas {
            snapshot.add(name, &layout, values);
        }
        Ok(Some(snapshot))
    }

    /// With where the run is in its data.
    #[must_use]
    pub fn with_position(self, position: Position) -> Self {
        Snapshot { position: Some(position), ..self }
    }

    /// With whatever else the program needs to go on: hyper-parameters, number of ranks, precision.
    #[must_use]
    pub fn with_state(self, state: Value) -> Self {
        Snapshot { state, ..self }
    }

    /// Adds an arena, to become the file `name.safetensors` with the tensors of `layout`. Slices are copied, vectors kept. A
    /// snapshot with a value that is not finite is not written: it would take the place of one to go on from.
    ///
    /// # Panics
    /// If `values` is shorter than `layout`.
    pub fn add(&mut self, name: &str, layout: &Layout, values: impl Into<Vec<f32>>) {
        let values = values.into();
        assert!(values.len() >= layout.len(), "{} values for {}", values.len(), layout.len());
        self.push(name, layout, Values::Ready(values));
    }

    /// Adds an arena whose values `make` makes on the thread that writes, from copies that it owns: to bring them into
    /// another order, for instance. They must be as many as `layout` has.
    pub fn add_deferred(
        &mut self,
        name: &str,
        layout: &Layout,
        make: impl FnOnce() -> Vec<f32> + Send + 'static,
    ) {
        self.push(name, layout, Values::Deferred(Box::new(make)));
    }

    fn push(&mut self, name: &str, layout: &Layout, values: Values) {
        self.arenas.push(SnapshotArena { name: name.to_owned(), layout: layout.clone(), values });
    }
}
