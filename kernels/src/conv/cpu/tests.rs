//! All passes compared with their definition, and the algorithms with each other.

use half::f16;
use proptest::prelude::*;

use super::*;
use crate::conv::Padding;
use crate::reference::{assert_close, narrow, random, widen};

const AUTO: ConvOptions = ConvOptions { policy: ConvPolicy::Auto, engine: None, storage: DType::F32 };
const DIRECT: ConvOptions = ConvOptions { policy: ConvPolicy::Direct, ..AUTO };

/// The results of the definition, in `f64`.
struct Expected {
    y: Vec<f64>,
    /// Outputs before activation and pooling.
    outputs: Vec<f64>,
}

/// Calls `visit(output index, w index, x index)` for every product in the definition, images with channels last.
pub(super) fn for_each_product(shape: &ConvShape, images: usize, mut visit: impl FnMut(usize, usize, usize)) {
    let ConvShape { channels, height, width, filters, kernel, .. } = *shape;
    let (oh, ow, pad) = (shape.out_height(), shape.out_width(), shape.pad());
    for (n, i, j) in (0..images * oh * ow).map(|at| (at / (oh * ow), at / ow % oh, at % ow)) {
        for (u, v) in (0..kernel * kernel).map(|at| (at / kernel, at % kernel)) {
            let (row, col) = ((i + u).wrapping_sub(pad), (j + v).wrapping_sub(pad));
            if row < height && col < width {
                for (f, c) in (0..filters * channels).map(|at| (at / channels, at % channels)) {
                    let y = ((n * oh + i) * ow + j) * filters + f;
                    let w = ((f * channels + c) * kernel + u) * kernel + v;
                    let x = ((n * height + row) * width + col) * channels + c;
                    visit(y, w, x);
                }
            }
        }
    }
}

fn forward(
    shape: &ConvShape,
    epilogue: &Epilogue,
    images: usize,
    x: &[f32],
    w: &[f32],
    b: &[f32],
) -> Expected {
    let f = shape.filters;
    let mut outputs: Vec<f64> = (0..images * shape.output_len()).map(|at| f64::from(b[at % f])).collect();
    for_each_product(shape, images, |y, wi, xi| outputs[y] += f64::from(w[wi]) * f64::from(x[xi]));
    let slope = f64::from(epilogue.slope.unwrap_or(1.0));
    let active: Vec<f64> = outputs.iter().map(|&v| if v > 0.0 { v } else { v * slope }).collect();
    let (oh, ow) = (shape.out_height(), shape.out_width());
    let (rows, columns) = epilogue.result(shape);
    if epilogue.pool.is_none() {
        return Expected { y: active, outputs };
    }
    let y = (0..images * rows * columns * f).map(|at| {
        let (n, i, j, f) = (at / f / columns / rows, at / f / columns % rows, at / f % columns, at % f);
        let inside = (0..4).map(|p| (2 * i + p / 2, 2 * j + p % 2)).filter(|&(r, c)| r < oh && c < ow);
        let values = inside.map(|(r, c)| active[((n * oh + r) * ow + c) * shape.filters + f]);
        values.fold(f64::NEG_INFINITY, f64::max)
    });
    Expected { y: y.collect(), outputs }
}

/// The gradient before activation and pooling, given the positions that the forward pass chose.
fn before_epilogue(
    shape: &ConvShape,
    epilogue: &Epilogue,
    y: &[f32],
    chosen: &[u8],
    dy: &[f32],
    outputs: usize,
) -> Vec<f32> {
    let slope = epilogue.slope.unwrap_or(1.0);
    let active = dy.iter().zip(y).map(|(&dy, &y)| if y > 0.0 { dy } else { dy * slope });
    if epilogue.pool.is_none() {
        return active.collect();
    }
    let mut gradient = vec![0.0; outputs];
    let (oh, ow, f) = (shape.out_height(), shape.out_width(), shape.filters);
    let (rows, columns) = epilogue.result(shape);
    for (at, value) in active.enumerate() {
        let (n, i, j) = (at / f / columns / rows, at / f / columns % rows, at / f % columns);
        let (u, v) = (usize::from(chosen[at]) / 2, usize::from(chosen[at]) % 2);
        assert!(2 * i + u < oh && 2 * j + v < ow, "a chosen position outside the image");
        gradient[((n * oh + 2 * i + u) * ow + 2 * j + v) * f + at % f] = value;
    }
    gradient
}

