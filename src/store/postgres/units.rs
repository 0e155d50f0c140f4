//! The tables that are made together, and what each of them has to have.

use sqlx::{
    SqlSafeStr as _,
    migrate::{Migration, MigrationType},
};

/// Tables that are made together.
pub(crate) struct Unit {
    pub(super) version: i64,
    name: &'static str,
    /// The type that has `migrate`, `schema_sql`, `check_schema` and `grants_for`.
    pub(crate) owner: &'static str,
    /// All are there if the first one is.
    pub(super) tables: &'static [Table],
    pub(super) definitions: &'static str,
}

/// What `check_schema` compares a table with.
pub(super) struct Table {
    pub(super) name: &'static str,
    pub(super) columns: &'static [Column],
    pub(super) primary_key: &'static [&'static str],
    pub(super) indexes: &'static [Index],
}

/// The name of a column, its type, and whether it is NOT NULL.
pub(super) type Column = (&'static str, &'static str, bool);

/// The columns with which an index begins, and its predicate. One without a predicate
/// covers each row.
pub(super) type Index = (&'static [&'static str], Option<&'static str>);

impl Unit {
    pub(super) fn migration(&self) -> Migration {
        Migration::new(
            self.version,
            self.name.into(),
            MigrationType::Simple,
            self.definitions.into_sql_str(),
            false,
        )
    }

    /// Returns the units of its owner.
    pub(super) fn of_its_owner(&self) -> Vec<&'static Self> {
        let units = UNITS.iter().filter(|unit| unit.owner == self.owner);
        units.copied().collect()
    }

    /// Returns the unit with a table that `text` names.
    pub(super) fn named_in(text: &str) -> Option<&'static Self> {
        let names = |unit: &&&Self| unit.tables.iter().any(|table| text.contains(table.name));
        UNITS.iter().find(names).copied()
    }
}

pub(super) const RECORDS: Unit = Unit {
    version: 1,
    name: "records",
    owner: "PostgresStore",
    tables: &[Table {
        name: "idempotency_records",
        columns: &[
            ("scope", "text", true),
            ("key", "text", true),
            ("state", "smallint", true),
            ("attempt", "integer", true),
            ("takeovers", "integer", true),
            ("fence", "bigint", true),
            ("claimed_at", "bigint", true),
            ("lease_until", "bigint", true),
            ("expires_at", "bigint", true),
            ("operation", "bytea", true),
            ("token", "bytea", true),
            ("fingerprint", "bytea", true),
            ("response", "bytea", false),
            ("unknown_since", "bigint", false),
            ("awaited", "boolean", true),
        ],
        primary_key: &["scope", "key"],
        indexes: &[
            (&["expires_at"], None),
            (&["scope", "key"], Some("unknown_since IS NOT NULL")),
        ],
    }],
    definitions: include_str!("../../../migrations/postgres/0001_records.sql"),
};

pub(super) const USAGE: Unit = Unit {
    version: 4,
    name: "usage",
    owner: "PostgresStore",
    tables: &[Table {
        name: "idempotency_usage",
        columns: &[
            ("scope", "text", true),
            ("expires_at", "bigint", true),
            ("records", "bigint", true),
            ("bytes", "bigint", true),
        ],
        primary_key: &["scope", "expires_at"],
        indexes: &[(&["expires_at"], None)],
    }],
    definitions: include_str!("../../../migrations/postgres/0004_usage.sql"),
};

/// The units of a store, without those of its inboxes and outboxes.
pub(super) const STORE: [&Unit; 2] = [&RECORDS, &USAGE];

#[cfg(feature = "inbox")]
pub(crate) const INBOX: Unit = Unit {
    version: 2,
    name: "inbox",
    owner: "Inbox",
    tables: &[Table {
        name: "idempotency_messages",
        columns: &[
            ("consumer", "text", true),
            ("message", "text", true),
            ("seen_at", "bigint", true),
            ("expires_at", "bigint", true),
        ],
        primary_key: &["message", "consumer"],
        indexes: &[(&["expires_at"], None)],
    }],
    definitions: include_str!("../../../migrations/postgres/0002_inbox.sql"),
};

#[cfg(feature = "outbox")]
pub(crate) const OUTBOX: Unit = Unit {
    version: 3,
    name: "outbox",
    owner: "Outbox",
    tables: &[
        Table {
            name: "idempotency_events",
            columns: &[
                ("topic", "text", true),
                ("aggregate", "text", true),
                ("position", "bigint", true),
                ("id", "text", true),
                ("payload", "bytea", true),
                ("staged_at", "bigint", true),
            ],
            primary_key: &["aggregate", "topic", "position"],
            indexes: &[(&["aggregate", "topic", "id"], None)],
        },
        Table {
            name: "idempotency_streams",
            columns: &[
                ("topic", "text", true),
                ("aggregate", "text", true),
                ("last_position", "bigint", true),
            ],
            primary_key: &["aggregate", "topic"],
            indexes: &[],
        },
        Table {
            name: "idempotency_turns",
            columns: &[
                ("topic", "text", true),
                ("aggregate", "text", true),
                ("due_at", "bigint", false),
                ("token", "bytea", false),
                ("attempts", "integer", true),
                ("failing_since", "bigint", false),
            ],
            primary_key: &["aggregate", "topic"],
            indexes: &[(&["topic", "due_at"], None)],
        },
    ],
    definitions: include_str!("../../../migrations/postgres/0003_outbox.sql"),
};

const UNITS: &[&Unit] = &[
    &RECORDS,
    &USAGE,
    #[cfg(feature = "inbox")]
    &INBOX,
    #[cfg(feature = "outbox")]
    &OUTBOX,
];

/// The versions that the ledger may have: records, inbox, outbox and usage.
pub(super) const VERSIONS: i64 = 4;
