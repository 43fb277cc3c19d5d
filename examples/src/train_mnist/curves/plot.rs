//! Loss and accuracy over steps, as an SVG.

use std::error::Error;
use std::path::Path;

use mgpu::whole_file;
use plotters::coord::Shift;
use plotters::prelude::*;

use super::super::byproducts::cannot_write;
use super::{PLOT, Points};

const WIDTH: u32 = 900;
/// Height of each of the two charts.
const HEIGHT: u32 = 380;
/// Curves with more points are averaged over neighbours: this is about the width in pixels.
const POINTS: usize = 800;
const FONT: (&str, u32) = ("sans-serif", 18);

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Draws the curves to `path`, atomically (see [`whole_file`]).
///
/// # Errors
/// If the file cannot be written.
pub(super) fn draw(points: &Points, path: &Path) -> Result<(), String> {
    let text = render(points).map_err(|error| format!("cannot draw {PLOT} {}: {error}", path.display()))?;
    whole_file::write(path, text.as_bytes()).map_err(|error| cannot_write(PLOT, path, &error))
}

/// The curves as SVG text.
fn render(points: &Points) -> Result<String, Box<dyn Error>> {
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, (WIDTH, 2 * HEIGHT)).into_drawing_area();
        area.fill(&WHITE)?;
        let (upper, lower) = area.split_vertically(HEIGHT);
        let last_step = points.losses.last().map(|(step, _)| *step);
        let last_epoch = points.epochs.last().map(|epoch| epoch.step);
        let steps = last_step.max(last_epoch).unwrap_or(1).max(1) as f64;
        draw_losses(points, steps, &upper)?;
        draw_accuracies(points, steps, &lower)?;
        area.present()?;
    }
    Ok(text)
}

fn draw_losses(points: &Points, steps: f64, area: &Area<'_>) -> Result<(), Box<dyn Error>> {
    let train = averaged_points(&points.losses);
    let test = points.epochs.iter().filter_map(|epoch| Some((epoch.step as f64, epoch.test_loss?)));
    let test: Vec<_> = test.filter(|(_, loss)| loss.is_finite()).collect();
    let losses = || train.iter().chain(&test).map(|(_, loss)| *loss);
    let (low, high) = (losses().fold(f64::INFINITY, f64::min), losses().fold(0.0, f64::max));
    // No losses yet, or only zeros.
    let (low, high) = if low < high { (low.max(high * 1e-6), high) } else { (0.1, 10.0) };
    let mut chart =
        chart(area, "loss").build_cartesian_2d(0.0..steps, (low * 0.9..high * 1.1).log_scale())?;
    chart
        .configure_mesh()
        .x_desc("step")
        .x_label_formatter(&|step| format!("{step:.0}"))
        .max_light_lines(2)
        .draw()?;
    let above = |points: Vec<(f64, f64)>| points.into_iter().map(move |(x, y)| (x, y.max(low)));
    chart.draw_series(LineSeries::new(above(train), &BLUE))?.label("training").legend(key(BLUE));
    let test: Vec<_> = above(test).collect();
    chart
        .draw_series(LineSeries::new(test, RED.stroke_width(2)).point_size(3))?
        .label("test")
        .legend(key(RED));
    let place = SeriesLabelPosition::UpperRight;
    chart
        .configure_series_labels()
        .position(place)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()?;
    Ok(())
}

fn draw_accuracies(points: &Points, steps: f64, area: &Area<'_>) -> Result<(), Box<dyn Error>> {
    let percent = |accuracy: f64| accuracy * 100.0;
    let train: Vec<_> =
        points.epochs.iter().map(|epoch| (epoch.step as f64, percent(epoch.train_accuracy))).collect();
    let test: Vec<_> = points
        .epochs
        .iter()
        .filter_map(|epoch| Some((epoch.step as f64, percent(epoch.test_accuracy?))))
        .collect();
    let low = train.iter().chain(&test).map(|(_, accuracy)| *accuracy).fold(99.0, f64::min);
    let mut chart = chart(area, "accuracy, %").build_cartesian_2d(0.0..steps, (low - 1.0).max(0.0)..100.0)?;
    chart
        .configure_mesh()
        .x_desc("step")
        .x_label_formatter(&|step| format!("{step:.0}"))
        .max_light_lines(2)
        .draw()?;
    for (name, points, colour) in [("training", train, BLUE), ("test", test, RED)] {
        let line = LineSeries::new(points, colour.stroke_width(2)).point_size(3);
        chart.draw_series(line)?.label(name).legend(key(colour));
    }
    let place = SeriesLabelPosition::LowerRight;
    chart
        .configure_series_labels()
        .position(place)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()?;
    Ok(())
}

