//! Where the network is cut into parts: where the user says, or where the slowest part takes least time.

use std::ops::Range;

use mgpu::{Communicator, GradientSink, Layout};
use mgpu_kernels::Storage;
use mgpu_kernels::conv::cpu::ConvPolicy;

use crate::nets::{DropoutKey, Mode, Net, Spec};

/// Most images of the batch whose time is measured: enough for the proportions of the layers.
const MEASURED_BATCH: usize = 64;
/// Steps of a measurement, after one that is not measured.
const MEASURED_STEPS: usize = 2;

/// The ends of `parts` parts of `spec`, as indices of layers: at `cuts`, or where rank 0 finds it best by measuring the
/// layers with batches of `batch` images. Collective.
///
/// # Errors
/// If there are too few layers, or such cuts do not exist; errors of the communicator.
pub(super) fn ends<E: Storage>(
    comm: &mut Communicator,
    spec: &Spec,
    (cuts, parts): (&[usize], usize),
    measured: (usize, usize, ConvPolicy),
) -> mgpu::Result<Vec<usize>> {
    check_count(spec, parts).map_err(mgpu::Error::program)?;
    if cuts.is_empty() {
        measure::<E>(comm, spec, parts, measured)
    } else {
        check(spec, cuts, parts).map_err(mgpu::Error::program)
    }
}

/// The ends of the parts of `spec` as indices of layers, from 0 to their number, if it is cut before the layers `cuts`
/// into `parts` parts.
///
/// # Errors
/// If such cuts do not exist, or leave a part without parameters. The error names those that exist.
fn check(spec: &Spec, cuts: &[usize], parts: usize) -> Result<Vec<usize>, String> {
    let (all, name) = (spec.cuts(), &spec.name);
    let given = list(cuts);
    if cuts.len() + 1 != parts {
        let s = if cuts.len() == 1 { "" } else { "s" };
        let cut_s = if parts == 2 { "" } else { "s" };
        return Err(format!(
            "--cut {given}: {} cut{s}, but {parts} ranks need {} cut{cut_s}",
            cuts.len(),
            parts - 1
        ));
    }
    if let Some(layer) = cuts.iter().find(|layer| !all.contains(layer)) {
        let possible = list(&all);
        return Err(format!(
            "--cut {given}: {name} cannot be cut before layer {layer}, but before {possible}"
        ));
    }
    if !cuts.is_sorted_by(|a, b| a < b) {
        return Err(format!("--cut {given}: the layers are not ascending"));
    }
    let ends = ends_of(spec, cuts);
    match ends.windows(2).find(|part| !has_parameters(spec, part[0]..part[1])) {
        Some(part) => Err(format!(
            "--cut {given}: there are no parameters from layer {} to before layer {}",
            part[0], part[1]
        )),
        None => Ok(ends),
    }
}

/// Refuses more parts than layers with parameters.
fn check_count(spec: &Spec, parts: usize) -> Result<(), String> {
    let (most, name) = (spec.layers_with_parameters().len(), &spec.name);
    if parts <= most {
        return Ok(());
    }
    Err(format!(
        "{name} has {most} layers with parameters and cannot be cut over {parts} ranks; use --placement layers:K with \
         K up to {most}"
    ))
}

