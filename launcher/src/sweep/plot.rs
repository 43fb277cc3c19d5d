//! Speed over ranks, beside the ideal line, as an SVG. Pure, but for [`write`].

use std::fmt::Write;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;

use nix::unistd::{AccessFlags, access};

use super::cells::Grid;
use super::figures::Figure;
use super::record::Row;

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 480.0;
/// The plotting area: left, top, right, bottom.
const LEFT: f64 = 60.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = HEIGHT - 50.0;
/// Right of it is the legend.
const RIGHT: f64 = WIDTH - 220.0;
/// Okabe and Ito's colours, which colour-blind readers can tell apart.
const COLOURS: [&str; 7] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"];
/// Most labels of the axis of speed.
const TICKS: f64 = 8.0;

/// Characters.
const LONGEST_TITLE: usize = 90;

/// A line of the plot.
struct Line {
    name: String,
    /// Ranks, speed, and whether there were more ranks than devices.
    points: Vec<(f64, f64, bool)>,
}

/// The plot of the first figure that says something about speed. Empty axes if there is none.
pub(super) fn plot(title: &str, grid: &Grid, figures: &[Figure], rows: &[Row], devices: &str) -> String {
    let figure = figures.iter().find(|figure| figure.percent.is_some());
    let lines = figure.map_or(Vec::new(), |figure| lines(grid, figure, rows));
    let base = grid.ranks.first().map_or(1.0, |ranks| f64::from(*ranks));
    let most = grid.ranks.last().map_or(1.0, |ranks| f64::from(*ranks));
    let fastest = lines.iter().flat_map(|line| &line.points).map(|(_, speed, _)| *speed);
    let axes = Axes { ranks: most, speed: fastest.fold(most / base, f64::max) * 1.05 };
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    svg += &text(LEFT, TOP - 16.0, "start", &shortened(title));
    axes.draw(&mut svg, grid, figure.map_or("speed", |figure| &figure.title));
    axes.draw_ideal(&mut svg, base);
    for (number, line) in lines.iter().enumerate() {
        axes.draw_line(&mut svg, line, COLOURS[number % COLOURS.len()]);
    }
    legend(&mut svg, &lines, devices);
    svg + "</svg>\n"
}

/// A title that fits the plot.
fn shortened(title: &str) -> String {
    let short: String = title.chars().take(LONGEST_TITLE).collect();
    if short.len() < title.len() { short + "…" } else { short }
}

/// One line for each combination of options.
fn lines(grid: &Grid, figure: &Figure, rows: &[Row]) -> Vec<Line> {
    let line = |values: Vec<String>| {
        let options = grid.vary.iter().zip(&values);
        let is_of_line = |row: &&Row| options.clone().all(|(vary, value)| row.vary[&vary.flag] == *value);
        let point = |row: &Row| {
            let percent = row.figures.get(&figure.name)?.percent?;
            Some((f64::from(row.ranks), percent / 100.0, row.oversubscribed))
        };
        let names: Vec<_> = options.clone().map(|(vary, value)| format!("{}={value}", vary.flag)).collect();
        let name = if names.is_empty() { "measured".to_owned() } else { names.join(" ") };
        Line { name, points: rows.iter().filter(is_of_line).filter_map(point).collect() }
    };
    grid.combinations().into_iter().map(line).collect()
}

/// The axes, which begin at 0, with their highest values.
struct Axes {
    ranks: f64,
    speed: f64,
}

impl Axes {
    fn x(&self, ranks: f64) -> f64 {
        LEFT + (RIGHT - LEFT) * ranks / self.ranks
    }

    fn y(&self, speed: f64) -> f64 {
        BOTTOM - (BOTTOM - TOP) * speed / self.speed
    }

    fn draw(&self, svg: &mut String, grid: &Grid, figure: &str) {
        *svg += &segment((LEFT, BOTTOM), (RIGHT, BOTTOM), "stroke=\"black\"");
        *svg += &segment((LEFT, BOTTOM), (LEFT, TOP), "stroke=\"black\"");
        for ranks in &grid.ranks {
            let x = self.x(f64::from(*ranks));
            *svg += &segment((x, BOTTOM), (x, BOTTOM + 5.0), "stroke=\"black\"");
            *svg += &text(x, BOTTOM + 20.0, "middle", &ranks.to_string());
        }
        let step = tick_step(self.speed);
        for speed in (0..).map(|tick| f64::from(tick) * step).take_while(|speed| *speed <= self.speed) {
            let y = self.y(speed);
            *svg += &segment((LEFT, y), (RIGHT, y), "stroke=\"#dddddd\"");
            *svg += &text(LEFT - 8.0, y + 4.0, "end", &format!("{}×", (speed * 1e6).round() / 1e6));
        }
        *svg += &text((LEFT + RIGHT) / 2.0, BOTTOM + 40.0, "middle", &format!("ranks (speed by {figure})"));
    }

    fn draw_ideal(&self, svg: &mut String, base: f64) {
        let ends = ((self.x(0.0), self.y(0.0)), (self.x(self.ranks), self.y(self.ranks / base)));
        *svg += &segment(ends.0, ends.1, IDEAL);
    }

