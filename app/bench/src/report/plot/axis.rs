//! [`TickAxis`]: ticks and labels of an axis, and the pixel of a value.

use std::ops::Range;

use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};

use super::super::table::format_latency;
use super::percentile_of;
use crate::size::Bytes;

/// Most intervals between ticks of a linear axis.
const LINEAR_TICKS_MAX: f64 = 10.0;
/// Most intervals between ticks of an axis of sizes.
const SIZE_TICKS_MAX: u32 = 10;
/// Nines of the median: log10(2).
const MEDIAN_NINES: f64 = std::f64::consts::LOG10_2;

/// An axis that begins at its first tick and ends at its last; each tick has a label.
pub(in super::super) struct TickAxis {
    ticks: Vec<(f64, String)>,
    is_logarithmic: bool,
}

impl TickAxis {
    /// Creates a linear axis from 0 to 100 %.
    pub(in super::super) fn percent() -> TickAxis {
        let ticks = (0..=10u8).map(|tick| (f64::from(tick) * 10.0, (tick * 10).to_string()));
        TickAxis { ticks: ticks.collect(), is_logarithmic: false }
    }

    /// Creates a logarithmic axis from the power of two at or below `least` bytes to a power at or above
    /// `most`. Wide ranges skip powers.
    pub(in super::super) fn sizes(least: u64, most: u64) -> TickAxis {
        let first = least.max(1).ilog2();
        let last = (most.max(1) - 1).checked_ilog2().map_or(0, |below| below + 1).max(first + 1);
        let stride = (last - first).div_ceil(SIZE_TICKS_MAX);
        let powers = (0..=(last - first).div_ceil(stride)).map(|tick| first + tick * stride);
        let tick = |power: u32| (f64::from(power).exp2(), Bytes::new(1 << power.min(63)).to_string());
        TickAxis { ticks: powers.map(tick).collect(), is_logarithmic: true }
    }

    /// Creates an axis that is linear in nines: 0 %, 90 %, 99 %, 99.9 % are equally far apart, and 50 % has a
    /// tick too. `nines`, the end of the axis, is a whole number.
    pub(super) fn percentiles(nines: f64) -> TickAxis {
        let mut ticks: Vec<f64> = (0u32..).map(f64::from).take_while(|tick| *tick <= nines).collect();
        ticks.insert(1, MEDIAN_NINES);
        let text = |nines: f64| {
            // No decimals up to 99 %, one decimal for 99.9 %, one more for each further nine.
            let places = (0u8..=6).find(|places| f64::from(*places) >= nines - 2.0).unwrap_or(6);
            format!("{:.*} %", usize::from(places), percentile_of(nines))
        };
        TickAxis { ticks: ticks.into_iter().map(|tick| (tick, text(tick))).collect(), is_logarithmic: false }
    }

    /// Creates a linear axis in microseconds, from 0 to a multiple of the tick interval above `highest`.
    pub(super) fn linear(highest: f64) -> TickAxis {
        let highest = highest.max(0.1) * 1.05;
        let rough = highest / LINEAR_TICKS_MAX;
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|digit| digit * power).into_iter().find(|step| *step >= rough);
        let step = step.unwrap_or(10.0 * power);
        let count = (0u32..).take_while(|tick| f64::from(*tick) * step < highest).count();
        let ticks = (0u32..).map(|tick| microseconds(f64::from(tick) * step)).take(count + 1);
        TickAxis { ticks: ticks.collect(), is_logarithmic: false }
    }

    /// Creates a logarithmic axis in microseconds, from a tick of the series 1, 2, 5, 10 at or below `lowest`
    /// to one at or above `highest`.
    pub(super) fn logarithmic(lowest: f64, highest: f64) -> TickAxis {
        let first = lowest.log10().floor();
        let decades = (0u32..).map(|decade| 10f64.powf(first + f64::from(decade)));
        let mut ticks = Vec::new();
        for tick in decades.flat_map(|power| [1.0, 2.0, 5.0].map(|digit| digit * power)) {
            if tick <= lowest {
                ticks.clear();
            }
            ticks.push(microseconds(tick));
            if tick >= highest {
                break;
            }
        }
        TickAxis { ticks, is_logarithmic: true }
    }
}