fn list(layers: &[usize]) -> String {
    layers.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

fn ends_of(spec: &Spec, cuts: &[usize]) -> Vec<usize> {
    [&[0], cuts, &[spec.layers.len()]].concat()
}

fn has_parameters(spec: &Spec, layers: Range<usize>) -> bool {
    spec.layers_with_parameters().iter().any(|layer| layers.contains(layer))
}

/// As [`check`], of the cuts that rank 0 finds best by measuring the layers with batches of `batch` images. Collective.
///
/// # Errors
/// Errors of the communicator.
fn measure<E: Storage>(
    comm: &mut Communicator,
    spec: &Spec,
    parts: usize,
    (batch, threads, conv): (usize, usize, ConvPolicy),
) -> mgpu::Result<Vec<usize>> {
    let mut cuts = vec![0i64; parts - 1];
    if comm.rank() == 0 && parts > 1 {
        let times = stage_times::<E>(spec, (batch.min(MEASURED_BATCH), threads, conv))?;
        for (cut, best) in cuts.iter_mut().zip(best(spec, &times, parts)) {
            *cut = best as i64;
        }
    }
    comm.broadcast_slice(&mut cuts, 0)?;
    Ok(ends_of(spec, &cuts.into_iter().map(|cut| cut as usize).collect::<Vec<_>>()))
}

/// The first layer of each stage and the seconds of its passes.
fn stage_times<E: Storage>(
    spec: &Spec,
    (batch, threads, conv): (usize, usize, ConvPolicy),
) -> mgpu::Result<Vec<(usize, f64)>> {
    let mut net = Net::<E>::with_conv_policy(spec, batch, threads, conv);
    let (parameters, mut buffers) = (net.initial_parameters(1), net.initial_buffers());
    // Any values that are not all alike.
    let images: Vec<f32> = (0..batch * net.image_len()).map(|i| (i * 7919 % 256) as f32 / 255.0).collect();
    let labels: Vec<u8> = (0..batch).map(|i| (i % net.classes()) as u8).collect();
    let mut sink = Discarded { layout: net.layout().clone(), gradients: vec![0.0; net.layout().len()] };
    for step in 0..=MEASURED_STEPS as u64 {
        if step == 1 {
            net.start_profile();
        }
        let mode = Mode::Train { dropout: Some(DropoutKey { seed: 1, step, first_sample: 0 }) };
        net.forward(&parameters, &mut buffers, &images, mode, &mut sink)?;
        net.backward(&parameters, &labels, &mut sink)?;
    }
    let (_, stages) = net.profile().expect("a profile was started");
    Ok(stages.iter().map(|stage| (stage.layer, stage.forward + stage.backward)).collect())
}

/// A sink of gradients that nobody needs.
struct Discarded {
    layout: Layout,
    gradients: Vec<f32>,
}

impl GradientSink for Discarded {
    fn gradient(&mut self, tensor: usize) -> &mut [f32] {
        &mut self.gradients[self.layout.range(tensor)]
    }

    fn ready(&mut self, _: usize) -> mgpu::Result<()> {
        Ok(())
    }

    fn sum_over_ranks(&mut self, _: &mut [f64]) -> mgpu::Result<()> {
        Ok(())
    }
}

/// The cuts into `parts` parts whose slowest part takes least time. `times` has the first layer of each stage and its
/// seconds.
fn best(spec: &Spec, times: &[(usize, f64)], parts: usize) -> Vec<usize> {
    let of = |layers: Range<usize>| -> f64 {
        times.iter().filter(|(layer, _)| layers.contains(layer)).map(|(_, seconds)| seconds).sum()
    };
    // For each possible end of a part: the least time of the slowest of the parts up to there, and their cuts. Grows by
    // one part in each round.
    let ends: Vec<usize> = spec.cuts().into_iter().chain([spec.layers.len()]).collect();
    let first = |end: &usize| (*end, of(0..*end), Vec::new());
    let mut chains: Vec<(usize, f64, Vec<usize>)> = ends.iter().map(first).collect();
    for _ in 1..parts {
        let extended = |end: usize| {
            let possible =
                chains.iter().filter(|(begin, ..)| *begin < end && has_parameters(spec, *begin..end));
            let slowest = |(begin, slowest, _): &&(usize, f64, Vec<usize>)| slowest.max(of(*begin..end));
            let (begin, before, cuts) = possible.min_by(|a, b| slowest(a).total_cmp(&slowest(b)))?;
            Some((end, before.max(of(*begin..end)), [&cuts[..], &[*begin]].concat()))
        };
        chains = ends.iter().filter_map(|end| extended(*end)).collect();
    }
    let whole = chains.into_iter().find(|(end, ..)| *end == spec.layers.len());
    whole.expect("there are no more parts than layers with parameters").2
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(name: &str) -> Spec {
        Spec::named(name).unwrap()
    }

    #[test]
    fn the_slowest_part_is_as_fast_as_possible() {
        let lenet5 = spec("lenet5");
        // Convolutions 0 and 3, dense layers 7, 9 and 11.
        let times = [(0, 4.0), (3, 3.0), (7, 2.0), (9, 1.0), (11, 1.0)];
        assert!(best(&lenet5, &times, 1).is_empty());
        assert_eq!(best(&lenet5, &times, 2), [3]);
        assert_eq!(best(&lenet5, &times, 3), [3, 7]);
        assert_eq!(best(&lenet5, &times, 5), [3, 7, 9, 11]);
        // A GELU is no part of its own.
        let gelu = spec("mlp-gelu");
        let times = [(1, 1.0), (2, 50.0), (3, 1.0), (4, 1.0), (5, 1.0)];
        assert_eq!(best(&gelu, &times, 3), [2, 4]);
    }

    #[test]
    fn measured_cuts_exist() {
        for (name, batch) in [("lenet5", 2), ("mlp-gelu", 2)] {
            let (spec, measured) = (spec(name), (batch, 1, ConvPolicy::Auto));
            let times = stage_times::<f32>(&spec, measured).unwrap();
            assert!(times.iter().all(|(_, seconds)| *seconds > 0.0), "{times:?}");
            for parts in 1..=spec.layers_with_parameters().len() {
                check(&spec, &best(&spec, &times, parts), parts).unwrap();
            }
        }
    }

    #[test]
    fn cuts_that_do_not_exist_are_refused() {
        let error = |name: &str, cuts: &[usize], parts| check(&spec(name), cuts, parts).unwrap_err();
        assert_eq!(
            error("lenet5", &[5], 2),
            "--cut 5: lenet5 cannot be cut before layer 5, but before 3,7,9,11"
        );
        assert_eq!(error("lenet5", &[3, 7], 2), "--cut 3,7: 2 cuts, but 2 ranks need 1 cut");
        assert_eq!(error("lenet5", &[7, 3], 3), "--cut 7,3: the layers are not ascending");
        assert_eq!(error("lenet5", &[7, 7], 3), "--cut 7,7: the layers are not ascending");
        let empty = "--cut 2,3: there are no parameters from layer 2 to before layer 3";
        assert_eq!(error("mlp-gelu", &[2, 3], 3), empty);
        assert_eq!(check(&spec("lenet5"), &[3, 9], 3).unwrap(), [0, 3, 9, 12]);
        let error = check_count(&spec("lenet5"), 6).unwrap_err();
        assert!(
            error.starts_with("lenet5 has 5 layers with parameters and cannot be cut over 6 ranks"),
            "{error}"
        );
    }
}
