//! Names and shapes of the networks, gradients of a small one with every kind of layer, and invariance to splitting a
//! batch over ranks.

use std::sync::{Barrier, Mutex};

use half::bf16;
use mgpu::optimizer::{OptimizerConfig, Rule, Sgd};
use mgpu::{GradientSink, Layout, Result};
use mgpu_kernels::Storage;
use mgpu_kernels::rng::Stream;

use super::*;

/// Gradients of one rank in a flat arena, with an optional sum over ranks.
struct Sink<'a> {
    layout: Layout,
    gradients: Vec<f32>,
    announced: Vec<usize>,
    ranks: Option<&'a Ranks>,
}

/// Ranks as threads that sum one after another.
struct Ranks {
    barrier: Barrier,
    sum: Mutex<Vec<f64>>,
}

impl Ranks {
    fn sum(&self, values: &mut [f64]) {
        {
            let mut sum = self.sum.lock().unwrap();
            sum.resize(values.len(), 0.0);
            sum.iter_mut().zip(&*values).for_each(|(sum, value)| *sum += value);
        }
        self.barrier.wait();
        values.copy_from_slice(&self.sum.lock().unwrap());
        if self.barrier.wait().is_leader() {
            self.sum.lock().unwrap().clear();
        }
        self.barrier.wait();
    }
}

impl<'a> Sink<'a> {
    fn new<E: Storage>(net: &Net<E>, ranks: Option<&'a Ranks>) -> Self {
        let gradients = vec![f32::NAN; net.layout().len()];
        Sink { layout: net.layout().clone(), gradients, announced: Vec::new(), ranks }
    }
}

impl GradientSink for Sink<'_> {
    fn gradient(&mut self, tensor: usize) -> &mut [f32] {
        assert!(!self.announced.contains(&tensor), "tensor {tensor} is written after it was announced");
        &mut self.gradients[self.layout.range(tensor)]
    }

    fn ready(&mut self, tensor: usize) -> Result<()> {
        self.announced.push(tensor);
        Ok(())
    }

    fn sum_over_ranks(&mut self, values: &mut [f64]) -> Result<()> {
        if let Some(ranks) = self.ranks {
            ranks.sum(values);
        }
        Ok(())
    }
}

fn random(len: usize, stream: u64) -> Vec<f32> {
    let stream = Stream::new(42, stream);
    (0..len as u64).map(|i| stream.uniform(i)).collect()
}

/// All kinds of layers, small enough for finite differences.
fn tiny() -> Spec {
    let conv = |filters, padding| Layer::Conv { filters, kernel: 3, padding };
    Spec {
        name: "tiny".into(),
        input: [2, 11, 9],
        layers: vec![
            conv(4, Padding::Same),
            Layer::Relu,
            Layer::MaxPool(Rounding::Ceil),
            Layer::BatchNorm,
            conv(5, Padding::Valid),
            Layer::LeakyRelu,
            Layer::BatchNorm,
            Layer::Dropout(0.3),
            Layer::MaxPool(Rounding::Floor),
            Layer::Flatten,
            Layer::Dense(12),
            Layer::Relu,
            Layer::Dropout(0.5),
            Layer::Dense(10),
        ],
        optimizer: OptimizerConfig::new(Rule::Sgd(Sgd::default())),
        batch: 8,
    }
}

/// The same layers in unusual combinations: nothing can be fused, and the flattened image is not read by a dense
/// layer.
fn odd() -> Spec {
    Spec {
        layers: vec![
            Layer::Dropout(0.1),
            Layer::MaxPool(Rounding::Ceil),
            Layer::Conv { filters: 4, kernel: 3, padding: Padding::Same },
            Layer::MaxPool(Rounding::Floor),
            Layer::LeakyRelu,
            Layer::Dropout(0.2),
            Layer::Flatten,
            Layer::LeakyRelu,
            Layer::BatchNorm,
            Layer::Dense(12),
            Layer::Dropout(0.2),
            Layer::LeakyRelu,
            Layer::Dense(10),
        ],
        ..tiny()
    }
}

/// GELUs on images and on vectors, alone and before layers that a convolution or a dense layer would otherwise fuse.
fn smooth() -> Spec {
    Spec {
        layers: vec![
            Layer::Conv { filters: 4, kernel: 3, padding: Padding::Same },
            Layer::Gelu,
            Layer::MaxPool(Rounding::Ceil),
            Layer::Conv { filters: 5, kernel: 3, padding: Padding::Valid },
            Layer::BatchNorm,
            Layer::Gelu,
            Layer::Dropout(0.2),
            Layer::Flatten,
            Layer::Dense(12),
            Layer::Gelu,
            Layer::Relu,
            Layer::Dense(10),
        ],
        ..tiny()
    }
}

