//! A result as one JSON object.
//!
//! The keys are stable: `iops`, `mb_per_s`, `latency_us` with `mean`, `p50`, `p99`, `p99_9`, `p99_99`, `max`,
//! `errors`, and `run` with the fields of [`Run`](super::Run). `line_round_trip_ns` and `cpu_share` are
//! present if they were measured. `bench ADDRESS` adds keys to `run`, with `--verify` `blocks_checked`, and
//! with `--against` `iops_ratio` and `against`, a second result.
//! `bench disk` with several caches adds the keys of [`sizes::json`](super::sizes::json).

use serde_json::{Map, Value, json};

use super::{BenchResult, PERCENTILES};

/// Returns the object of a result. The error is that of serde; each field of [`Run`](super::Run) can be
/// serialized.
pub fn render(result: &BenchResult) -> serde_json::Result<Value> {
    let latency = &result.latency;
    let mut latency_us = Map::new();
    latency_us.insert("mean".to_owned(), rounded(latency.mean_us(), 3));
    for (percentile, key, _) in PERCENTILES {
        latency_us.insert(key.to_owned(), rounded(latency.percentile_us(percentile), 3));
    }
    latency_us.insert("max".to_owned(), rounded(latency.max_us(), 3));
    let mut object = Map::new();
    object.insert("run".to_owned(), serde_json::to_value(&result.run)?);
    object.insert("iops".to_owned(), rounded(result.iops(), 1));
    object.insert("mb_per_s".to_owned(), rounded(result.mb_per_s(), 3));
    object.insert("latency_us".to_owned(), Value::Object(latency_us));
    object.insert("errors".to_owned(), json!(result.errors));
    if let Some(line_round_trip_ns) = result.line_round_trip_ns {
        object.insert("line_round_trip_ns".to_owned(), rounded(line_round_trip_ns, 1));
    }
    if let Some(cpu_share) = result.cpu_share {
        object.insert("cpu_share".to_owned(), rounded(cpu_share, 3));
    }
    Ok(Value::Object(object))
}

/// Rounds `value` to `decimals` decimals.
pub fn rounded(value: f64, decimals: i32) -> Value {
    let scale = 10f64.powi(decimals);
    json!((value * scale).round() / scale)
}

#[cfg(test)]
mod tests {
    use super::super::example_result;
    use super::*;

    fn keys(value: &Value) -> Vec<&str> {
        let mut keys: Vec<&str> = value.as_object().expect("an object").keys().map(String::as_str).collect();
        keys.sort_unstable();
        keys
    }

    #[test]
    fn the_keys_are_those_promised() {
        let object = render(&example_result()).expect("renders");
        assert_eq!(keys(&object), ["errors", "iops", "latency_us", "mb_per_s", "run"]);
        assert_eq!(keys(&object["latency_us"]), ["max", "mean", "p50", "p99", "p99_9", "p99_99"]);
        assert_eq!(keys(&object["run"]), ["address", "bs", "cores", "qd", "queues", "rw", "seconds", "tool"]);
    }

    #[test]
    fn the_values_are_those_measured() {
        let mut result = example_result();
        result.errors = 3;
        result.line_round_trip_ns = Some(49.04);
        let object = render(&result).expect("renders");
        assert_eq!(object["iops"], json!(1000.0));
        assert_eq!(object["mb_per_s"], json!(4.096));
        assert_eq!(object["errors"], json!(3));
        assert_eq!(object["line_round_trip_ns"], json!(49.0));
        assert_eq!(object["run"]["rw"], json!("randread"));
        assert_eq!(object["run"]["bs"], json!(4096));
        let p50 = object["latency_us"]["p50"].as_f64().expect("a number");
        assert!((p50 - 500.0).abs() < 0.5, "{p50}");
    }
}
