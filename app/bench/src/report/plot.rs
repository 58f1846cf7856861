//! SVG plot of latencies by percentile, with one or more series. [`draw`] draws other curves too.
//!
//! The x axis is logarithmic in the distance to 100 %: 90 %, 99 % and 99.9 % are equally far apart. The y
//! axis is linear, or logarithmic if the longest latency of the curves is more than [`LINEAR_SPAN_MAX`] times
//! the shortest.

mod axis;

use std::path::Path;
use std::{fs, io};

use plotters::prelude::*;

use super::Latencies;
use super::table::format_latency;
pub(super) use axis::TickAxis;

/// Width and height in pixels.
const SIZE: (u32, u32) = (960, 560);
/// Largest ratio of the longest to the shortest latency of the curves for a linear axis.
const LINEAR_SPAN_MAX: f64 = 12.0;
/// Points of a curve for each nine of the x axis: enough for a smooth curve.
const POINTS_PER_NINE: u32 = 60;
/// Fewest (99 %) and most (99.9999 %) nines on the x axis.
const NINES: (f64, f64) = (2.0, 6.0);
/// Colours of the series in order, repeated after six: the palette of Okabe and Ito for colour-blind readers.
const COLOURS: [RGBColor; 6] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0x56, 0xb4, 0xe9),
];
const INK: RGBColor = RGBColor(0x26, 0x2b, 0x33);
const GRID: RGBColor = RGBColor(0xdd, 0xe1, 0xe6);
const FONT: &str = "DejaVu Sans, Helvetica, Arial, sans-serif";

/// Failure to draw or write a plot.
#[derive(Debug, thiserror::Error)]
pub enum PlotError {
    /// No command was measured.
    #[error("there is nothing to plot: not one command was measured")]
    Empty,
    /// The drawing library refused.
    #[error("cannot draw the plot: {0}")]
    Draw(String),
    /// The file cannot be written.
    #[error("cannot write the plot to {path}: {source}")]
    Write {
        /// Path of the plot, of `--plot`.
        path: String,
        /// Error of the file system.
        #[source]
        source: io::Error,
    },
}

/// Draws the series and writes the SVG to the file `path`.
pub fn write(path: &Path, title: &str, series: &[(&str, &Latencies)]) -> Result<(), PlotError> {
    save(path, &render(title, series)?)
}

pub(super) fn save(path: &Path, svg: &str) -> Result<(), PlotError> {
    fs::write(path, svg).map_err(|source| PlotError::Write { path: path.display().to_string(), source })
}

/// Draws the series as SVG. Series without commands are left out; [`PlotError::Empty`] if none remains.
pub fn render(title: &str, series: &[(&str, &Latencies)]) -> Result<String, PlotError> {
    let series: Vec<(&str, &Latencies)> =
        series.iter().copied().filter(|(_, latencies)| latencies.count() > 0).collect();
    let (nines, latency) = axes(&series).ok_or(PlotError::Empty)?;
    let nines_max = nines.range().end;
    let curves: Vec<Curve> = series
        .iter()
        .map(|(name, latencies)| (legend(name, latencies), points(latencies, nines_max).collect()))
        .collect();
    let (x, y) = ("percentile of commands".to_owned(), "latency, µs".to_owned());
    draw(title, (nines, x), (latency, y), &curves, 0)
}

/// Legend text and points of a curve.
pub(super) type Curve = (String, Vec<(f64, f64)>);

/// Draws `curves` as SVG; `x` and `y` are the axes with their labels, `dot` is the radius of a point in
/// pixels (0: line only).
pub(super) fn draw(
    title: &str,
    x: (TickAxis, String),
    y: (TickAxis, String),
    curves: &[Curve],
    dot: u32,
) -> Result<String, PlotError> {
    let mut svg = String::new();
    let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
    root.fill(&WHITE).map_err(draw_error)?;
    let mut chart = ChartBuilder::on(&root)
        .margin(18)
        .margin_right(38)
        .caption(title, (FONT, 20, FontStyle::Bold).into_font().color(&INK))
        .x_label_area_size(52)
        .y_label_area_size(76)
        .build_cartesian_2d(x.0, y.0)
        .map_err(draw_error)?;
    chart
        .configure_mesh()
        .x_desc(x.1)
        .y_desc(y.1)
        .axis_desc_style((FONT, 15).into_font().color(&INK))
        .label_style((FONT, 13).into_font().color(&INK))
        .axis_style(INK.mix(0.6))
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .draw()
        .map_err(draw_error)?;
    for (index, (text, points)) in curves.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let line = LineSeries::new(points.iter().copied(), colour.stroke_width(2).filled());
        chart
            .draw_series(line.point_size(dot))
            .map_err(draw_error)?
            .label(text)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 22, y)], colour.stroke_width(3)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .margin(14)
        .legend_area_size(30)
        .label_font((FONT, 13).into_font().color(&INK))
        .background_style(WHITE.mix(0.9))
        .border_style(GRID)
        .draw()
        .map_err(draw_error)?;
    root.present().map_err(draw_error)?;
    drop(chart);
    drop(root);
    Ok(svg)
}

