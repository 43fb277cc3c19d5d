//! The arenas of the whole network: gathered from the stages on rank 0, and distributed to them.
//!
//! Only the first replica of the network takes part, because all replicas have the same values. The stages pass on what
//! they have received in their own columns.

use std::ops::Range;

use mgpu::replicate::{checksum, replicate};
use mgpu::{Element, Layout};
use mgpu_kernels::Storage;

use super::Stage;
use super::neighbours::{Neighbours, receive, send};
use crate::nets::Spec;

/// The layouts of the whole network, and where its parts are in them.
pub(super) struct Layouts {
    parameters: Layout,
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
    let tensors = layout.tensors().iter().filter(|tensor| within(&tensor.name));
    let ranges: Vec<Range<usize>> = tensors.map(|tensor| tensor.range()).collect();
    match (ranges.first(), ranges.last()) {
        (Some(first), Some(last)) => first.start..last.end,
        _ => 0..0,
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

/// Distributes the parts of the arena that `whole` returns, which only stage 0 calls. Returns this stage's part.
fn scatter(
    row: &mut Neighbours,
    parts: &[Range<usize>],
    whole: impl FnOnce() -> mgpu::Result<Vec<f32>>,
) -> mgpu::Result<Vec<f32>> {
    let own = parts[row.stage() as usize].clone();
    if row.stage() > 0 {
        let mut values = vec![0.0; own.len()];
        receive(row.comm(), &mut None, &mut values, 0)?;
        return Ok(values);
    }
    let mut whole = whole()?;
    for (stage, part) in (0..).zip(parts).skip(1) {
        send(row.comm(), &mut None, &whole[part.clone()], stage)?;
    }
    whole.truncate(own.len());
    Ok(whole)
}

impl<E: Storage + Element> Stage<E> {
    /// Names, shapes and offsets of the parameters of the whole network.
    pub(crate) fn layout(&self) -> &Layout {
        &self.layouts.parameters
    }

    /// The checksum of the whole network's parameters, on rank 0; 0 elsewhere. Collective.
    pub(crate) fn checksum(&mut self) -> mgpu::Result<u64> {
        let Stage { replica, row, model, layouts, .. } = self;
        if *replica > 0 {
            return Ok(0);
        }
        let whole = gather(row, model.parameters(), &layouts.of_parameters)?;
        Ok(whole.map_or(0, |whole| checksum(&whole)))
    }

    /// Passes the arenas of the whole network to `keep` on rank 0: parameters, optimizer state and running statistics,
    /// each with its name and layout. Collective.
    pub(crate) fn gather_arenas(
        &mut self,
        mut keep: impl FnMut(&str, &Layout, Vec<f32>),
    ) -> mgpu::Result<()> {
        let Stage { replica, row, model, layouts, .. } = self;
        let arenas = model.arenas()?;
        if *replica > 0 {
            return Ok(());
        }
        for (name, own) in arenas {
            if let Some(whole) = gather(row, &own, &layouts.of_parameters)? {
                keep(name, &layouts.parameters, whole);
            }
        }
        if let Some(whole) = gather(row, model.buffers(), &layouts.of_buffers)? {
            keep("buffers", &layouts.buffers, whole);
        }
        Ok(())
    }

    /// Restores the state after `steps` steps. `read` returns the arena of the whole network of that name and layout;
    /// only rank 0 calls it. Collective.
    pub(crate) fn scatter_arenas(
        &mut self,
        steps: u64,
        read: impl Fn(&str, &Layout) -> mgpu::Result<Vec<f32>>,
    ) -> mgpu::Result<()> {
        let Stage { replica, row, model, net, layouts, .. } = self;
        let mut part = |name: &str, (whole, parts): (&Layout, &[Range<usize>]), own: &Layout| match *replica {
            0 => scatter(row, parts, || read(name, whole)),
            // The values of the first replica replace them.
            _ => Ok(vec![0.0; own.len()]),
        };
        let of_parameters = (&layouts.parameters, &layouts.of_parameters[..]);
        model.restore(steps, |name, own| part(name, of_parameters, own))?;
        let layout = net.buffers_layout();
        let mut buffers = part("buffers", (&layouts.buffers, &layouts.of_buffers), layout)?;
        replicate(model.comm(), layout, &mut buffers)?;
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
