//! Rules at their edges, through the public interface: the last value that is accepted,
//! and the first one that is refused.

mod dispositions;
mod headers;
mod keys;
mod policies;
mod recorded;
mod service;
mod transitions;
