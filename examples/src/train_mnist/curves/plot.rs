//! Loss and accuracy over steps, as SVG, or as PNG if the file is called so.

use std::error::Error;
use std::path::Path;

use mgpu::output_file;
use plotters::coord::Shift;
use plotters::prelude::*;

use super::super::byproducts::cannot_write;
use super::bitmap::png_of;
use super::{PLOT, Plot, Points};

const WIDTH: u32 = 900;
/// Height of each of the two charts.
const HEIGHT: u32 = 380;
/// Height of the title above them.
const TITLE: u32 = 36;
/// Curves with more points show the range of neighbours: this is about the width in pixels.
const POINTS: usize = 800;
/// The moving average is taken over this part of the steps.
const AVERAGED_PART: usize = 50;
/// Characters of a title that fit the width.
const TITLE_LENGTH: usize = 100;
const FONT: (&str, u32) = ("sans-serif", 16);

const TRAINING: RGBColor = RGBColor(0x3b, 0x6e, 0xa8);
/// [`TRAINING`] at 35 % on white.
const PALE: RGBColor = RGBColor(0xba, 0xcc, 0xe0);
const TEST: RGBColor = RGBColor(0xd0, 0x7f, 0x3a);
const TEXT: RGBColor = RGBColor(0x33, 0x33, 0x33);
const GRID: RGBColor = RGBColor(0xdd, 0xdd, 0xdd);

/// Draws the curves to their file, atomically (see [`output_file`]).
///
/// # Errors
/// If the file cannot be written.
pub(super) fn draw(Plot { path, title, points }: &Plot) -> Result<(), String> {
    let drawing = render(title, points, path)
        .map_err(|error| format!("cannot draw {PLOT} {}: {error}", path.display()))?;
    output_file::write(path, &drawing).map_err(|error| cannot_write(PLOT, path, &error))
}

/// The contents of a file of this name.
fn render(title: &str, points: &Points, path: &Path) -> Result<Vec<u8>, Box<dyn Error>> {
    let is_png = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("png"));
    let size = (WIDTH, TITLE + 2 * HEIGHT);
    if is_png {
        return png_of(size, |bitmap| draw_charts(title, points, &bitmap.into_drawing_area()));
    }
    let mut text = String::new();
    draw_charts(title, points, &SVGBackend::with_string(&mut text, size).into_drawing_area())?;
    Ok(text.into_bytes())
}

fn draw_charts<B: DrawingBackend>(
    title: &str,
    points: &Points,
    area: &DrawingArea<B, Shift>,
) -> Result<(), Box<dyn Error>>
where
    B::ErrorType: 'static,
{
    area.fill(&WHITE)?;
    let charts = area.titled(&shorten(title, TITLE_LENGTH), FONT.into_font().color(&TEXT))?;
    let (upper, lower) = charts.split_vertically(HEIGHT);
    let last_step = points.losses.last().map(|(step, _)| *step);
    let last_epoch = points.epochs.last().map(|epoch| epoch.step);
    let steps = last_step.max(last_epoch).unwrap_or(1).max(1) as f64;
    draw_losses(points, steps, &upper)?;
    draw_accuracies(points, steps, &lower)?;
    area.present()?;
    Ok(())
}