/// All results of a convolution.
#[derive(Debug, PartialEq)]
struct Passes<E> {
    y: Vec<E>,
    chosen: Vec<u8>,
    dw: Vec<f32>,
    db: Vec<f32>,
    dx: Vec<E>,
}

/// As [`inputs`], of which an engine's operands are bf16 numbers.
fn inputs_for(options: ConvOptions, shape: &ConvShape, epilogue: &Epilogue, images: usize) -> [Vec<f32>; 4] {
    let [x, w, b, dy] = inputs(shape, epilogue, images);
    match options.engine {
        Some(_) => [widen(&narrow(&x)), widen(&narrow(&w)), b, widen(&narrow(&dy))],
        None => [x, w, b, dy],
    }
}

/// Inputs of a batch: x, w, b, dy.
fn inputs(shape: &ConvShape, epilogue: &Epilogue, images: usize) -> [Vec<f32>; 4] {
    let (rows, columns) = epilogue.result(shape);
    [
        random(images * shape.input_len(), 1),
        random(shape.weights_len(), 2),
        random(shape.filters, 3),
        random(images * rows * columns * shape.filters, 4),
    ]
}

/// All passes, computed twice with the same memory, and the results compared.
fn compute(
    shape: ConvShape,
    epilogue: Epilogue,
    options: ConvOptions,
    images: usize,
    count: usize,
) -> Passes<f32> {
    let [x, w, b, dy] = inputs_for(options, &shape, &epilogue, images);
    compute_from((shape, epilogue, options), count, (&x, &w, &b, &dy), None)
}

/// As [`compute`], from given inputs x, w, b and dy. The backward pass uses `result`, if given, instead of the
/// computed result.
fn compute_from<E: Storage + PartialEq>(
    (shape, epilogue, options): (ConvShape, Epilogue, ConvOptions),
    count: usize,
    (x, w, b, dy): (&[E], &[f32], &[f32], &[E]),
    result: Option<&[E]>,
) -> Passes<E> {
    let threads = Threads::new(count);
    let mut scratch = Scratch::new(&threads);
    let mut conv = Conv::new(shape, epilogue, options);
    let mut run = || {
        let (mut y, mut chosen) = (vec![E::narrow(f32::NAN); dy.len()], vec![9; dy.len()]);
        chosen.truncate(if epilogue.pool.is_some() { dy.len() } else { 0 });
        conv.forward(&threads, &mut scratch, x, w, b, &mut y, &mut chosen);
        let from = Backward { x, weights: w, y: result.unwrap_or(&y), chosen: &chosen, dy };
        let (mut dw, mut db, mut dx) =
            (vec![f32::NAN; w.len()], vec![f32::NAN; b.len()], vec![E::narrow(f32::NAN); x.len()]);
        conv.backward(&threads, &mut scratch, from, &mut dw, &mut db, Some(&mut dx));
        let (mut only_dw, mut only_db) = (dw.clone(), db.clone());
        conv.backward(&threads, &mut scratch, from, &mut only_dw, &mut only_db, None);
        assert!(only_dw == dw && only_db == db, "the gradients differ if that of the input is not requested");
        Passes { y, chosen, dw, db, dx }
    };
    let first = run();
    assert!(run() == first, "the second run differs");
    first
}

