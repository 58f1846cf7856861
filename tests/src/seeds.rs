//! Seeds of the simulators besides the fixed ones: fresh ones in each run, and those of `tests/seeds-kept`.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Fresh seeds of one test.
const FRESH: u64 = 10;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|number| number.parse().ok())
}

/// Returns the seeds of `test`, a line `TEST SEED` each, that have once failed, and fresh ones: from
/// `SPINDLE_SIM_FRESH` on, by default from the time of day on. `one` replays a single one. Prints them.
///
/// # Panics
/// If `tests/seeds-kept` cannot be read, or a line is no such line.
pub fn kept_and_fresh(test: &str, one: &str) -> impl Iterator<Item = u64> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds-kept");
    let text = std::fs::read_to_string(&path).expect("tests/seeds-kept");
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    let kept: Vec<u64> = lines
        .map(|line| line.split_once(' ').unwrap_or_else(|| panic!("{path:?}: {line:?} is not TEST SEED")))
        .filter(|(of, _)| *of == test)
        .map(|(_, seed)| seed.trim().parse().unwrap_or_else(|error| panic!("{path:?}: {seed:?}: {error}")))
        .collect();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_micros());
    // Beyond the fixed seeds, and short enough to type.
    let first =
        number("SPINDLE_SIM_FRESH").unwrap_or(1_000_000 + u64::try_from(now % 1_000_000_000).unwrap_or(0));
    let replays = format!("SPINDLE_SIM_SEED=n cargo nextest run -p spindle-tests {one}");
    eprintln!("kept seeds {kept:?}, fresh seeds {first} to {}; `{replays}` replays one", first + FRESH - 1);
    kept.into_iter().chain(first..first + FRESH).inspect(|seed| eprintln!("seed {seed}"))
}