fn draw_error<E: std::error::Error + Send + Sync>(error: DrawingAreaErrorKind<E>) -> PlotError {
    PlotError::Draw(error.to_string())
}

/// Returns the legend text of a series: name, percentiles and maximum.
fn legend(name: &str, latencies: &Latencies) -> String {
    format!(
        "{name}: p50 {}, p99 {}, p99.9 {}, max {} µs",
        format_latency(latencies.percentile_us(50.0)),
        format_latency(latencies.percentile_us(99.0)),
        format_latency(latencies.percentile_us(99.9)),
        format_latency(latencies.max_us()),
    )
}

/// Returns the axes of percentiles and of latencies. The ranges include all series; `None` without a series.
fn axes(series: &[(&str, &Latencies)]) -> Option<(TickAxis, TickAxis)> {
    let commands = series.iter().map(|(_, latencies)| latencies.count()).max()?;
    let nines = (commands as f64).log10().ceil().clamp(NINES.0, NINES.1);
    let ends = |percentile: f64| series.iter().map(move |(_, latencies)| latencies.percentile_us(percentile));
    let lowest = ends(0.0).fold(f64::INFINITY, f64::min).max(0.01);
    let highest = ends(percentile_of(nines)).fold(lowest, f64::max);
    let axis = if highest / lowest > LINEAR_SPAN_MAX {
        TickAxis::logarithmic(lowest, highest)
    } else {
        TickAxis::linear(highest)
    };
    Some((TickAxis::percentiles(nines), axis))
}

/// Converts a number of nines to a percentile: 0 for 0, 90 for 1, 99 for 2.
fn percentile_of(nines: f64) -> f64 {
    100.0 - 100.0 / 10f64.powf(nines)
}

/// Returns the points (nines, microseconds) of a series, up to the percentile that only one command exceeds,
/// at most to `nines_max`.
fn points(latencies: &Latencies, nines_max: f64) -> impl Iterator<Item = (f64, f64)> {
    let end = (latencies.count() as f64).log10().min(nines_max);
    let step = 1.0 / f64::from(POINTS_PER_NINE);
    (0..)
        .map(move |index: u32| f64::from(index) * step)
        .take_while(move |nines| *nines < end)
        .chain([end])
        .map(|nines| (nines, latencies.percentile_us(percentile_of(nines))))
}

#[cfg(test)]
mod tests {
    use super::super::example_result;
    use super::*;

    #[test]
    fn a_plot_has_its_title_axes_and_legend() {
        let one = example_result().latency;
        let svg = render("Read & write", &[("limit", &one), ("spindle", &one)]).expect("draws");
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{svg}");
        for part in [
            "Read &amp; write",
            "percentile of commands",
            "latency, µs",
            "limit: p50",
            "spindle: p50",
            "99.9",
        ] {
            assert!(svg.contains(part), "{part} in\n{svg}");
        }
    }

    #[test]
    fn nothing_measured_is_an_error() {
        assert!(matches!(render("empty", &[]), Err(PlotError::Empty)));
        assert!(matches!(render("empty", &[("none", &Latencies::new())]), Err(PlotError::Empty)));
    }

    #[test]
    fn one_command_is_enough_for_a_plot() {
        let mut one = Latencies::new();
        one.record(7_400, 1);
        assert!(render("one", &[("one", &one)]).is_ok());
    }

    #[test]
    fn a_curve_rises_and_ends_at_its_last_command() {
        let points: Vec<(f64, f64)> = points(&example_result().latency, 6.0).collect();
        assert!(points.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 <= pair[1].1));
        let last = points.last().expect("points");
        assert!((last.0 - 3.0).abs() < 1e-9 && (last.1 / 1000.0 - 1.0).abs() < 2e-3, "{last:?}");
    }

    #[test]
    fn a_file_that_cannot_be_written_is_named() {
        let one = example_result().latency;
        let error =
            write(Path::new("/nonexistent/plot.svg"), "t", &[("a", &one)]).expect_err("no such folder");
        assert!(error.to_string().contains("/nonexistent/plot.svg"), "{error}");
    }
}