fn check(
    shape: ConvShape,
    epilogue: Epilogue,
    options: ConvOptions,
    images: usize,
    count: usize,
    tolerance: f64,
) {
    let [x, w, b, dy] = inputs_for(options, &shape, &epilogue, images);
    let passes = compute(shape, epilogue, options, images, count);
    let expected = forward(&shape, &epilogue, images, &x, &w, &b);
    assert_close(&passes.y, &expected.y, tolerance);
    let outputs = images * shape.output_len();
    let gradient = before_epilogue(&shape, &epilogue, &passes.y, &passes.chosen, &dy, outputs);
    // The chosen position holds the maximum.
    if epilogue.pool.is_some() {
        let ones = vec![1.0; dy.len()];
        let linear = Epilogue { slope: None, ..epilogue };
        let marks = before_epilogue(&shape, &linear, &passes.y, &passes.chosen, &ones, outputs);
        let marked: f64 = expected
            .outputs
            .iter()
            .zip(&marks)
            .map(|(v, m)| {
                let v = if *v > 0.0 { *v } else { v * f64::from(epilogue.slope.unwrap_or(1.0)) };
                v * f64::from(*m)
            })
            .sum();
        let maxima: f64 = expected.y.iter().sum();
        assert!((marked - maxima).abs() <= tolerance * dy.len() as f64, "{marked} instead of {maxima}");
    }
    let (mut dw, mut db, mut dx) = (vec![0.0; w.len()], vec![0.0; b.len()], vec![0.0; x.len()]);
    let operand = if options.engine.is_some() { widen(&narrow(&gradient)) } else { gradient.clone() };
    for_each_product(&shape, images, |at, wi, xi| {
        dw[wi] += f64::from(operand[at]) * f64::from(x[xi]);
        dx[xi] += f64::from(operand[at]) * f64::from(w[wi]);
    });
    gradient.iter().enumerate().for_each(|(at, &value)| db[at % shape.filters] += f64::from(value));
    assert_close(&passes.dw, &dw, tolerance);
    assert_close(&passes.dx, &dx, tolerance);
    assert_close(&passes.db, &db, tolerance);
}

fn epilogues() -> impl Strategy<Value = Epilogue> {
    (0usize..3, 0usize..3).prop_map(|(slope, pool)| Epilogue {
        slope: [None, Some(0.0), Some(0.2)][slope],
        pool: [None, Some(Rounding::Floor), Some(Rounding::Ceil)][pool],
    })
}

