//! Networks that are cut over ranks. Every rank trains a part of each network, and prints a line for each of its tensors:
//! network, precision, micro-batches, tensor, and checksums of its gradients in the last step and of its weights. One
//! rank trains whole networks. With several ranks, networks are cut in several ways, and the cuts follow in each line.

use std::sync::Arc;

use mgpu::device::{DeviceConfig, DeviceDataParallel};
use mgpu::optimizer::{OptimizerConfig, Rule, Sgd};
use mgpu::replicate::checksum;
use mgpu::{Communicator, DataParallelConfig, DeviceCommunicator, Result, World};
use mgpu_examples::nets::{DeviceData, DeviceDropout, DeviceNet, Layer, Neighbours, Spec, names};
use mgpu_kernels::Precision;
use mgpu_kernels::cuda::{AutotuneOptions, Libraries, Stream};

/// Rows and columns of an image.
const SIDE: usize = 16;
/// Images of a micro-batch.
const IMAGES: usize = 4;
const STEPS: usize = 2;
const CLASSES: usize = 10;

/// Trains all networks in `precision`, with 1 and with 3 micro-batches.
pub(crate) fn train(world: &mut World, precision: &str) -> Result<()> {
    let precision = Precision::ALL.into_iter().find(|known| known.name() == precision).expect("a precision");
    let (device, mut host) = world.communicators()?;
    for name in names() {
        let spec = scaled_down(name);
        for cuts in cuts(&spec, device.size() as usize - 1) {
            for micro_batches in [1, 3] {
                let lines = train_part(&device, &mut host, &spec, &cuts, precision, micro_batches)?;
                let cuts: Vec<String> = cuts.iter().map(usize::to_string).collect();
                for line in lines {
                    println!("{name} {precision} {micro_batches} {line} {}", cuts.join(","));
                }
            }
        }
    }
    Ok(())
}

/// The network for smaller images and with an eighth of the channels, where there are many: the same stages, and
/// numbers of channels that suit wide accesses and that do not.
fn scaled_down(name: &str) -> Spec {
    let spec = Spec::named(name).expect("a known network");
    let fewer = |channels: usize| if channels < 64 { channels } else { channels / 8 };
    let layers = spec.layers.iter().map(|layer| match *layer {
        Layer::Conv { filters, kernel, padding } => Layer::Conv { filters: fewer(filters), kernel, padding },
        Layer::Dense(outputs) => Layer::Dense(fewer(outputs)),
        other => other,
    });
    Spec { layers: layers.collect(), input: [1, SIDE, SIDE], ..spec }
}

/// All sets of `count` cuts that follow each other, such that each part has parameters: each part of the network
/// between two cuts is once alone on a rank, and each beginning and each end.
fn cuts(spec: &Spec, count: usize) -> Vec<Vec<usize>> {
    if count == 0 {
        return vec![Vec::new()];
    }
    let trained = spec.layers_with_parameters();
    let all = spec.cuts().into_iter().filter(|cut| count == 1 || trained.contains(cut));
    all.collect::<Vec<_>>().windows(count).map(<[usize]>::to_vec).collect()
}

/// A line for each tensor of this rank's part.
fn train_part(
    device: &Arc<DeviceCommunicator>,
    host: &mut Communicator,
    spec: &Spec,
    cuts: &[usize],
    precision: Precision,
    micro_batches: usize,
) -> Result<Vec<String>> {
    let (rank, parts) = (device.rank() as usize, device.size() as usize);
    let ends = [&[0], cuts, &[spec.layers.len()]].concat();
    let own = Some(device.rank());
    let column = device.split(own, 0)?.expect("a rank with a colour has a group");
    let host_column = host.split(own, 0)?.expect("a rank with a colour has a group");
    let set_up = Stream::new(device.device())?;
    let kernels = AutotuneOptions { libraries: Libraries::Builtin, ..AutotuneOptions::default() };
    let mut net = if parts == 1 {
        DeviceNet::new(spec, IMAGES, precision, kernels, &set_up)?
    } else {
        let batches = (IMAGES, micro_batches.min(parts - rank));
        DeviceNet::part(spec, ends[rank]..ends[rank + 1], batches, precision, kernels, &set_up)?
    };
    let rule = Rule::Sgd(Sgd { lr: 0.05, ..Sgd::default() });
    let parallel = DataParallelConfig::new(OptimizerConfig::new(rule), 1).with_micro_batches(micro_batches);
    let config =
        DeviceConfig::new(parallel).with_steps_per_epoch(STEPS as u64).with_copy_in(precision.storage());
    let parameters = net.to_device(&net.initial_parameters(1));
    let model =
        DeviceDataParallel::new(Arc::new(column), host_column, net.layout().clone(), parameters, config)?;
    let mut model = model.with_buffers(&net.initial_buffers())?;

    let images = STEPS * micro_batches * IMAGES;
    let pixels: Vec<u8> = (0..images * SIDE * SIDE).map(|at| (at * at * 31 % 251) as u8).collect();
    let labels: Vec<u8> = (0..images).map(|image| (image * 7 % CLASSES) as u8).collect();
    let data = DeviceData::new(model.stream(), &pixels, &labels, images)?;
    data.set_order(model.stream(), &(0..images as u32).collect::<Vec<_>>())?;
    let dropout = Some(DeviceDropout { seed: 1, first_sample: 0 });
    let stage = rank as u32;
    let behind = (rank + 1 < parts).then_some(stage + 1);
    let neighbours = Neighbours { comm: device, before: stage.checked_sub(1), behind };
    let trained = (0..STEPS).try_for_each(|_| {
        match parts {
            1 => net.step(&mut model, &data, dropout)?,
            _ => net.pipeline_step(&mut model, &data, dropout, &neighbours)?,
        }
        device.wait(model.stream(), "a step")?;
        model.check()
    });
    if trained.is_err() {
        // Work that has been enqueued uses memory that is freed now.
        device.drain(model.stream());
    }
    trained?;
    let [gradients, weights] = [model.gradients()?, model.parameters()?];
    let line = |name: &str, values: &[&[f32]]| {
        let sums: Vec<String> = values.iter().map(|values| format!("{:016x}", checksum(values))).collect();
        format!("{name} {}", sums.join(" "))
    };
    let tensors = net.layout().tensors().iter();
    let mut lines: Vec<String> = tensors
        .map(|tensor| line(&tensor.name, &[&gradients[tensor.range()], &weights[tensor.range()]]))
        .collect();
    let buffers = model.buffers().to_vec::<f32>(model.stream())?;
    let statistics = net.buffers_layout().tensors().iter();
    lines.extend(statistics.map(|tensor| line(&tensor.name, &[&buffers[tensor.range()]])));
    Ok(lines)
}
