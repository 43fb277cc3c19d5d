//! The state of the whole network: gathered from the stages on rank 0, and distributed to them.
//!
//! Only the first copy of the network takes part, because all copies have the same state. Then each stage passes it on
//! in its own column.

use std::ops::Range;

use mgpu::checkpoint::{Checkpoint, Snapshot};
use mgpu::replicate::{checksum, replicate};
use mgpu::{Element, Layout};
use mgpu_kernels::Storage;

use super::super::read;
use super::Pipeline;
use super::neighbours::{Neighbours, receive, send};
use crate::nets::Spec;

/// The layouts of the whole network, and where its parts are in them.
pub(super) struct Layouts {
    pub(super) parameters: Layout,
    buffers: Layout,
    /// The elements of each part.
    of_parameters: Vec<Range<usize>>,
    of_buffers: Vec<Range<usize>>,
}

impl Layouts {
    /// `ends` are the ends of the parts, as indices of layers.
    pub(super) fn new(spec: &Spec, ends: &[usize]) -> Self {
        let (parameters, buffers) = spec.layouts();
        let divide = |layout: &Layout| {
            let of = |part: &[usize]| elements(layout, part[0]..part[1]);
            ends.windows(2).map(of).collect()
        };
        let (of_parameters, of_buffers) = (divide(&parameters), divide(&buffers));
        Layouts { parameters, buffers, of_parameters, of_buffers }
    }
}

/// The elements of the tensors of some layers, whose names begin with the index of the layer.
fn elements(layout: &Layout, layers: Range<usize>) -> Range<usize> {
    let layer = |name: &str| name.split('.').next().and_then(|layer| layer.parse().ok());
    let within = |name: &str| layer(name).is_some_and(|layer| layers.contains(&layer));
    let mut tensors = layout.tensors().iter().filter(|tensor| within(&tensor.name));
    match (tensors.next(), tensors.next_back()) {
        (Some(first), Some(last)) => first.range().start..last.range().end,
        (Some(only), None) => only.range(),
        (None, _) => 0..0,
    }
}

/// Gathers the parts of an arena on stage 0; `None` on the others.
fn gather(row: &mut Neighbours, own: &[f32], parts: &[Range<usize>]) -> mgpu::Result<Option<Vec<f32>>> {
    if row.stage() > 0 {
        send(row.comm(), &mut None, own, 0)?;
        return Ok(None);
    }
    let mut whole = own.to_vec();
    whole.resize(parts.iter().map(Range::len).sum(), 0.0);
    for (stage, part) in (0..).zip(parts).skip(1) {
        receive(row.comm(), &mut None, &mut whole[part.clone()], stage)?;
    }
    Ok(Some(whole))
}

/// Distributes the parts of the arena `whole`, which stage 0 has. Returns this stage's part.
fn scatter(row: &mut Neighbours, whole: Vec<f32>, parts: &[Range<usize>]) -> mgpu::Result<Vec<f32>> {
    let own = parts[row.stage() as usize].clone();
    if row.stage() > 0 {
        let mut values = vec![0.0; own.len()];
        receive(row.comm(), &mut None, &mut values, 0)?;
        return Ok(values);
    }
    for (stage, part) in (0..).zip(parts).skip(1) {
        send(row.comm(), &mut None, &whole[part.clone()], stage)?;
    }
    Ok(whole[own].to_vec())
}

impl<E: Storage + Element> Pipeline<E> {
    /// Whether this rank is in the first copy of the network.
    fn is_in_first_copy(&self) -> bool {
        self.grid.replica(self.comm.rank()) == 0
    }

    /// The checksum of the whole network's parameters. Collective.
    pub(super) fn checksum(&mut self) -> mgpu::Result<u64> {
        let mut sum = [0];
        if self.is_in_first_copy() {
            let Pipeline { row, model, layouts, .. } = self;
            if let Some(whole) = gather(row, model.parameters(), &layouts.of_parameters)? {
                sum = [checksum(&whole).cast_signed()];
            }
        }
        self.comm.broadcast_slice(&mut sum, 0)?;
        Ok(sum[0].cast_unsigned())
    }

    /// The state of the whole network, on rank 0. Collective.
    pub(super) fn gather_snapshot(&mut self) -> mgpu::Result<Option<Snapshot>> {
        let (is_in_first_copy, is_first) = (self.is_in_first_copy(), self.comm.rank() == 0);
        let Pipeline { row, model, layouts, .. } = self;
        let mut snapshot = Snapshot::new(model.steps());
        let arenas = model.arenas()?;
        if !is_in_first_copy {
            return Ok(None);
        }
        for (name, own) in arenas {
            if let Some(whole) = gather(row, &own, &layouts.of_parameters)? {
                snapshot.add(name, &layouts.parameters, whole);
            }
        }
        if let Some(whole) = gather(row, model.buffers(), &layouts.of_buffers)? {
            snapshot.add("buffers", &layouts.buffers, whole);
        }
        Ok(is_first.then_some(snapshot))
    }

    /// Restores the state after `step` steps from rank 0's checkpoint. Collective.
    pub(super) fn scatter_checkpoint(
        &mut self,
        step: u64,
        checkpoint: Option<&Checkpoint>,
    ) -> mgpu::Result<()> {
        let is_in_first_copy = self.is_in_first_copy();
        let Pipeline { row, model, net, layouts, .. } = self;
        let mut own = |name: &str, (whole, parts): (&Layout, &[Range<usize>]), own: &Layout| {
            match is_in_first_copy {
                // Only stage 0 reads.
                true if row.stage() == 0 => scatter(row, read(checkpoint, name, whole)?, parts),
                true => scatter(row, Vec::new(), parts),
                // The values of the first copy replace them.
                false => Ok(vec![0.0; own.len()]),
            }
        };
        let of_parameters = (&layouts.parameters, &layouts.of_parameters[..]);
        model.restore(step, |name, layout| own(name, of_parameters, layout))?;
        let mut buffers = own("buffers", (&layouts.buffers, &layouts.of_buffers), net.buffers_layout())?;
        replicate(model.comm(), net.buffers_layout(), &mut buffers)?;
        model.buffers_mut().copy_from_slice(&buffers);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nets::names;

    #[test]
    fn the_parts_of_every_network_are_the_whole() {
        for name in names() {
            let spec = Spec::named(name).unwrap();
            for cut in spec.cuts() {
                let layouts = Layouts::new(&spec, &[0, cut, spec.layers.len()]);
                let [first, second] = &layouts.of_parameters[..] else { panic!("two parts") };
                assert!(first.start == 0 && first.end == second.start && !second.is_empty(), "{name} {cut}");
                assert_eq!(second.end, layouts.parameters.len());
                let buffers: usize = layouts.of_buffers.iter().map(Range::len).sum();
                assert_eq!(buffers, layouts.buffers.len());
            }
        }
    }
}
