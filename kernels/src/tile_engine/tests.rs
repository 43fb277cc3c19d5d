//! The contract of all engines.

use proptest::prelude::*;

use super::arithmetic::dot_pair;
use super::pack::{RowPairs, row_stride, rows_as_panel, steps};
use super::*;
use crate::reference::{assert_close, narrow, random, widen};

/// A product of `rows`×`depth` by `depth`×`columns` with operands packed both ways, rounded to bf16 before.
fn multiply(
    engine: Engine,
    (rows, columns, depth): (usize, usize, usize),
    by_rows: bool,
) -> (Vec<f32>, Vec<f64>) {
    let (a, b) = (widen(&narrow(&random(rows * depth, 1))), widen(&narrow(&random(depth * columns, 2))));
    let stride = row_stride(depth);
    let mut left = vec![bf16::NAN; BLOCK * stride];
    for (row, to) in left.chunks_exact_mut(stride).enumerate() {
        if row < rows { pack::round_row(&a[row * depth..][..depth], to) } else { to.fill(bf16::ZERO) }
    }
    let panel = steps(depth) * TILE;
    let mut right = vec![bf16::NAN; 2 * panel];
    if by_rows {
        right[panel..].fill(bf16::ZERO);
        RowPairs { from: &b, row: columns, rows: depth, columns, panel }.pack(&mut right);
    } else {
        let transposed: Vec<f32> =
            (0..columns * depth).map(|at| b[at % depth * columns + at / depth]).collect();
        let mut rounded = vec![bf16::NAN; panel];
        for (index, panel) in right.chunks_exact_mut(panel).enumerate() {
            let first = index * SIDE;
            let count = columns.saturating_sub(first).min(SIDE);
            let from = transposed.get(first * depth..).unwrap_or_default();
            rows_as_panel(from, count, depth, depth, &mut rounded, panel);
        }
    }
    let before = random(SUMS, 3);
    let mut sums = before.clone();
    let left = Left { values: &left, groups: [0, SIDE * stride], row: stride, segment: 0 };
    let right = Right { values: &right, panels: [0, panel], segment: 0 };
    engine.start().multiply(left, right, Depth { segments: 1, steps: steps(depth) }, Begin::Sums, &mut sums);
    let mut expected = before.iter().map(|&sum| f64::from(sum)).collect::<Vec<_>>();
    for (row, column) in (0..rows * columns).map(|at| (at / columns, at % columns)) {
        let products = (0..depth).map(|k| f64::from(a[row * depth + k]) * f64::from(b[k * columns + column]));
        expected[index(row, column)] += products.sum::<f64>();
    }
    for row in 0..BLOCK {
        for (half, values) in row_of(&sums, row).into_iter().enumerate() {
            assert_eq!(values[..], sums[index(row, half * SIDE)..][..SIDE]);
        }
    }
    (sums, expected)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn engines_compute_products_of_operands_packed_either_way(
        rows in 1..=BLOCK, columns in 1..=BLOCK, depth in 1usize..150, by_rows: bool,
    ) {
        for engine in Engine::available() {
            let (sums, expected) = multiply(engine, (rows, columns, depth), by_rows);
            assert_close(&sums, &expected, 1e-5);
        }
    }
}

/// Segments of the depth are summed in order, wherever they are.
#[test]
fn a_product_of_segments_has_the_bits_of_single_products() {
    let (segments, count, row) = (3, 2, 100);
    let (a_segment, b_segment) = (BLOCK * row, count * TILE + 64);
    let a = narrow(&random(segments * a_segment, 1));
    let b = narrow(&random(2 * segments * b_segment, 2));
    for engine in Engine::available() {
        let session = engine.start();
        let panels = [0, segments * b_segment];
        let left =
            |first: usize, segment| Left { values: &a, groups: [first, first + 7 * row], row, segment };
        let right =
            |first: usize, segment| Right { values: &b, panels: panels.map(|at| at + first), segment };
        let (mut once, mut each) = (random(SUMS, 3), random(SUMS, 3));
        session.multiply(
            left(5, a_segment),
            right(0, b_segment),
            Depth { segments, steps: count },
            Begin::Sums,
            &mut once,
        );
        for (segment, step) in (0..segments * count).map(|at| (at / count, at % count)) {
            let left = left(5 + segment * a_segment + step * DEPTH, 0);
            let right = right(segment * b_segment + step * TILE, 0);
            session.multiply(left, right, Depth { segments: 1, steps: 1 }, Begin::Sums, &mut each);
        }
        assert_eq!(once, each, "{engine}");
        session.multiply(left(0, 0), right(0, 0), Depth { segments: 0, steps: 1 }, Begin::Sums, &mut each);
        assert_eq!(once, each, "{engine}: no segments");
    }
}