/// Shapes with channels and filters below the given numbers.
fn shapes(channels: usize, filters: usize) -> impl Strategy<Value = ConvShape> {
    let extents = (1..channels, 5usize..13, 5usize..13, 1..filters);
    (extents, 1usize..6, any::<bool>()).prop_map(|((channels, height, width, filters), kernel, same)| {
        ConvShape {
            channels,
            height,
            width,
            filters,
            kernel,
            padding: if same && kernel % 2 == 1 { Padding::Same } else { Padding::Valid },
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn few_channels_match_the_definition(
        shape in shapes(9, 20), epilogue in epilogues(), images in 0usize..6, count in 1usize..5,
    ) {
        check(shape, epilogue, DIRECT, images, count, 2e-5);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn many_channels_match_the_definition(
        shape in shapes(50, 70), epilogue in epilogues(), images in 1usize..4, count in 1usize..4,
    ) {
        check(shape, epilogue, DIRECT, images, count, 1e-4);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Also if vectors hold pixels instead of filters.
    #[test]
    fn few_filters_have_the_bits_of_the_first_of_many(
        few in shapes(2, 9), width in 5usize..80, epilogue in epilogues(), images in 1usize..3,
    ) {
        let few = ConvShape { width, ..few };
        // The weights and biases of the first filters are the same.
        let many = ConvShape { filters: 24, ..few };
        let [first, all] = [few, many].map(|shape| compute(shape, epilogue, DIRECT, images, 2));
        let of_few = |at: usize| at / few.filters * many.filters + at % few.filters;
        for (at, y) in first.y.iter().enumerate() {
            prop_assert_eq!(y.to_bits(), all.y[of_few(at)].to_bits());
        }
        for (at, chosen) in first.chosen.iter().enumerate() {
            prop_assert_eq!(*chosen, all.chosen[of_few(at)]);
        }
    }
}

/// The images, and the filters, with a second channel of zeros.
fn with_an_empty_channel(values: &[f32], plane: usize) -> Vec<f32> {
    values.chunks(plane).flat_map(|plane| plane.iter().copied().chain(plane.iter().map(|_| 0.0))).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn first_layers_match_the_definition(
        few in shapes(2, 70), larger: bool, epilogue in epilogues(), images in 1usize..4, count in 1usize..3,
    ) {
        let kernel = if larger { 5 } else { 3 };
        check(ConvShape { kernel, padding: Padding::Same, ..few }, epilogue, DIRECT, images, count, 2e-5);
        check(ConvShape { kernel, padding: Padding::Valid, ..few }, epilogue, DIRECT, images, count, 2e-5);
    }

    /// Windows of outputs are summed as the product of a layer with more channels sums them.
    #[test]
    fn first_layers_have_the_bits_of_products(few in shapes(2, 70), epilogue in epilogues(), images in 1usize..4) {
        let one = ConvShape { kernel: 3, padding: Padding::Same, ..few };
        let two = ConvShape { channels: 2, ..one };
        let (threads, len) = (Threads::new(2), Conv::new(one, epilogue, DIRECT).result_len());
        let (x, w) = (random(images * one.input_len(), 1), random(one.weights_len(), 2));
        let bias = random(one.filters, 3);
        let results = [(one, x.clone(), w.clone()), (two, with_an_empty_channel(&x, 1), with_an_empty_channel(&w, 9))]
            .map(|(shape, x, w)| {
                let mut y = vec![f32::NAN; images * len];
                let mut chosen = vec![9; if epilogue.pool.is_some() { y.len() } else { 0 }];
                let mut scratch = Scratch::new(&threads);
                let mut conv = Conv::new(shape, epilogue, DIRECT);
                conv.forward(&threads, &mut scratch, &x, &w, &bias, &mut y, &mut chosen);
                (y.iter().map(|y| y.to_bits()).collect::<Vec<_>>(), chosen)
            });
        prop_assert!(results[0] == results[1]);
    }
}

/// None, and all engines of this processor.
fn engines() -> Vec<Option<Engine>> {
    std::iter::once(None).chain(Engine::available().into_iter().map(Some)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]
    #[test]
    fn engines_match_the_definition(
        few in shapes(35, 55), epilogue in epilogues(), images in 0usize..5, count in 1usize..4,
    ) {
        let shape = ConvShape { channels: few.channels + 15, filters: few.filters + 15, ..few };
        for engine in Engine::available() {
            let options = ConvOptions { engine: Some(engine), ..DIRECT };
            prop_assert_eq!(
                ConvAlgorithm::choose(&shape, options),
                ConvAlgorithm::Tiles(engine)
            );
            check(shape, epilogue, options, images, count, 1e-4);
        }
    }
}

/// Few images of few pixels are summed in one product, and large ones alone.
#[test]
fn engines_match_the_definition_on_large_images_and_large_batches() {
    for (extent, kernel, padding, images) in [
        (30, 5, Padding::Same, 2),
        (28, 3, Padding::Valid, 1),
        (7, 3, Padding::Same, 37),
        (14, 3, Padding::Same, 5),
    ] {
        let shape = ConvShape { channels: 18, height: extent, width: extent, filters: 20, kernel, padding };
        let epilogue = Epilogue { slope: Some(0.0), pool: Some(Rounding::Floor) };
        for engine in Engine::available() {
            check(shape, epilogue, ConvOptions { engine: Some(engine), ..AUTO }, images, 2, 1e-4);
        }
    }
}

#[test]
fn an_engine_computes_only_the_layers_that_suit_it() {
    let shape =
        ConvShape { channels: 64, height: 14, width: 14, filters: 64, kernel: 3, padding: Padding::Same };
    let name =
        |shape: &ConvShape, engine| ConvAlgorithm::choose(shape, ConvOptions { engine, ..AUTO }).to_string();
    assert_eq!(name(&shape, Some(Engine::Amx)), "direct, bf16 by amx");
    assert_eq!(name(&shape, Some(Engine::Avx512Bf16)), "winograd 4x4");
    assert_eq!(name(&shape, None), "winograd 4x4");
    for (channels, filters) in [(15, 64), (64, 15)] {
        assert_eq!(name(&ConvShape { channels, filters, ..shape }, Some(Engine::Amx)), "direct");
    }
}

/// The first layers of the example networks, which have code paths of their own.
#[test]
fn networks_match_the_definition() {
    let valid = Padding::Valid;
    for (channels, extent, filters, kernel, padding, pool) in [
        (1, 28, 6, 5, Padding::Same, true),
        (6, 14, 16, 5, valid, true),
        (1, 28, 64, 5, Padding::Same, true),
        (1, 28, 32, 3, valid, false),
    ] {
        let shape = ConvShape { channels, height: extent, width: extent, filters, kernel, padding };
        let epilogue = Epilogue { slope: Some(0.0), pool: pool.then_some(Rounding::Floor) };
        check(shape, epilogue, DIRECT, 5, 2, 2e-5);
    }
}

/// Inputs and weights are few distinct integers, so that windows have ties and sums are exact.
#[test]
fn the_first_of_equal_outputs_is_chosen() {
    for (filters, padding, rounding, slope) in [
        (6, Padding::Same, Rounding::Floor, None),
        (40, Padding::Valid, Rounding::Ceil, None),
        (16, Padding::Same, Rounding::Ceil, Some(0.0)),
    ] {
        let shape = ConvShape { channels: 2, height: 9, width: 7, filters, kernel: 3, padding };
        let epilogue = Epilogue { slope, pool: Some(rounding) };
        let whole = |values: Vec<f32>| values.iter().map(|value| value.round()).collect::<Vec<_>>();
        let [x, w, b, _] = inputs(&shape, &epilogue, 3).map(whole);
        let expected = forward(&shape, &epilogue, 3, &x, &w, &b);
        let threads = Threads::new(2);
        let (mut y, mut chosen) = (vec![0.0; expected.y.len()], vec![9; expected.y.len()]);
        Conv::new(shape, epilogue, DIRECT).forward(
            &threads,
            &mut Scratch::new(&threads),
            &x,
            &w,
            &b,
            &mut y,
            &mut chosen,
        );
        assert_close(&y, &expected.y, 0.0);
        let (oh, ow) = (shape.out_height(), shape.out_width());
        let (rows, columns) = epilogue.result(&shape);
        for (at, &chosen) in chosen.iter().enumerate() {
            let (n, i, j) =
                (at / filters / columns / rows, at / filters / columns % rows, at / filters % columns);
            let inside =
                (0..4u8).filter(|p| 2 * i + usize::from(p / 2) < oh && 2 * j + usize::from(p % 2) < ow);
            let value = |p: u8| {
                let (row, column) = (2 * i + usize::from(p / 2), 2 * j + usize::from(p % 2));
                expected.outputs[((n * oh + row) * ow + column) * filters + at % filters]
            };
            let first = inside.reduce(|best, p| if value(p) > value(best) { p } else { best });
            // If no output of a window is positive, its choice does not matter behind a ReLU.
            if slope.is_none() || expected.y[at] > 0.0 {
                assert_eq!(Some(chosen), first, "element {at}");
            }
        }
    }
}

/// The algorithm that is expected to be the fastest agrees with the definition, up to rounding.
#[test]
fn algorithms_agree() {
    for (channels, extent, filters, kernel, padding, pool) in [
        (32, 14, 64, 3, Padding::Same, None),
        (48, 13, 32, 3, Padding::Same, Some(Rounding::Ceil)),
        (32, 14, 64, 5, Padding::Same, Some(Rounding::Floor)),
        (64, 12, 32, 3, Padding::Valid, Some(Rounding::Floor)),
        (64, 12, 64, 5, Padding::Valid, None),
    ] {
        let shape = ConvShape { channels, height: extent, width: extent, filters, kernel, padding };
        let epilogue = Epilogue { slope: Some(0.2), pool };
        let direct = compute(shape, epilogue, DIRECT, 4, 2);
        for storage in [DType::F32, DType::Bf16] {
            let auto = compute(shape, epilogue, ConvOptions { storage, ..AUTO }, 4, 2);
            assert_eq!(direct.chosen, auto.chosen);
            for (auto, direct) in
                [(&auto.y, &direct.y), (&auto.dw, &direct.dw), (&auto.db, &direct.db), (&auto.dx, &direct.dx)]
            {
                assert_close(auto, &direct.iter().map(|&value| f64::from(value)).collect::<Vec<_>>(), 1e-3);
            }
        }
    }
}

#[test]
fn forward_passes_of_images_in_16_bits_take_the_fewest_products() {
    let names = |kernel, extent| {
        let shape = ConvShape {
            channels: 32,
            height: extent,
            width: extent,
            filters: 32,
            kernel,
            padding: Padding::Same,
        };
        [DType::F32, DType::Bf16, DType::F16]
            .map(|storage| ConvAlgorithm::choose(&shape, ConvOptions { storage, ..AUTO }).to_string())
    };
    assert_eq!(names(5, 14), ["winograd 2x2, 4x4", "winograd 4x4", "winograd 4x4"]);
    assert_eq!(names(3, 12), ["winograd 4x4, 6x6", "winograd 6x6", "winograd 6x6"]);
    // Fewer tiles of 4×4 suffice.
    assert_eq!(names(3, 7), ["winograd 4x4"; 3]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    /// Stored as bf16, results are those of f32 arithmetic on the same inputs, rounded, bit for bit.
    #[test]
    fn bf16_images_are_rounded_f32_results(
        few in shapes(9, 20), many in shapes(3, 5), is_many: bool, epilogue in epilogues(), images in 1usize..4,
        engine in prop::sample::select(engines()),
    ) {
        let shape = if is_many {
            ConvShape { channels: 32 * many.channels, filters: 32 * many.filters, ..many }
        } else {
            few
        };
        let [x, w, b, dy] = inputs(&shape, &epilogue, images);
        let (x, dy) = (narrow(&x), narrow(&dy));
        let layer = (shape, epilogue, ConvOptions { engine, storage: DType::Bf16, ..AUTO });
        let passes = compute_from(layer, 2, (&x, &w, &b, &dy), None);
        let (x, dy, y) = (widen(&x), widen(&dy), widen(&passes.y));
        let wide = compute_from(layer, 2, (&x, &w, &b, &dy), Some(&y));
        prop_assert_eq!(&passes.y, &narrow(&wide.y));
        prop_assert_eq!(&passes.dx, &narrow(&wide.dx));
        prop_assert_eq!(&passes.chosen, &wide.chosen);
        prop_assert_eq!(&passes.dw, &wide.dw);
        prop_assert_eq!(&passes.db, &wide.db);
    }

    /// The same for f16. No engine multiplies it.
    #[test]
    fn f16_images_are_rounded_f32_results(shape in shapes(9, 20), epilogue in epilogues(), images in 1usize..4) {
        let halves = |values: &[f32]| values.iter().copied().map(f16::from_f32).collect::<Vec<_>>();
        let wide = |values: &[f16]| values.iter().map(|value| value.to_f32()).collect::<Vec<_>>();
        let [x, w, b, dy] = inputs(&shape, &epilogue, images);
        let (x, dy) = (halves(&x), halves(&dy));
        let layer = (shape, epilogue, ConvOptions { storage: DType::F16, ..AUTO });
        let passes = compute_from(layer, 2, (&x, &w, &b, &dy), None);
        let (x, dy, y) = (wide(&x), wide(&dy), wide(&passes.y));
        let exact = compute_from(layer, 2, (&x, &w, &b, &dy), Some(&y));
        prop_assert_eq!(&passes.y, &halves(&exact.y));
        prop_assert_eq!(&passes.dx, &halves(&exact.dx));
        prop_assert_eq!(&passes.chosen, &exact.chosen);
        prop_assert_eq!(&passes.dw, &exact.dw);
        prop_assert_eq!(&passes.db, &exact.db);
    }
}
