//! A rank's place in the grid, and the arenas of the whole network: gathered from the stages on rank 0, and distributed
//! to them.
//!
//! Only the first replica of the network takes part, because all replicas have the same values. The stages pass on what
//! they have received in their own columns.

use std::ops::Range;
use std::time::Duration;

use mgpu::replicate::checksum;
use mgpu::timeline::Timeline;
use mgpu::{Communicator, Layout, NamedArena};

use super::neighbours::{Neighbours, receive, send};
use super::schedule::Schedule;
use crate::nets::Spec;
use crate::parallel::Grid;

/// A rank's place in the grid.
pub(crate) struct Place {
    /// The number of its replica of the network.
    replica: u32,
    pub(super) row: Neighbours,
    /// The ends of the parts, as indices of layers.
    ends: Vec<usize>,
    layouts: Layouts,
    pub(super) schedule: Schedule,
}

/// The kinds of arenas: those with the layout of the parameters, and the running statistics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arena {
    Parameters,
    Buffers,
}

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

impl Place {
    /// This rank's place if `spec` is cut at `ends` over the ranks of `comm`, and the communicator of its column.
    /// Collective.
    pub(super) fn new(
        comm: &mut Communicator,
        spec: &Spec,
        grid: Grid,
        ends: Vec<usize>,
        micro_batches: usize,
        timeline: &Timeline,
    ) -> mgpu::Result<(Self, Communicator)> {
        let (replica, stage) = (grid.replica(comm.rank()), grid.stage(comm.rank()));
        let own_group = "a rank with a colour has a group";
        let row = comm.split(Some(replica), 0)?.expect(own_group);
        let column = comm.split(Some(stage), 0)?.expect(own_group);
        let place = Place {
            replica,
            row: Neighbours::new(row, timeline),
            layouts: Layouts::new(spec, &ends),
            ends,
            schedule: Schedule { stage: stage as usize, stages: grid.stages as usize, micro_batches },
        };
        Ok((place, column))
    }

    /// The number of this rank's replica of the network.
    pub(crate) fn replica(&self) -> u32 {
        self.replica
    }

    /// The stages of this rank's replica of the network: rank s is stage s.
    pub(crate) fn row(&mut self) -> &mut Communicator {
        self.row.comm()
    }

    /// How long this rank has waited for other stages, as far as its timeline counts.
    pub(crate) fn waited(&self) -> Duration {
        self.row.waited()
    }

    /// Whether this rank has the first layers.
    pub(crate) fn is_first(&self) -> bool {
        self.schedule.is_first()
    }

    /// Whether the losses are computed here.
    pub(crate) fn is_last(&self) -> bool {
        self.schedule.is_last()
    }

    /// The ends of the parts, as indices of layers: 0, the cuts, and the number of layers.
    pub(crate) fn ends(&self) -> &[usize] {
        &self.ends
    }

    /// The largest number of micro-batches between their passes.
    pub(crate) fn in_flight(&self) -> usize {
        self.schedule.in_flight()
    }

    /// The layers of this rank.
    pub(super) fn layers(&self) -> Range<usize> {
        let stage = self.schedule.stage;
        self.ends[stage]..self.ends[stage + 1]
    }

    /// Names, shapes and offsets of the parameters of the whole network.
    pub(crate) fn layout(&self) -> &Layout {
        &self.layouts.parameters
    }

    /// The checksum of the whole network's parameters, of which `own` are this stage's, on rank 0; 0 elsewhere.
    /// Collective.
    pub(crate) fn checksum(&mut self, own: &[f32]) -> mgpu::Result<u64> {
        if self.replica > 0 {
            return Ok(0);
        }
        let whole = gather(&mut self.row, own, &self.layouts.of_parameters)?;
        Ok(whole.map_or(0, |whole| checksum(&whole)))
    }

    /// Passes the arenas of the whole network to `keep` on rank 0, with their names and layouts. `arenas` and `buffers`
    /// are this stage's, as far as it is in the first replica. Collective.
    pub(super) fn gather<'a>(
        &mut self,
        arenas: impl IntoIterator<Item = NamedArena<'a>>,
        buffers: &[f32],
        mut keep: impl FnMut(&str, &Layout, Vec<f32>),
    ) -> mgpu::Result<()> {
        let Place { replica, row, layouts, .. } = self;
        if *replica > 0 {
            return Ok(());
        }
        for (name, own) in arenas {
            if let Some(whole) = gather(row, &own, &layouts.of_parameters)? {
                keep(name, &layouts.parameters, whole);
            }
        }
        if let Some(whole) = gather(row, buffers, &layouts.of_buffers)? {
            keep("buffers", &layouts.buffers, whole);
        }
        Ok(())
    }

    /// This stage's part of an arena. `read` returns the arena of the whole network of that name and layout; only rank 0
    /// calls it. In other replicas than the first zeros, which the first replica's values are to replace. Collective.
    pub(super) fn scatter(
        &mut self,
        name: &str,
        arena: Arena,
        read: impl FnOnce(&str, &Layout) -> mgpu::Result<Vec<f32>>,
    ) -> mgpu::Result<Vec<f32>> {
        let Place { replica, row, layouts, schedule, .. } = self;
        let (whole, parts) = match arena {
            Arena::Parameters => (&layouts.parameters, &layouts.of_parameters),
            Arena::Buffers => (&layouts.buffers, &layouts.of_buffers),
        };
        match *replica {
            0 => scatter(row, parts, || read(name, whole)),
            _ => Ok(vec![0.0; parts[schedule.stage].len()]),
        }
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
