//! [`Arrivals`]: connections that wait for their core to take them over, a few in each turn.
//!
//! Meanwhile the core's other connections wait, so a turn takes few. TCP comes first: a place that an RDMA
//! connection leaves is free some turns later, and a flood of RDMA connections is not to take all of them.

use std::collections::VecDeque;

/// Connections over TCP that are accepted in a turn, and that a core takes over in a turn: each is some ten
/// system calls.
pub const ACCEPTS_PER_TURN: usize = 4;
/// Connections over RDMA that a core takes over in a turn: each makes a queue pair, which takes an adapter
/// about a millisecond.
const RDMA_ACCEPTS_PER_TURN: usize = 1;

#[derive(Debug)]
pub struct Arrivals<T, R> {
    pub tcp: Line<T>,
    pub rdma: Line<R>,
}

/// Those of one transport, in their order.
#[derive(Debug)]
pub struct Line<A> {
    waiting: VecDeque<A>,
    per_turn: usize,
    /// What this turn may take yet.
    left: usize,
}

impl<T, R> Arrivals<T, R> {
    pub fn new() -> Self {
        Arrivals { tcp: Line::new(ACCEPTS_PER_TURN), rdma: Line::new(RDMA_ACCEPTS_PER_TURN) }
    }

    /// How many wait.
    pub fn waiting(&self) -> usize {
        self.tcp.waiting.len() + self.rdma.waiting.len()
    }

    /// True when [`Line::take_next`] of those over RDMA has one, and none over TCP that this turn could take
    /// waits for a place.
    pub fn has_next_rdma(&self) -> bool {
        !self.tcp.has_next() && self.rdma.has_next()
    }

    /// A turn begins.
    pub fn begin_turn(&mut self) {
        self.tcp.left = self.tcp.per_turn;
        self.rdma.left = self.rdma.per_turn;
    }
}

impl<A> Line<A> {
    fn new(per_turn: usize) -> Self {
        Line { waiting: VecDeque::new(), per_turn, left: 0 }
    }

    pub fn push(&mut self, arrival: A) {
        self.waiting.push_back(arrival);
    }

    /// True when none waits, whether this turn takes any or not.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// True when [`Line::take_next`] has one.
    pub fn has_next(&self) -> bool {
        self.left > 0 && !self.waiting.is_empty()
    }

    /// The next one that this turn takes; the others have the next turn.
    pub fn take_next(&mut self) -> Option<A> {
        if self.left == 0 {
            return None;
        }
        let next = self.waiting.pop_front()?;
        self.left -= 1;
        Some(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_makes_one_queue_pair_and_takes_a_few_sockets_and_the_next_turns_the_others() {
        let mut arrivals = Arrivals::new();
        (0..9).for_each(|tcp| arrivals.tcp.push(tcp));
        (0..9).for_each(|rdma| arrivals.rdma.push(rdma));
        let (mut tcp, mut rdma) = (Vec::new(), Vec::new());
        while arrivals.waiting() > 0 {
            arrivals.begin_turn();
            tcp.push(take_all(&mut arrivals.tcp));
            rdma.push(take_all(&mut arrivals.rdma));
        }
        assert_eq!(tcp[..3], [vec![0, 1, 2, 3], vec![4, 5, 6, 7], vec![8]]);
        assert_eq!(rdma, (0..9).map(|rdma| vec![rdma]).collect::<Vec<_>>());
    }

    #[test]
    fn over_rdma_none_is_taken_while_one_over_tcp_that_the_turn_could_take_waits() {
        let mut arrivals = Arrivals::new();
        (0..9).for_each(|tcp| arrivals.tcp.push(tcp));
        arrivals.rdma.push(0);
        arrivals.begin_turn();
        for _ in 0..ACCEPTS_PER_TURN {
            assert!(!arrivals.has_next_rdma());
            arrivals.tcp.take_next();
        }
        assert!(arrivals.has_next_rdma(), "TCP has had its share of the turn");
        arrivals.rdma.take_next();
        assert!(!arrivals.has_next_rdma());
    }

    fn take_all(line: &mut Line<i32>) -> Vec<i32> {
        let mut taken = Vec::new();
        while line.has_next() {
            taken.push(line.take_next().expect("has_next says so"));
        }
        assert_eq!(line.take_next(), None);
        taken
    }
}