/// A chart with space for a caption and axis labels.
fn chart<'a, 'b>(area: &'b Area<'a>, caption: &str) -> ChartBuilder<'b, 'b, SVGBackend<'a>> {
    let mut chart = ChartBuilder::on(area);
    chart.caption(caption, FONT).margin(12).x_label_area_size(36).y_label_area_size(60);
    chart
}

/// The legend sample of a curve.
fn key(colour: RGBColor) -> impl Fn((i32, i32)) -> PathElement<(i32, i32)> {
    move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2))
}

/// At most [`POINTS`] points, each the mean of its neighbours; non-finite values are skipped.
fn averaged_points(losses: &[(u64, f64)]) -> Vec<(f64, f64)> {
    let runs = losses.chunks(losses.len().div_ceil(POINTS).max(1));
    let means = runs.filter_map(|run| {
        let finite = run.iter().filter(|(_, loss)| loss.is_finite());
        let (count, steps, sum) = finite.fold((0u32, 0.0, 0.0), |(count, steps, sum), (step, loss)| {
            (count + 1, steps + *step as f64, sum + loss)
        });
        (count > 0).then(|| (steps / f64::from(count), sum / f64::from(count)))
    });
    means.collect()
}

#[cfg(test)]
mod tests {
    use super::super::EpochPoint;
    use super::*;

    #[test]
    fn points_are_averaged_and_non_finite_ones_are_skipped() {
        let losses: Vec<(u64, f64)> = (1..=2 * POINTS as u64).map(|step| (step, step as f64)).collect();
        let thin = averaged_points(&losses);
        assert_eq!(thin.len(), POINTS);
        assert_eq!(thin[0], (1.5, 1.5));
        assert_eq!(averaged_points(&[(1, f64::NAN), (2, 3.0), (3, f64::INFINITY)]), [(2.0, 3.0)]);
        assert_eq!(averaged_points(&[]), []);
    }

    #[test]
    fn a_plot_has_a_line_for_each_curve_whatever_the_values() {
        let epoch = |step, test: Option<f64>| EpochPoint {
            step,
            train_accuracy: 0.9,
            test_loss: test,
            test_accuracy: test,
        };
        let lines = |points: &Points, colour: &str| {
            let text = render(points).unwrap();
            text.lines().filter(|line| line.starts_with("<polyline") && line.contains(colour)).count()
        };
        let losses = (1..50).map(|step| (step, 1.0 / step as f64)).collect();
        let full = Points { losses, epochs: vec![epoch(20, Some(0.1)), epoch(50, Some(0.2))] };
        // Losses and accuracies, each with its legend sample.
        for colour in ["#0000FF", "#FF0000"] {
            assert_eq!((lines(&Points::default(), colour), lines(&full, colour)), (2, 4), "{colour}");
        }
        for loss in [0.0, f64::NAN, f64::INFINITY, 1e300] {
            let points = Points { losses: vec![(1, loss), (2, loss)], epochs: vec![epoch(2, None)] };
            assert!(render(&points).unwrap().ends_with("</svg>\n"), "{loss}");
        }
    }

    #[test]
    fn a_folder_that_is_not_there_is_named() {
        let error = draw(&Points::default(), Path::new("/nonexistent/curve.svg")).unwrap_err();
        assert!(error.starts_with("cannot write --plot /nonexistent/curve.svg: "), "{error}");
    }
}
