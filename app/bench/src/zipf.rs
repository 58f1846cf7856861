//! [`Zipf`]: random addresses with a Zipf distribution, in which few units get most accesses.
//!
//! The probability of the unit of rank k, from 1 up, is proportional to 1 / k^exponent. Ranks are drawn by
//! rejection inversion (Hörmann and Derflinger, 1996). A draw needs a few logarithms and exponentials and no
//! table, so a disk may have any size.

use super::random::Random;

/// Zipf distribution over units 0 to `units` - 1.
#[derive(Debug, Clone)]
pub struct Zipf {
    units: u64,
    exponent: f64,
    /// Bounds of the draw: [`area`] at 1.5 less 1 (the weight of rank 1), and [`area`] at `units` + 0.5.
    areas: (f64, f64),
    /// A point above its rank, or at most this distance below, is accepted without computing [`area`].
    near: f64,
    /// Distance from the unit of a rank to that of the next rank, modulo `units`. Coprime to `units`.
    step: u64,
}

impl Zipf {
    /// Creates a distribution over `units` units, at least 1.
    pub fn new(units: u64, exponent: f64) -> Zipf {
        // `units` divided by the golden ratio: any number of first ranks is spread evenly over the units.
        let golden = (u128::from(units) * 0x9e37_79b9_7f4a_7c15) >> 64;
        let golden = u64::try_from(golden).unwrap_or(0).max(1);
        let step = (golden..).find(|step| common_divisor(*step, units) == 1).unwrap_or(1);
        let last = area(exponent, units as f64 + 0.5);
        Zipf {
            units,
            exponent,
            areas: (area(exponent, 1.5) - 1.0, last),
            near: 2.0 - inverse_area(exponent, area(exponent, 2.5) - 2f64.powf(-exponent)),
            step,
        }
    }

    #[inline]
    pub fn draw(&self, random: &mut Random) -> u64 {
        const STEPS: u64 = 1 << f64::MANTISSA_DIGITS;
        let (first, last) = self.areas;
        loop {
            let drawn = last + (first - last) * (random.below(STEPS) as f64 / STEPS as f64);
            let point = inverse_area(self.exponent, drawn);
            let rank = point.round().clamp(1.0, self.units as f64);
            let is_near = rank - point <= self.near;
            if is_near || drawn >= area(self.exponent, rank + 0.5) - rank.powf(-self.exponent) {
                #[expect(clippy::cast_possible_truncation, reason = "whole, and at most a u64")]
                return self.unit_of_rank(rank as u64 - 1);
            }
        }
    }

    /// Returns the unit of a rank from 0 up. The mapping is a permutation, as `step` and `units` are coprime.
    fn unit_of_rank(&self, rank: u64) -> u64 {
        let place = u128::from(rank) * u128::from(self.step) % u128::from(self.units);
        u64::try_from(place).unwrap_or(0)
    }
}

/// Returns the integral of t^-exponent over t from 1 to `x`.
fn area(exponent: f64, x: f64) -> f64 {
    let rest = 1.0 - exponent;
    if is_near_zero(rest) { x.ln() } else { (rest * x.ln()).exp_m1() / rest }
}

/// Inverts [`area`]: returns the upper limit `x` at which the integral is `area`.
fn inverse_area(exponent: f64, area: f64) -> f64 {
    let rest = 1.0 - exponent;
    if is_near_zero(rest) { area.exp() } else { ((rest * area).max(-1.0).ln_1p() / rest).exp() }
}

/// Returns whether `rest` (1 - exponent) is so close to 0 that the formulas for exponent 1 are used: the
/// other formulas divide by `rest`.
fn is_near_zero(rest: f64) -> bool {
    rest.abs() < 1e-9
}

fn common_divisor(mut a: u64, mut b: u64) -> u64 {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The share of draws that return one of the `ranks` most popular units.
    fn share(units: u64, exponent: f64, ranks: u64) -> f64 {
        const DRAWS: u32 = 200_000;
        let (zipf, mut random) = (Zipf::new(units, exponent), Random::new(7));
        let popular: std::collections::HashSet<u64> =
            (0..ranks).map(|rank| zipf.unit_of_rank(rank)).collect();
        let found = (0..DRAWS).filter(|_| popular.contains(&zipf.draw(&mut random))).count();
        found as f64 / f64::from(DRAWS)
    }

    #[test]
    fn the_most_popular_get_the_share_that_the_law_says() {
        let weights = |exponent: f64, ranks: u32| -> f64 {
            (1..=ranks).map(|rank| f64::from(rank).powf(-exponent)).sum()
        };
        // Ratio of the harmonic numbers of 1000 and 100 000.
        assert!((weights(1.0, 1000) / weights(1.0, 100_000) - 0.619).abs() < 1e-3);
        for exponent in [0.2, 0.5, 0.9, 1.0, 1.2, 3.0] {
            for ranks in [1, 10, 1000] {
                let wanted = weights(exponent, ranks) / weights(exponent, 100_000);
                let found = share(100_000, exponent, ranks.into());
                assert!((found - wanted).abs() < 0.005, "{exponent}, {ranks}: {found}, wanted {wanted}");
            }
        }
    }

    #[test]
    fn each_rank_has_a_unit_of_its_own_and_popular_ones_are_far_apart() {
        for units in [1, 2, 3, 6, 1000, 1 << 16] {
            let zipf = Zipf::new(units, 1.0);
            let mut places: Vec<u64> = (0..units).map(|rank| zipf.unit_of_rank(rank)).collect();
            places.sort_unstable();
            assert!(places.iter().copied().eq(0..units), "{units}: {places:?}");
        }
        let zipf = Zipf::new(1 << 20, 1.0);
        let mut popular: Vec<u64> = (0..1000).map(|rank| zipf.unit_of_rank(rank)).collect();
        popular.sort_unstable();
        let nearest = popular.windows(2).map(|pair| pair[1] - pair[0]).min();
        assert!(nearest.is_some_and(|nearest| nearest > 300), "{nearest:?} of 1049 in the mean");
    }

    #[test]
    fn small_and_huge_disks_have_only_their_own_units() {
        for units in [1, 2, 3, 1 << 53] {
            for exponent in [1e-6, 1.0, 3.0] {
                let (zipf, mut random) = (Zipf::new(units, exponent), Random::new(3));
                assert!((0..1000).all(|_| zipf.draw(&mut random) < units), "{units}, {exponent}");
            }
        }
    }
}