#[test]
fn sums_that_are_overwritten_have_the_bits_of_zeros_that_are_added_to() {
    let (a, b) = (narrow(&random(BLOCK * DEPTH, 1)), narrow(&random(2 * TILE, 2)));
    let left = Left { values: &a, groups: [0, SIDE * DEPTH], row: DEPTH, segment: 0 };
    let right = Right { values: &b, panels: [0, TILE], segment: 0 };
    for (engine, segments) in Engine::available().into_iter().flat_map(|engine| [(engine, 0), (engine, 2)]) {
        let depth = Depth { segments, steps: 1 };
        let (mut added, mut overwritten) = ([0.0; SUMS], [f32::NAN; SUMS]);
        engine.start().multiply(left, right, depth, Begin::Sums, &mut added);
        engine.start().multiply(left, right, depth, Begin::Zero, &mut overwritten);
        assert_eq!(added.map(f32::to_bits), overwritten.map(f32::to_bits), "{engine}, {segments} segments");
    }
}

/// The sums of `vdpbf16ps` run over pairs in order.
#[test]
fn vector_products_have_the_bits_of_their_definition() {
    let Some(engine) = Engine::available().into_iter().find(|engine| *engine == Engine::Avx512Bf16) else {
        println!("skipped: this processor has no avx512_bf16");
        return;
    };
    let (a, b) = (narrow(&random(BLOCK * 2 * DEPTH, 1)), narrow(&random(4 * TILE, 2)));
    let mut sums = random(SUMS, 3);
    let mut expected = sums.clone();
    let left = Left { values: &a, groups: [0, SIDE * 2 * DEPTH], row: 2 * DEPTH, segment: 0 };
    let right = Right { values: &b, panels: [0, 2 * TILE], segment: 0 };
    engine.start().multiply(left, right, Depth { segments: 1, steps: 2 }, Begin::Sums, &mut sums);
    for (row, column) in (0..BLOCK * BLOCK).map(|at| (at / BLOCK, at % BLOCK)) {
        let sum = &mut expected[index(row, column)];
        for pair in 0..DEPTH {
            let a = &a[row * 2 * DEPTH + 2 * pair..];
            let b = &b[column / SIDE * 2 * TILE + (pair * SIDE + column % SIDE) * 2..];
            *sum = dot_pair(*sum, [a[0], a[1]], [b[0], b[1]]);
        }
    }
    assert_eq!(sums, expected);
}

#[test]
#[should_panic(expected = "a right operand of 1023 of 1024 elements")]
fn operands_that_are_too_short_are_refused() {
    let (a, b) = (vec![bf16::ZERO; BLOCK * DEPTH], vec![bf16::ZERO; 2 * TILE - 1]);
    let left = Left { values: &a, groups: [0, SIDE * DEPTH], row: DEPTH, segment: 0 };
    let right = Right { values: &b, panels: [0, TILE], segment: 0 };
    Engine::AmxEmulated.start().multiply(
        left,
        right,
        Depth { segments: 1, steps: 1 },
        Begin::Zero,
        &mut [0.0; SUMS],
    );
}

#[test]
fn names_of_engines_are_levels() {
    for engine in [Engine::Amx, Engine::AmxEmulated, Engine::Avx512Bf16] {
        assert!(level::is_known(engine.name()));
    }
}