    fn draw_line(&self, svg: &mut String, line: &Line, colour: &str) {
        let points: Vec<_> = line
            .points
            .iter()
            .map(|(ranks, speed, _)| format!("{:.1},{:.1}", self.x(*ranks), self.y(*speed)))
            .collect();
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
            points.join(" ")
        );
        for (ranks, speed, is_hollow) in &line.points {
            *svg += &circle(self.x(*ranks), self.y(*speed), colour, *is_hollow);
        }
    }
}

const IDEAL: &str = "stroke=\"#888888\" stroke-dasharray=\"6 4\"";

/// 1, 2 or 5 times a power of ten, so that there are at most [`TICKS`] ticks.
fn tick_step(highest: f64) -> f64 {
    let exact = highest / TICKS;
    let power = 10f64.powf(exact.log10().floor());
    let factor = [1.0, 2.0, 5.0].into_iter().find(|factor| factor * power >= exact).unwrap_or(10.0);
    factor * power
}

fn legend(svg: &mut String, lines: &[Line], devices: &str) {
    let x = RIGHT + 20.0;
    let mut rows = (0..).map(|row| TOP + 20.0 * f64::from(row));
    let mut next = || rows.next().expect("endless");
    let y = next();
    *svg += &segment((x, y), (x + 20.0, y), IDEAL);
    *svg += &text(x + 28.0, y + 4.0, "start", "ideal");
    for (number, line) in lines.iter().enumerate() {
        let y = next();
        let colour = COLOURS[number % COLOURS.len()];
        *svg += &segment((x, y), (x + 20.0, y), &format!("stroke=\"{colour}\" stroke-width=\"2\""));
        *svg += &text(x + 28.0, y + 4.0, "start", &line.name);
    }
    if lines.iter().flat_map(|line| &line.points).any(|(_, _, is_hollow)| *is_hollow) {
        let y = next();
        *svg += &circle(x + 10.0, y, "black", true);
        *svg += &text(x + 28.0, y + 4.0, "start", &format!("more ranks than {devices}"));
    }
}

fn circle(x: f64, y: f64, colour: &str, is_hollow: bool) -> String {
    let fill = if is_hollow { "white" } else { colour };
    format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"{fill}\" stroke=\"{colour}\"/>\n")
}

fn segment(from: (f64, f64), to: (f64, f64), style: &str) -> String {
    format!(
        "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" {style}/>\n",
        from.0, from.1, to.0, to.1
    )
}

fn text(x: f64, y: f64, anchor: &str, text: &str) -> String {
    // Control characters are not allowed in XML at all.
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    format!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>\n")
}

/// Whether a plot can be written, so that a long sweep does not find out at its end. Creates nothing.
pub(super) fn check(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // A device or a pipe is written itself, a file is replaced.
    let is_written_itself = path.exists() && !path.is_file();
    Ok(access(if is_written_itself { path } else { folder }, AccessFlags::W_OK)?)
}

/// Writes a plot. A regular file is replaced when the new one is complete.
pub(super) fn write(path: &Path, svg: &str) -> io::Result<()> {
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    if target.symlink_metadata().is_ok_and(|metadata| !metadata.is_file()) {
        // A device or a pipe: a rename would replace it.
        return File::options().write(true).open(target)?.write_all(svg.as_bytes());
    }
    let mut name = target.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.partial", std::process::id()));
    let partial = target.with_file_name(name);
    let mut file = File::create_new(&partial)?;
    let written = file.write_all(svg.as_bytes()).and_then(|()| file.sync_all());
    written.and_then(|()| fs::rename(&partial, &target)).inspect_err(|_| {
        // This process has created it, so nobody else needs it.
        let _ = fs::remove_file(&partial);
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::cells::Scaling;
    use super::super::figures::choose;
    use super::super::record::Run;
    use super::super::summary::summarise;
    use super::super::summary::tests::{failure, grid, run};
    use super::*;

    fn svg(grid: &Grid, runs: &[Run]) -> String {
        let figures = choose(&["images_per_s".to_owned()], runs);
        plot("a <b> & c\n", grid, &figures, &summarise(grid, &figures, runs), "cores")
    }

    #[test]
    fn a_line_for_each_combination_beside_the_ideal_one() {
        let (shared, host) = ([("--p", "shared")], [("--p", "host")]);
        let result = |rate: f64| json!({"images_per_s": rate});
        let runs = [
            run(1, &shared, 1, result(100.0)),
            run(2, &shared, 1, result(190.0)),
            run(4, &shared, 1, result(310.0)),
            run(1, &host, 1, result(50.0)),
            failure(2, &host, "no"),
            run(4, &host, 1, result(250.0)),
        ];
        insta::assert_snapshot!(svg(&grid(&[1, 2, 4], &["--p=shared,host"], Scaling::Weak), &runs));
    }

    #[test]
    fn a_plot_without_results_has_axes() {
        let empty = svg(&grid(&[1, 2], &[], Scaling::Weak), &[]);
        assert!(empty.ends_with("</svg>\n") && empty.contains("points=\"\""), "{empty}");
        assert!(empty.contains(">a &lt;b&gt; &amp; c <"), "{empty}");
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!([1.05, 2.1, 8.4, 16.8, 70.0, 8000.0].map(tick_step), [0.2, 0.5, 2.0, 5.0, 10.0, 1000.0]);
    }
}