fn draw_losses<B: DrawingBackend>(
    points: &Points,
    steps: f64,
    area: &DrawingArea<B, Shift>,
) -> Result<(), Box<dyn Error>>
where
    B::ErrorType: 'static,
{
    let losses: Vec<(f64, f64)> = points
        .losses
        .iter()
        .map(|(step, loss)| (*step as f64, *loss))
        .filter(|(_, loss)| loss.is_finite())
        .collect();
    let (window, average) = moving_average(&losses);
    let test = points.epochs.iter().filter_map(|epoch| Some((epoch.step as f64, epoch.test_loss?)));
    let test: Vec<_> = test.filter(|(_, loss)| loss.is_finite()).collect();
    let all = || losses.iter().chain(&test).map(|(_, loss)| *loss);
    let (low, high) = (all().fold(f64::INFINITY, f64::min), all().fold(0.0, f64::max));
    // No losses yet, or only zeros.
    let (low, high) = if low < high { (low.max(high * 1e-6), high) } else { (0.1, 10.0) };
    let mut chart =
        chart(area, "loss").build_cartesian_2d(0.0..steps, (low * 0.9..high * 1.1).log_scale())?;
    chart
        .configure_mesh()
        .x_desc("step")
        .x_label_formatter(&|step| format!("{step:.0}"))
        .label_style(FONT.into_font().color(&TEXT))
        .axis_style(TEXT)
        .bold_line_style(GRID)
        .light_line_style(WHITE)
        .draw()?;
    let above = |points: Vec<(f64, f64)>| points.into_iter().map(move |(x, y)| (x, y.max(low)));
    if window > 1 {
        let line = LineSeries::new(above(extremes(&losses)), PALE);
        chart.draw_series(line)?.label("training, each step").legend(key(PALE));
    }
    let name = if window > 1 { format!("training, mean of {window} steps") } else { "training".into() };
    let line = LineSeries::new(above(extremes(&average)), TRAINING.stroke_width(2));
    chart.draw_series(line)?.label(name).legend(key(TRAINING));
    let test: Vec<_> = above(test).collect();
    chart.draw_series(test.iter().map(|point| Circle::new(*point, 4, TEST.filled())))?;
    chart.draw_series(LineSeries::new(test, TEST.stroke_width(2)))?.label("test").legend(key(TEST));
    draw_legend(&mut chart, SeriesLabelPosition::UpperRight)
}

fn draw_accuracies<B: DrawingBackend>(
    points: &Points,
    steps: f64,
    area: &DrawingArea<B, Shift>,
) -> Result<(), Box<dyn Error>>
where
    B::ErrorType: 'static,
{
    let percent = |accuracy: f64| accuracy * 100.0;
    let train = points.epochs.iter().map(|epoch| (epoch.step as f64, percent(epoch.train_accuracy)));
    let test = points.epochs.iter();
    let test = test.filter_map(|epoch| Some((epoch.step as f64, percent(epoch.test_accuracy?))));
    let (train, test): (Vec<_>, Vec<_>) = (train.collect(), test.collect());
    let low = train.iter().chain(&test).map(|(_, accuracy)| *accuracy).fold(99.0, f64::min);
    let low = (low - 1.0).max(0.0);
    // Room for the markers of a perfect result.
    let high = 100.0 + (100.0 - low) * 0.03;
    let mut chart = chart(area, "accuracy, %").build_cartesian_2d(0.0..steps, low..high)?;
    chart
        .configure_mesh()
        .x_desc("step")
        .x_label_formatter(&|step| format!("{step:.0}"))
        .label_style(FONT.into_font().color(&TEXT))
        .axis_style(TEXT)
        .bold_line_style(GRID)
        .light_line_style(WHITE)
        .draw()?;
    for (name, points, colour) in [("training", train, TRAINING), ("test", test, TEST)] {
        chart.draw_series(points.iter().map(|point| Circle::new(*point, 4, colour.filled())))?;
        chart.draw_series(LineSeries::new(points, colour.stroke_width(2)))?.label(name).legend(key(colour));
    }
    draw_legend(&mut chart, SeriesLabelPosition::LowerRight)
}

fn draw_legend<'a, B: DrawingBackend + 'a, C: plotters::coord::CoordTranslate>(
    chart: &mut ChartContext<'a, B, C>,
    place: SeriesLabelPosition,
) -> Result<(), Box<dyn Error>>
where
    B::ErrorType: 'static,
{
    chart
        .configure_series_labels()
        .position(place)
        .label_font(FONT.into_font().color(&TEXT))
        .background_style(WHITE.mix(0.85))
        .border_style(GRID)
        .margin(12)
        .draw()?;
    Ok(())
}