/// Enough channels for all algorithms.
fn wide() -> Spec {
    let conv = |filters| Layer::Conv { filters, kernel: 3, padding: Padding::Same };
    let head = [Layer::MaxPool(Rounding::Floor), Layer::Flatten, Layer::Dense(10)];
    let layers = [conv(32), Layer::Relu, conv(64), Layer::LeakyRelu].into_iter().chain(head).collect();
    Spec { input: [1, 28, 28], layers, ..tiny() }
}

const BATCH: usize = 8;
const LABELS: [u8; BATCH] = [3, 1, 4, 1, 5, 9, 2, 6];

fn with_dropout(first_sample: u64) -> Mode {
    Mode::Train { dropout: Some(DropoutKey { seed: 5, step: 7, first_sample }) }
}

#[test]
fn layouts_have_the_reference_names_shapes_and_sizes() {
    let deep = Net::new(&Spec::named("deep").unwrap(), 1, 1);
    let tensors: Vec<_> =
        deep.layout().tensors().iter().map(|tensor| (&tensor.name[..], &tensor.shape[..])).collect();
    let expected: [(&str, &[usize]); 8] = [
        ("0.weight", &[64, 1, 5, 5]),
        ("0.bias", &[64]),
        ("3.weight", &[128, 64, 5, 5]),
        ("3.bias", &[128]),
        ("7.weight", &[1024, 6272]),
        ("7.bias", &[1024]),
        ("10.weight", &[10, 1024]),
        ("10.bias", &[10]),
    ];
    assert_eq!(tensors, expected);

    // Number of layers with parameters, number of parameters, and number of running statistics.
    let expected: [(&str, &[usize], usize, usize); 8] = [
        ("lenet5", &[0, 3, 7, 9, 11], 61_706, 0),
        ("deep", &[0, 3, 7, 10], 6_640_394, 0),
        ("keras", &[0, 2, 4, 5, 10, 13], 2_353_738, 512),
        ("ensemble2400", &[0, 4, 8, 13, 16], 5_053_034, 0),
        ("ensemble4800", &[0, 4, 8, 13, 16], 9_994_634, 0),
        ("layers", &[0, 3, 5, 9, 11, 13], 20_217_226, 0),
        ("conv6", &[0, 2, 5, 7, 10, 12, 16], 1_014_922, 0),
        ("mlp-gelu", &[1, 3, 5], 269_322, 0),
    ];
    assert_eq!(names(), expected.map(|net| net.0));
    for (name, indices, parameters, buffers) in expected {
        let net = Net::new(&Spec::named(name).unwrap(), 1, 1);
        let names: Vec<_> = net.layout().tensors().iter().map(|tensor| tensor.name.clone()).collect();
        let pairs = indices.iter().flat_map(|i| [format!("{i}.weight"), format!("{i}.bias")]);
        assert_eq!(names, pairs.collect::<Vec<_>>(), "{name}");
        assert_eq!(net.layout().len(), parameters, "{name}");
        assert_eq!(net.buffers_layout().len(), buffers, "{name}");
        assert_eq!((net.image_len(), net.classes()), (784, 10));
    }
}

#[test]
fn an_unknown_network_is_refused_with_the_known_ones() {
    let error = Spec::named("vgg").unwrap_err().to_string();
    assert_eq!(
        error,
        "there is no network `vgg`; known are lenet5, deep, keras, ensemble2400, ensemble4800, layers, \
         conv6, mlp-gelu"
    );
}

#[test]
fn gradients_match_finite_differences() {
    check_gradients(&tiny(), 1e-3);
    // Features that differ little between images are amplified a lot, so the loss is linear only over shorter
    // distances.
    check_gradients(&odd(), 1e-4);
    check_gradients(&smooth(), 1e-3);
}

