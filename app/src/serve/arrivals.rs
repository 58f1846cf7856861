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

/// One of them.
#[derive(Debug, PartialEq, Eq)]
pub enum Arrival<T, R> {
    Tcp(T),
    Rdma(R),
}

/// See the module.
#[derive(Debug)]
pub struct Arrivals<T, R> {
    tcp: VecDeque<T>,
    rdma: VecDeque<R>,
    /// What this turn may take yet.
    tcp_left: usize,
    rdma_left: usize,
}

impl<T, R> Arrivals<T, R> {
    pub fn new() -> Self {
        Arrivals { tcp: VecDeque::new(), rdma: VecDeque::new(), tcp_left: 0, rdma_left: 0 }
    }

    pub fn push(&mut self, arrival: Arrival<T, R>) {
        match arrival {
            Arrival::Tcp(tcp) => self.tcp.push_back(tcp),
            Arrival::Rdma(rdma) => self.rdma.push_back(rdma),
        }
    }

    /// How many wait.
    pub fn waiting(&self) -> usize {
        self.tcp.len() + self.rdma.len()
    }

    /// A turn begins.
    pub fn begin_turn(&mut self) {
        (self.tcp_left, self.rdma_left) = (ACCEPTS_PER_TURN, RDMA_ACCEPTS_PER_TURN);
    }

    /// True when [`Arrivals::take_next`] has one.
    pub fn has_next(&self) -> bool {
        self.tcp_left > 0 && !self.tcp.is_empty() || self.rdma_left > 0 && !self.rdma.is_empty()
    }

    /// The next one that this turn takes; the others have the next turn.
    pub fn take_next(&mut self) -> Option<Arrival<T, R>> {
        if self.tcp_left > 0
            && let Some(tcp) = self.tcp.pop_front()
        {
            self.tcp_left -= 1;
            return Some(Arrival::Tcp(tcp));
        }
        if self.rdma_left == 0 {
            return None;
        }
        let rdma = self.rdma.pop_front()?;
        self.rdma_left -= 1;
        Some(Arrival::Rdma(rdma))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_makes_one_queue_pair_and_takes_a_few_sockets_and_the_next_turns_the_others() {
        let mut arrivals = Arrivals::new();
        (0..9).for_each(|tcp| arrivals.push(Arrival::Tcp(tcp)));
        (0..9).for_each(|rdma| arrivals.push(Arrival::Rdma(rdma)));
        let mut turns = Vec::new();
        while arrivals.waiting() > 0 {
            arrivals.begin_turn();
            let mut taken = (Vec::new(), Vec::new());
            while arrivals.has_next() {
                match arrivals.take_next().expect("has_next says so") {
                    Arrival::Tcp(tcp) => taken.0.push(tcp),
                    Arrival::Rdma(rdma) => taken.1.push(rdma),
                }
            }
            assert_eq!(arrivals.take_next(), None);
            turns.push(taken);
        }
        let tcp: Vec<_> = turns.iter().map(|(tcp, _)| tcp.clone()).collect();
        assert_eq!(tcp[..3], [vec![0, 1, 2, 3], vec![4, 5, 6, 7], vec![8]]);
        let rdma: Vec<_> = turns.into_iter().map(|(_, rdma)| rdma).collect();
        assert_eq!(rdma, (0..9).map(|rdma| vec![rdma]).collect::<Vec<_>>());
    }
}
