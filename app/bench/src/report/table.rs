//! Results as a text table: one row for each result, latencies in microseconds.

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, Table};

use super::{BenchResult, PERCENTILES};

/// Renders a row for each (name, result). A single result has no column of names. The column of errors is
/// present if a result has errors.
#[must_use]
pub fn render(results: &[(&str, &BenchResult)]) -> String {
    let is_named = results.len() > 1;
    let has_errors = results.iter().any(|(_, result)| result.errors > 0);
    let mut head: Vec<&str> = if is_named { vec![""] } else { Vec::new() };
    head.extend(["IOPS", "MB/s", "mean us"]);
    head.extend(PERCENTILES.iter().map(|(_, _, head)| *head));
    head.push("max");
    if has_errors {
        head.push("errors");
    }
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED);
    table.set_header(head.into_iter().map(|text| Cell::new(text).set_alignment(CellAlignment::Right)));
    for (name, result) in results {
        let mut row: Vec<Cell> = Vec::new();
        if is_named {
            row.push(Cell::new(name));
        }
        let latency = &result.latency;
        let mut number = |text: String| row.push(Cell::new(text).set_alignment(CellAlignment::Right));
        number(group_thousands(result.iops()));
        number(group_thousands(result.mb_per_s()));
        number(format_latency(latency.mean_us()));
        for (percentile, _, _) in PERCENTILES {
            number(format_latency(latency.percentile_us(percentile)));
        }
        number(format_latency(latency.max_us()));
        if has_errors {
            number(result.errors.to_string());
        }
        table.add_row(row);
    }
    table.to_string()
}

/// Formats a number without decimals and with separated thousands: `1 234 567`.
pub(super) fn group_thousands(value: f64) -> String {
    let digits = format!("{value:.0}");
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

/// Formats a latency with two decimals below 10 us, one decimal below 100 us, and none from there on.
pub(super) fn format_latency(microseconds: f64) -> String {
    if microseconds < 10.0 {
        format!("{microseconds:.2}")
    } else if microseconds < 100.0 {
        format!("{microseconds:.1}")
    } else {
        group_thousands(microseconds)
    }
}

#[cfg(test)]
mod tests {
    use super::super::example_result;
    use super::*;

    #[test]
    fn one_result_has_the_promised_columns_and_no_name() {
        let text = render(&[("alone", &example_result())]);
        for head in ["IOPS", "MB/s", "mean us", "p50", "p99", "p99.9", "p99.99", "max"] {
            assert!(text.contains(head), "{head} in\n{text}");
        }
        assert!(!text.contains("alone") && !text.contains("errors"), "{text}");
    }

    #[test]
    fn several_results_are_named_and_errors_shown() {
        let mut failed = example_result();
        failed.errors = 77;
        let text = render(&[("limit", &example_result()), ("spindle", &failed)]);
        for part in ["limit", "spindle", "errors", "77"] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
    }

    #[test]
    fn numbers_are_readable() {
        let rates: Vec<String> = [0.0, 999.4, 1000.0, 1_234_567.0].into_iter().map(group_thousands).collect();
        assert_eq!(rates, ["0", "999", "1 000", "1 234 567"]);
        let latencies: Vec<String> = [7.4, 42.25, 123.4, 10_500.0].into_iter().map(format_latency).collect();
        assert_eq!(latencies, ["7.40", "42.2", "123", "10 500"]);
    }
}
