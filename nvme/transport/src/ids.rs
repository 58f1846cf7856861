//! [`ConnectionId`] and [`RequestId`]: slots of different slabs, as distinct types.

use spindle_reactor::slab::Slot;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub Slot);

        impl $name {
            /// Converts 32 bits of any origin. A slab lookup rejects values that identify no current entry.
            #[inline]
            #[must_use]
            pub const fn from_wire(wire: u32) -> $name {
                $name(Slot::from_wire(wire))
            }

            /// Converts to 32 bits, for a field that a peer, a device or epoll echoes.
            #[inline]
            #[must_use]
            pub const fn to_wire(self) -> u32 {
                self.0.to_wire()
            }

            /// Returns the index of the entry in the slab.
            #[inline]
            #[must_use]
            pub const fn index(self) -> usize {
                self.0.index()
            }
        }
    };
}

id!(
    /// Identifies a connection of a core: the slot of its queue pair.
    ConnectionId
);
id!(
    /// Identifies a request of a queue pair: its slot. A transport repeats it in the events of the request.
    RequestId
);