fn check_gradients(spec: &Spec, by: f32) {
    let mut net = Net::new(spec, BATCH, 2);
    let images = random(BATCH * net.image_len(), 1);
    let params = net.golden_parameters(3);
    let mut sink = Sink::new(&net, None);
    let mut buffers = net.initial_buffers();
    net.forward(&params, &mut buffers, &images, with_dropout(0), &mut sink).unwrap();
    let report = net.backward(&params, &LABELS, &mut sink).unwrap();
    assert_eq!(report, net.score(&LABELS));
    assert_eq!(sink.announced, (0..sink.layout.tensors().len()).rev().collect::<Vec<_>>());

    let gradients = sink.gradients.clone();
    let mut loss_at = |params: &[f32]| {
        let mut sink = Sink::new(&net, None);
        let mut buffers = net.initial_buffers();
        net.forward(params, &mut buffers, &images, with_dropout(0), &mut sink).unwrap();
        net.score(&LABELS).loss()
    };
    for (index, tensor) in sink.layout.tensors().iter().enumerate() {
        let gradient = &gradients[tensor.range()];
        let norm = gradient.iter().map(|g| g * g).sum::<f32>().sqrt();
        // Along the gradient, where the loss changes most, and along a direction independent of it.
        let steepest: Vec<f32> = gradient.iter().map(|g| g / norm).collect();
        let signs: Vec<f32> = random(tensor.len(), 100 + index as u64);
        let scale = 1.0 / (tensor.len() as f32).sqrt();
        let signs: Vec<f32> = signs.iter().map(|&v| if v < 0.5 { scale } else { -scale }).collect();
        for direction in [steepest, signs] {
            let slope: f64 = gradient.iter().zip(&direction).map(|(g, d)| f64::from(g * d)).sum();
            let mut moved = |by: f32| {
                let mut params = params.clone();
                params[tensor.range()].iter_mut().zip(&direction).for_each(|(p, d)| *p += by * d);
                loss_at(&params)
            };
            let measured = (moved(by) - moved(-by)) / f64::from(2.0 * by);
            // Tolerance for f32 rounding of the loss, and for the kinks of rectifiers and maxima.
            let tolerance = 0.02 * f64::from(norm) + 5e-4;
            assert!((measured - slope).abs() < tolerance, "{}: {measured} is not {slope}", tensor.name);
        }
    }
}

/// Labels are the predictions, and the last layer's weights are so large that other probabilities are down to 10⁻⁴³.
#[test]
fn gradients_of_a_learnt_batch_are_not_subnormal() {
    for spec in [tiny(), odd(), smooth(), wide()] {
        let mut net = Net::new(&spec, BATCH, 2);
        let images = random(BATCH * net.image_len(), 1);
        let mut params = net.golden_parameters(3);
        let mut sink = Sink::new(&net, None);
        let [.., weights, biases] = sink.layout.tensors() else { panic!("no last layer") };
        let last_layer = weights.range().start..biases.range().end;
        let mut logits = |params: &[f32]| {
            let mut buffers = net.initial_buffers();
            net.forward(params, &mut buffers, &images, with_dropout(0), &mut sink).unwrap().to_vec()
        };
        let spread = |row: &[f32]| {
            row.iter().fold(f32::MIN, |most, &z| most.max(z))
                - row.iter().fold(f32::MAX, |least, &z| least.min(z))
        };
        let widest = logits(&params).chunks(10).map(spread).fold(0.0, f32::max);
        params[last_layer].iter_mut().for_each(|param| *param *= 98.0 / widest);
        let logits = logits(&params);
        let best = |row: &[f32]| (0..10).fold(0, |best, k| if row[k] > row[best] { k } else { best }) as u8;
        let labels: Vec<u8> = logits.chunks(10).map(best).collect();
        net.backward(&params, &labels, &mut sink).unwrap();
        let subnormal = sink.gradients.iter().filter(|gradient| gradient.is_subnormal()).count();
        assert_eq!(subnormal, 0, "of {} gradients", sink.gradients.len());
    }
}