/// A chart with space for a caption and axis labels; the last label of an axis is centred at its end.
fn chart<'a, B: DrawingBackend>(area: &'a DrawingArea<B, Shift>, caption: &str) -> ChartBuilder<'a, 'a, B> {
    let mut chart = ChartBuilder::on(area);
    chart.caption(caption, FONT.into_font().color(&TEXT)).margin(8).margin_right(40);
    chart.x_label_area_size(44).y_label_area_size(72);
    chart
}

/// The legend sample of a curve.
fn key(colour: RGBColor) -> impl Fn((i32, i32)) -> PathElement<(i32, i32)> {
    move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2))
}

/// The mean of each point and its neighbours, and of how many. There are fewer neighbours at both ends, as many on each
/// side.
fn moving_average(points: &[(f64, f64)]) -> (usize, Vec<(f64, f64)>) {
    let reach = points.len() / AVERAGED_PART / 2;
    let mut sums = vec![0.0];
    for (_, value) in points {
        sums.push(sums[sums.len() - 1] + value);
    }
    let mean = |index: usize| {
        let reach = reach.min(index).min(points.len() - 1 - index);
        let sum = sums[index + reach + 1] - sums[index - reach];
        sum / (2 * reach + 1) as f64
    };
    let averaged = points.iter().enumerate().map(|(index, (step, _))| (*step, mean(index)));
    (2 * reach + 1, averaged.collect())
}

/// About twice [`POINTS`] points at most: the smallest and the largest of each run of neighbours, in their order, so that
/// no extreme is lost.
fn extremes(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    if points.len() <= 2 * POINTS {
        return points.to_vec();
    }
    let runs = points.chunks(points.len().div_ceil(POINTS));
    let pairs = runs.flat_map(|run| {
        let by_value = |one: &&(f64, f64), other: &&(f64, f64)| one.1.total_cmp(&other.1);
        let mut pair =
            [run.iter().min_by(by_value), run.iter().max_by(by_value)].map(|point| *point.unwrap_or(&run[0]));
        pair.sort_by(|one, other| one.0.total_cmp(&other.0));
        pair
    });
    pairs.collect()
}

/// A text of at most `most` characters: the middle of a longer one is left out.
fn shorten(text: &str, most: usize) -> String {
    let characters: Vec<char> = text.chars().collect();
    if characters.len() <= most {
        return text.to_owned();
    }
    let half = (most - 3) / 2;
    let (begin, end) = (&characters[..half], &characters[characters.len() - half..]);
    begin.iter().chain(&['.', '.', '.']).chain(end).collect()
}

#[cfg(test)]
mod tests {
    use super::super::EpochPoint;
    use super::*;

    fn svg(points: &Points) -> String {
        String::from_utf8(render("a title", points, Path::new("x.svg")).unwrap()).unwrap()
    }

    fn epoch(step: u64, test: Option<f64>) -> EpochPoint {
        EpochPoint { step, train_accuracy: 0.9, test_loss: test, test_accuracy: test }
    }

    fn full() -> Points {
        let losses = (1..500).map(|step| (step, 1.0 / step as f64)).collect();
        Points { losses, epochs: vec![epoch(200, Some(0.1)), epoch(500, Some(0.2))] }
    }

    #[test]
    fn the_average_is_taken_over_neighbours_on_both_sides() {
        let line: Vec<(f64, f64)> = (0..1000).map(|step| (f64::from(step), 3.0 * f64::from(step))).collect();
        let (window, averaged) = moving_average(&line);
        assert_eq!(window, 21);
        for (point, mean) in line.iter().zip(&averaged) {
            assert!(point.0 == mean.0 && (point.1 - mean.1).abs() < 1e-6, "{point:?} {mean:?}");
        }
        let step: Vec<(f64, f64)> = (0..100).map(|at| (f64::from(at), f64::from(at / 50))).collect();
        let (window, averaged) = moving_average(&step);
        assert_eq!((window, averaged[49].1, averaged[50].1), (3, 1.0 / 3.0, 2.0 / 3.0));
        assert_eq!(moving_average(&[]), (1, vec![]));
        assert_eq!(moving_average(&[(1.0, 5.0)]), (1, vec![(1.0, 5.0)]));
    }

