//! The HTTP contract, rule by rule. The number in a test's name is that of its
//! rule in `docs/contract.md`.

mod api;
mod client;
mod crowd;
#[path = "../databases/mod.rs"]
mod databases;
#[path = "../etcd/mod.rs"]
mod etcd;
mod faulty;
mod probe;
#[path = "../redis_servers/mod.rs"]
mod redis_servers;
#[path = "../scan/mod.rs"]
mod scan;
mod server;
mod stores;
mod told;

mod authorize;
mod availability;
mod bodies;
mod clients;
mod concurrency;
mod crowded_scopes;
mod dispositions;
mod extractors;
mod faults;
mod fidelity;
mod identity;
mod headers;
mod layers;
mod keys;
mod leases;
mod life;
mod logs;
mod mismatches;
mod operator;
mod oversized;
#[path = "../ports/mod.rs"]
mod ports;
// Not every test binary uses all of it.
#[allow(dead_code)]
#[path = "../chaos/server.rs"]
mod postgres_server;
mod processes;
mod quotas;
mod redirects;
mod retention;
mod sealing;
mod sameness;
mod service;
mod standby;
mod store_failures;
mod streams;
mod syntax;
mod uploads;
