//! The content of a checkpoint in memory: copies, so that the training can change the originals during the write.

use std::fmt;

use serde_json::Value;

use super::Position;
use crate::optimizer::LossScale;
use crate::{DataParallel, Layout, Result};

/// The content of a checkpoint.
///
/// Created by the training thread and passed to [`Writer::save`](super::Writer::save), whose thread then owns it.
#[derive(Debug)]
pub struct Snapshot {
    pub(super) step: u64,
    pub(super) position: Option<Position>,
    pub(super) state: Value,
    pub(super) loss_scale: Option<LossScale>,
    pub(super) arenas: Vec<SnapshotArena>,
}

/// One arena with its layout.
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
    /// Computed by the writer's thread.
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
            Values::Deferred(_) => f.write_str("deferred values"),
        }
    }
}

impl Snapshot {
    /// An empty snapshot after `step` training steps.
    pub fn new(step: u64) -> Self {
        Snapshot { step, position: None, state: Value::Null, loss_scale: None, arenas: Vec::new() }
    }

    /// The weights, optimizer states and loss scale of `model`, complete, on rank 0; `None` on the other ranks. Collective if the
    /// optimizer is sharded.
    ///
    /// [`DataParallel::restore`] and [`DataParallel::restore_loss_scale`] load them again, on any number of ranks.
    ///
    /// # Errors
    /// As [`DataParallel::arenas`].
    pub fn of(model: &mut DataParallel) -> Result<Option<Self>> {
        let (layout, step, rank) = (model.layout().clone(), model.steps(), model.comm().rank());
        let loss_scale = model.loss_scale();
        let arenas = model.arenas()?;
        if rank > 0 {
            return Ok(None);
        }
        let mut snapshot = Snapshot::new(step).with_loss_scale(loss_scale);
        for (name, values) in arenas {
            snapshot.add(name, &layout, values);
        }
        Ok(Some(snapshot))
    }

    /// Adds the position in the data.
    #[must_use]
    pub fn with_position(self, position: Position) -> Self {
        Snapshot { position: Some(position), ..self }
    }

    /// Adds the loss scale of the next step, if gradients are scaled.
    #[must_use]
    pub fn with_loss_scale(self, scale: Option<LossScale>) -> Self {
        Snapshot { loss_scale: scale, ..self }
    }

    /// Adds other state of the program, such as hyper-parameters, number of ranks, precision.
    #[must_use]
    pub fn with_state(self, state: Value) -> Self {
        Snapshot { state, ..self }
    }

    /// Adds an arena, which becomes the file `name.safetensors` with the tensors of `layout`. Slices are copied,
    /// vectors are moved. A snapshot with non-finite values is not written: it must not replace a checkpoint that a
    /// run can resume from.
    ///
    /// # Panics
    /// If `values` is shorter than `layout`.
    pub fn add(&mut self, name: &str, layout: &Layout, values: impl Into<Vec<f32>>) {
        let values = values.into();
        assert!(values.len() >= layout.len(), "{} values for {}", values.len(), layout.len());
        self.push(name, layout, Values::Ready(values));
    }

    /// Adds an arena whose values `make` computes on the writer's thread, from copies that it owns: for example to
    /// reorder them. It must return as many values as `layout` has.
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