    #[test]
    fn thinning_keeps_every_extreme() {
        let mut points: Vec<(f64, f64)> = (0..100_000).map(|step| (f64::from(step), 1.0)).collect();
        (points[777].1, points[77_777].1) = (9.0, -9.0);
        let thin = extremes(&points);
        assert!(thin.len() <= 2 * POINTS && thin.contains(&points[777]) && thin.contains(&points[77_777]));
        assert!(thin.is_sorted_by(|one, next| one.0 <= next.0));
        assert_eq!(extremes(&points[..10]), points[..10]);
    }

    #[test]
    fn a_plot_has_a_line_for_each_curve_whatever_the_values() {
        let lines = |points: &Points, colour: &str| {
            let text = svg(points);
            text.lines().filter(|line| line.starts_with("<polyline") && line.contains(colour)).count()
        };
        // Losses and accuracies, each with its legend sample; single losses only beside an average.
        for (colour, empty, drawn) in [("#3B6EA8", 2, 4), ("#D07F3A", 2, 4), ("#BACCE0", 0, 2)] {
            assert_eq!(
                (lines(&Points::default(), colour), lines(&full(), colour)),
                (empty, drawn),
                "{colour}"
            );
        }
        assert!(svg(&full()).contains("a title"));
        for loss in [0.0, f64::NAN, f64::INFINITY, 1e300] {
            let points = Points { losses: vec![(1, loss), (2, loss)], epochs: vec![epoch(2, None)] };
            assert!(svg(&points).ends_with("</svg>\n"), "{loss}");
        }
    }

    #[test]
    fn a_png_has_the_same_curves_and_a_title() {
        let image = |title: &str, points: &Points| {
            let bytes = render(title, points, Path::new("x.PNG")).unwrap();
            let mut reader = png::Decoder::new(std::io::Cursor::new(bytes)).read_info().unwrap();
            let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
            let info = reader.next_frame(&mut pixels).unwrap();
            assert_eq!((info.width, info.height), (WIDTH, TITLE + 2 * HEIGHT));
            pixels
        };
        let count = |pixels: &[u8], RGBColor(red, green, blue): RGBColor| {
            pixels.chunks_exact(3).filter(|pixel| *pixel == [red, green, blue]).count()
        };
        let drawn = image("a title", &full());
        for colour in [TRAINING, PALE, TEST] {
            assert!(count(&drawn, colour) > 2 * count(&image("", &Points::default()), colour), "{colour:?}");
        }
        let in_title = |pixels: &[u8]| pixels[..3 * (WIDTH * TITLE) as usize].iter().any(|byte| *byte < 128);
        assert!(in_title(&drawn) && !in_title(&image("", &full())));
    }

    #[test]
    fn a_long_title_keeps_its_ends() {
        let long = format!("lenet5 {} end", "x".repeat(300));
        let short = shorten(&long, TITLE_LENGTH);
        assert!(
            short.len() <= TITLE_LENGTH && short.starts_with("lenet5 x") && short.ends_with("x end"),
            "{short}"
        );
        assert_eq!(shorten("short", TITLE_LENGTH), "short");
    }

    #[test]
    fn a_folder_that_is_not_there_is_named() {
        let path = Path::new("/nonexistent/curve.svg").to_owned();
        let error = draw(&Plot { path, title: String::new(), points: Points::default() }).unwrap_err();
        assert!(error.starts_with("cannot write --plot /nonexistent/curve.svg: "), "{error}");
    }
}