/// Returns a tick with its label, for an axis of latencies.
fn microseconds(value: f64) -> (f64, String) {
    (value, if value.fract().abs() < 1e-9 { format!("{value:.0}") } else { format_latency(value) })
}

impl Ranged for TickAxis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        let Range { start, end } = self.range();
        let value = value.clamp(start, end);
        let share = if self.is_logarithmic {
            (value / start).ln() / (end / start).ln()
        } else {
            (value - start) / (end - start)
        };
        pixel_at(share, limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        let ticks = self.ticks.iter().map(|(value, _)| *value);
        if hint.weight().allow_light_points() { Vec::new() } else { ticks.collect() }
    }

    fn range(&self) -> Range<f64> {
        let value = |tick: Option<&(f64, String)>| tick.map_or(1.0, |(value, _)| *value);
        value(self.ticks.first())..value(self.ticks.last())
    }
}

impl ValueFormatter<f64> for TickAxis {
    fn format_ext(&self, value: &f64) -> String {
        let tick = self.ticks.iter().find(|(tick, _)| tick.total_cmp(value).is_eq());
        tick.map(|(_, text)| text.clone()).unwrap_or_default()
    }
}

/// Returns the pixel at the fraction `share` (0 ..= 1) of the distance from `first` to `last`.
fn pixel_at(share: f64, (first, last): (i32, i32)) -> i32 {
    let pixel = f64::from(first) + share * f64::from(last - first);
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a float cast saturates, and pixels are a few thousand"
    )]
    let pixel = pixel.round() as i32;
    pixel
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_read_as_people_write_them() {
        let axis = TickAxis::percentiles(6.0);
        let text = |nines: f64| axis.format_ext(&nines);
        assert_eq!(text(0.0), "0 %");
        assert_eq!(text(MEDIAN_NINES), "50 %");
        assert_eq!(text(1.0), "90 %");
        assert_eq!(text(2.0), "99 %");
        assert_eq!(text(3.0), "99.9 %");
        assert_eq!(text(4.0), "99.99 %");
        assert_eq!(text(6.0), "99.9999 %");
        assert_eq!(
            (axis.map(&0.0, (10, 70)), axis.map(&3.0, (10, 70)), axis.map(&6.0, (10, 70))),
            (10, 40, 70)
        );
    }

    #[test]
    fn linear_ticks_are_round_and_reach_above_the_highest() {
        for highest in [0.3, 7.4, 42.0, 99.0, 1234.0] {
            let axis = TickAxis::linear(highest);
            assert!(
                axis.range().end >= highest && axis.ticks.len() <= 12 && axis.ticks.len() >= 5,
                "{:?}",
                axis.ticks
            );
        }
        assert_eq!(TickAxis::linear(42.0).ticks.len(), 10, "0, 5, .. 45");
    }

    #[test]
    fn sizes_lie_between_powers_of_two() {
        let texts = |least, most| -> Vec<String> {
            TickAxis::sizes(least, most).ticks.into_iter().map(|(_, text)| text).collect()
        };
        assert_eq!(texts(8 << 20, 40 << 20), ["8 MiB", "16 MiB", "32 MiB", "64 MiB"]);
        assert_eq!(texts(1 << 30, 1 << 30), ["1 GiB", "2 GiB"]);
        let wide = texts(64 << 10, 8 << 40);
        assert_eq!((wide.len(), wide[1].as_str(), wide[9].as_str()), (10, "512 KiB", "8 TiB"));
        let axis = TickAxis::sizes(8 << 20, 32 << 20);
        assert_eq!(
            [8, 16, 32].map(|mib: u32| axis.map(&(f64::from(mib) * 1_048_576.0), (0, 100))),
            [0, 50, 100]
        );
        assert_eq!(TickAxis::percent().map(&30.0, (100, 0)), 70);
    }

    #[test]
    fn logarithmic_ticks_enclose_the_values() {
        let axis = TickAxis::logarithmic(6.9, 812.0);
        let texts: Vec<&str> = axis.ticks.iter().map(|(_, text)| text.as_str()).collect();
        assert_eq!(texts, ["5", "10", "20", "50", "100", "200", "500", "1000"]);
        assert_eq!((axis.map(&5.0, (100, 0)), axis.map(&1000.0, (100, 0))), (100, 0));
        assert_eq!(axis.map(&1.0, (100, 0)), 100, "below the axis is drawn on it");
    }
}
