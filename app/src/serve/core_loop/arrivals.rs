//! [`Arrivals`]: new connections that their core has not taken over yet.
//!
//! Taking over a connection delays the core's other connections, so a turn takes over few. TCP connections
//! are taken over before RDMA connections. An RDMA connection that ends occupies its slot for some more
//! turns, so many of them could occupy every slot.

use std::collections::VecDeque;

/// Most TCP connections that a turn accepts, and most that a turn takes over: each costs some ten system
/// calls.
pub const ACCEPTS_PER_TURN: usize = 4;
/// Most RDMA connections that a turn takes over: each creates a queue pair, which takes about 1 ms.
const RDMA_ACCEPTS_PER_TURN: usize = 1;

#[derive(Debug)]
pub struct Arrivals<T, R> {
    pub tcp: ArrivalQueue<T>,
    pub rdma: ArrivalQueue<R>,
}

/// Connections of one transport, oldest first.
#[derive(Debug)]
pub struct ArrivalQueue<A> {
    waiting: VecDeque<A>,
    per_turn: usize,
    /// Connections that may still be taken over in the current turn.
    budget: usize,
}

impl<T, R> Arrivals<T, R> {
    pub fn new() -> Self {
        Arrivals { tcp: ArrivalQueue::new(ACCEPTS_PER_TURN), rdma: ArrivalQueue::new(RDMA_ACCEPTS_PER_TURN) }
    }

    pub fn waiting(&self) -> usize {
        self.tcp.waiting.len() + self.rdma.waiting.len()
    }

    /// Whether an RDMA connection may be taken over now: the TCP queue is empty or has used its budget, and
    /// the RDMA queue is not empty and has budget.
    pub fn has_next_rdma(&self) -> bool {
        !self.tcp.has_next() && self.rdma.has_next()
    }

    pub fn begin_turn(&mut self) {
        self.tcp.budget = self.tcp.per_turn;
        self.rdma.budget = self.rdma.per_turn;
    }
}

impl<A> ArrivalQueue<A> {
    fn new(per_turn: usize) -> Self {
        ArrivalQueue { waiting: VecDeque::new(), per_turn, budget: 0 }
    }

    pub fn push(&mut self, arrival: A) {
        self.waiting.push_back(arrival);
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Whether [`ArrivalQueue::take_next`] returns a connection.
    pub fn has_next(&self) -> bool {
        self.budget > 0 && !self.waiting.is_empty()
    }

    /// Removes and returns the oldest connection; `None` if the queue is empty or the budget of the turn is
    /// used up.
    pub fn take_next(&mut self) -> Option<A> {
        if self.budget == 0 {
            return None;
        }
        let next = self.waiting.pop_front()?;
        self.budget -= 1;
        Some(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_takes_one_queue_pair_and_a_few_sockets_and_later_turns_the_others() {
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

    fn take_all(queue: &mut ArrivalQueue<i32>) -> Vec<i32> {
        let mut taken = Vec::new();
        while queue.has_next() {
            taken.push(queue.take_next().expect("has_next says so"));
        }
        assert_eq!(queue.take_next(), None);
        taken
    }
}