/// Gradients, running statistics and report of each rank for a batch split over `ranks` ranks.
fn train_split(ranks: usize) -> Vec<(Vec<f32>, Vec<f32>, LossReport)> {
    let shared = Ranks { barrier: Barrier::new(ranks), sum: Mutex::default() };
    let share = BATCH / ranks;
    std::thread::scope(|scope| {
        let run = |rank: usize| {
            let shared = &shared;
            scope.spawn(move || {
                let mut net = Net::new(&tiny(), share, 1 + rank);
                let images = random(BATCH * net.image_len(), 1);
                let images = &images[rank * share * net.image_len()..][..share * net.image_len()];
                let (params, mut buffers) = (net.golden_parameters(3), net.initial_buffers());
                let mut sink = Sink::new(&net, Some(shared));
                let mode = with_dropout((rank * share) as u64);
                net.forward(&params, &mut buffers, images, mode, &mut sink).unwrap();
                let report = net.backward(&params, &LABELS[rank * share..][..share], &mut sink).unwrap();
                (sink.gradients, buffers, report)
            })
        };
        let ranks: Vec<_> = (0..ranks).map(run).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn a_batch_split_over_ranks_gives_the_same_average_gradient() {
    let [(whole, buffers, report)] = &train_split(1)[..] else { panic!("one rank") };
    for ranks in [2, 4] {
        let split = train_split(ranks);
        let close = |a: f32, b: f32| (a - b).abs() < 2e-6 * a.abs().max(1.0);
        for (i, &gradient) in whole.iter().enumerate() {
            let average = split.iter().map(|rank| rank.0[i]).sum::<f32>() / ranks as f32;
            assert!(close(gradient, average), "element {i} of {ranks} ranks: {average} is not {gradient}");
        }
        let mut total = LossReport::default();
        for rank in &split {
            assert!(buffers.iter().zip(&rank.1).all(|(&a, &b)| close(a, b)));
            total += rank.2;
        }
        assert_eq!((total.correct, total.samples), (report.correct, report.samples));
        assert!((total.loss_sum - report.loss_sum).abs() < 1e-5);
    }
}

#[test]
fn a_step_repeats_bit_for_bit_and_follows_its_dropout_key() {
    let run = |key: Option<DropoutKey>| {
        let mut net = Net::new(&tiny(), BATCH, 2);
        let images = random(BATCH * net.image_len(), 1);
        let (params, mut buffers) = (net.initial_parameters(1), net.initial_buffers());
        let mut sink = Sink::new(&net, None);
        net.forward(&params, &mut buffers, &images, Mode::Train { dropout: key }, &mut sink).unwrap();
        net.backward(&params, &LABELS, &mut sink).unwrap();
        sink.gradients
    };
    let key = DropoutKey { seed: 1, step: 2, first_sample: 0 };
    assert_eq!(run(Some(key)), run(Some(key)));
    assert_ne!(run(Some(key)), run(Some(DropoutKey { step: 3, ..key })));
    assert_ne!(run(Some(key)), run(Some(DropoutKey { seed: 2, ..key })));
    assert_ne!(run(Some(key)), run(None));
}

#[test]
fn evaluation_does_not_depend_on_the_rest_of_the_batch() {
    let mut net = Net::new(&tiny(), BATCH, 1);
    let images = random(BATCH * net.image_len(), 1);
    let (params, mut buffers) = (net.initial_parameters(1), net.initial_buffers());
    let mut sink = Sink::new(&net, None);
    net.forward(&params, &mut buffers, &images, with_dropout(0), &mut sink).unwrap();
    let together = net.predict(&params, &buffers, &images).to_vec();
    for (image, expected) in images.chunks(net.image_len()).zip(together.chunks(10)) {
        let alone = net.predict(&params, &buffers, image);
        assert!(alone.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-5), "{alone:?} {expected:?}");
    }
}

#[test]
fn initial_weights_fill_their_bounds_and_depend_on_the_seed() {
    let net = Net::new(&Spec::named("lenet5").unwrap(), 1, 1);
    let params = net.initial_parameters(1);
    // The second dense layer is followed by a rectifier, the last one is not.
    for (tensor, bound) in [(6, (6.0f32 / 120.0).sqrt()), (8, (1.0f32 / 84.0).sqrt())] {
        let weights = &params[net.layout().range(tensor)];
        let largest = weights.iter().fold(0.0f32, |largest, weight| largest.max(weight.abs()));
        assert!(largest <= bound && largest > 0.95 * bound);
    }
    assert!(params[net.layout().range(7)].iter().all(|&bias| bias == 0.0));
    assert_ne!(params, net.initial_parameters(2));
}

#[test]
#[should_panic(expected = "layer 1: a dense layer needs a flattened input")]
fn a_dense_layer_on_an_image_is_refused() {
    Net::new(&Spec { layers: vec![Layer::BatchNorm, Layer::Dense(3)], ..tiny() }, 1, 1);
}

#[test]
#[should_panic(expected = "a network ends in a number for each class")]
fn a_network_must_end_in_class_scores() {
    Net::new(&Spec { layers: vec![Layer::BatchNorm], ..tiny() }, 1, 1);
}

/// Logits and gradients of a batch, with the convolution algorithms of `choice`.
fn train_by<E: Storage>(choice: ConvPolicy, spec: &Spec) -> (Net<E>, Vec<f32>, Sink<'static>) {
    let mut net = Net::<E>::with_conv_policy(spec, BATCH, 2, choice);
    let images = random(BATCH * net.image_len(), 1);
    let (params, mut buffers) = (net.golden_parameters(3), net.initial_buffers());
    let mut sink = Sink::new(&net, None);
    net.forward(&params, &mut buffers, &images, with_dropout(0), &mut sink).unwrap();
    net.backward(&params, &LABELS, &mut sink).unwrap();
    let logits = net.logits().to_vec();
    (net, logits, sink)
}

#[test]
fn convolutions_by_any_algorithm_train_alike() {
    let spec = wide();
    let (auto, auto_logits, auto_sink) = train_by::<f32>(ConvPolicy::Auto, &spec);
    let (direct, logits, sink) = train_by::<f32>(ConvPolicy::Direct, &spec);
    assert_eq!(
        direct.describe(),
        [
            "0 conv 32 3x3 same of 1x28x28, relu: direct",
            "2 conv 64 3x3 same of 32x28x28, leaky relu, pool: direct"
        ]
    );
    assert!(auto.describe()[1].ends_with(": winograd 4x4, 6x6"), "{:?}", auto.describe());
    let largest = |values: &[f32]| values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    let mut pairs = vec![(&logits[..], &auto_logits[..])];
    let tensors = sink.layout.tensors().iter().map(|tensor| tensor.range());
    pairs.extend(tensors.map(|range| (&sink.gradients[range.clone()], &auto_sink.gradients[range])));
    for (by_definition, other) in pairs {
        let tolerance = 1e-4 * largest(by_definition);
        assert!(by_definition.iter().zip(other).all(|(a, b)| (a - b).abs() < tolerance));
    }
}

/// Images in bf16 are rounded to 8 bits in each layer, and gradients again in the backward pass.
#[test]
fn bf16_images_train_almost_equally() {
    let norm = |values: &[f32]| values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
    for spec in [tiny(), wide(), smooth()] {
        let (_, wide_logits, wide) = train_by::<f32>(ConvPolicy::Auto, &spec);
        let (_, logits, narrow) = train_by::<bf16>(ConvPolicy::Auto, &spec);
        let difference: Vec<f32> = logits.iter().zip(&wide_logits).map(|(a, b)| a - b).collect();
        let logits = norm(&difference) / norm(&wide_logits);
        assert!((1e-6..0.03).contains(&logits), "logits differ by {logits:e} of their size");
        // A rounding that changes the maximum of a window moves a whole contribution.
        let difference: Vec<f32> = narrow.gradients.iter().zip(&wide.gradients).map(|(a, b)| a - b).collect();
        let gradients = norm(&difference) / norm(&wide.gradients);
        assert!((1e-6..0.15).contains(&gradients), "gradients differ by {gradients:e} of their size");
    }
}

#[test]
fn a_profile_names_every_stage_and_counts_multiplications() {
    let mut net = Net::new(&tiny(), BATCH, 1);
    assert!(net.profile().is_none());
    net.start_profile();
    let images = random(BATCH * net.image_len(), 1);
    let (params, mut buffers) = (net.golden_parameters(3), net.initial_buffers());
    let mut sink = Sink::new(&net, None);
    net.forward(&params, &mut buffers, &images, with_dropout(0), &mut sink).unwrap();
    net.backward(&params, &LABELS, &mut sink).unwrap();
    let (profile, stages) = net.profile().unwrap();
    assert_eq!(profile.steps(), 1);
    let names: Vec<_> = stages.iter().map(|stage| &stage.name[..]).collect();
    let expected = [
        "0 conv 4 3x3 same of 2x11x9, relu, pool",
        "3 batch norm",
        "4 conv 5 3x3 valid of 4x6x5, leaky relu",
        "6 batch norm",
        "7 dropout 0.3",
        "8 pool of 5x4x3",
        "10 dense 12 of 10, relu",
        "12 dropout 0.5",
        "13 dense 10 of 12",
    ];
    assert_eq!(names, expected);
    // The first layer has no input gradient; two operations per product.
    assert_eq!(stages[0].operations, (BATCH * 4 * 11 * 9 * 2 * 9 * 2 * 2) as f64);
    assert_eq!(stages[8].operations, (BATCH * 10 * 12 * 2 * 3) as f64);
    assert!(stages.iter().all(|stage| stage.forward > 0.0 && stage.backward > 0.0));
}

/// Logits and gradients of two batches, one after the other, and the running statistics.
fn train_whole<E: Storage>(spec: &Spec) -> (Vec<Vec<f32>>, Vec<f32>) {
    let mut net = Net::<E>::with_conv_policy(spec, BATCH, 1, ConvPolicy::Auto);
    let (params, mut buffers) = (net.initial_parameters(3), net.initial_buffers());
    let mut results = Vec::new();
    for batch in 0..2 {
        let images = random(BATCH * net.image_len(), batch);
        let mut sink = Sink::new(&net, None);
        net.forward(&params, &mut buffers, &images, with_dropout(batch), &mut sink).unwrap();
        net.backward(&params, &LABELS, &mut sink).unwrap();
        results.push([net.logits(), &sink.gradients].concat());
    }
    (results, buffers)
}

fn copy<E: Storage>(from: Activations<'_, E>, to: Activations<'_, E>) {
    match (from, to) {
        (Activations::Images(from), Activations::Images(to)) => to.copy_from_slice(from),
        (Activations::Vectors(from), Activations::Vectors(to)) => to.copy_from_slice(from),
        (from, to) => panic!("{from:?} and {to:?} at the ends of a cut"),
    }
}

/// The same of the parts between `cuts`: first both forward passes, then both backward passes.
fn train_parts<E: Storage>(spec: &Spec, cuts: &[usize]) -> (Vec<Vec<f32>>, Vec<f32>) {
    let ends: Vec<usize> = [&[0], cuts, &[spec.layers.len()]].concat();
    let part = |ends: &[usize]| Net::<E>::part(spec, ends[0]..ends[1], (BATCH, 2), 1, ConvPolicy::Auto);
    let mut parts: Vec<Net<E>> = ends.windows(2).map(part).collect();
    let params: Vec<_> = parts.iter().map(|part| part.initial_parameters(3)).collect();
    let mut buffers: Vec<_> = parts.iter().map(Net::initial_buffers).collect();
    let image_len = parts[0].image_len();
    let last = parts.len() - 1;
    for batch in 0..2 {
        let images = random(BATCH * image_len, batch as u64);
        for index in 0..=last {
            let (done, rest) = parts.split_at_mut(index);
            rest[0].select_batch(batch, batch);
            if let Some(before) = done.last_mut() {
                copy(before.output(), rest[0].input(BATCH));
            }
            let (params, buffers) = (&params[index], &mut buffers[index]);
            let mut sink = Sink::new(&rest[0], None);
            let images = (index == 0).then_some(&images[..]);
            rest[0].forward_part(params, buffers, images, with_dropout(batch as u64), &mut sink).unwrap();
        }
    }
    let mut results = Vec::new();
    for batch in 0..2 {
        parts.iter_mut().for_each(|part| part.select_batch(batch, batch));
        let mut gradients = Vec::new();
        for index in (0..=last).rev() {
            let (rest, done) = parts.split_at_mut(index + 1);
            let part = &mut rest[index];
            let mut sink = Sink::new(part, None);
            if let Some(after) = done.first_mut() {
                copy(after.input_gradient(), part.output_gradient());
                part.backward_part(&params[index], &mut sink).unwrap();
            } else {
                part.backward(&params[index], &LABELS, &mut sink).unwrap();
            }
            gradients.splice(0..0, sink.gradients);
        }
        results.push([parts[last].logits(), &gradients].concat());
    }
    (results, buffers.concat())
}

fn parts_train_the_bits_of_the_whole<E: Storage>(spec: &Spec) {
    let cuts = spec.cuts();
    let whole = train_whole::<E>(spec);
    for cuts in cuts.iter().map(std::slice::from_ref) {
        assert!(train_parts::<E>(spec, cuts) == whole, "{} cut at {cuts:?}", spec.name);
    }
    let enough = |cut: &usize| spec.layers_with_parameters().contains(cut);
    let cuts: Vec<usize> = cuts.into_iter().filter(enough).collect();
    assert!(train_parts::<E>(spec, &cuts) == whole, "{} cut at {cuts:?}", spec.name);
}

#[test]
fn parts_of_a_network_train_the_bits_of_the_whole() {
    assert_eq!(tiny().cuts(), [3, 4, 6, 8, 10, 13]);
    assert_eq!(odd().cuts(), [8, 9, 12]);
    for spec in [tiny(), odd(), smooth()] {
        parts_train_the_bits_of_the_whole::<f32>(&spec);
        parts_train_the_bits_of_the_whole::<bf16>(&spec);
    }
}
