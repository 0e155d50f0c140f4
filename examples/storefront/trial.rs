//! Many orders under all faults, while each process is killed in turn, and a count of what
//! came of them.

use std::{collections::BTreeSet, time::Duration};

use tokio::time::{self, Instant};

use crate::{
    Error,
    faults::Fault,
    outcome::{Line, Outcome},
    processes::Processes,
    role::Role,
    scene::Scene,
    server,
};

pub(crate) async fn run(orders: &str) -> Result<(), Error> {
    let orders = orders.parse()?;
    if orders < FEWEST {
        return Err(format!("place at least {FEWEST} orders, got {orders}").into());
    }
    server::start_logs(false)?;
    let scene = Scene::open(0, orders).await?;
    println!(
        "placing {orders} orders, which http://{} shows\n",
        scene.address()
    );
    let result = tokio::select! {
        result = place(&scene, orders) => result,
        () = crate::stop_signal() => Err("stopped".into()),
    };
    scene.close().await?;
    let result = result?;
    println!("{result}");
    match result.is_exact() {
        true => Ok(()),
        false => Err("something was done twice, is missing, or was never disturbed".into()),
    }
}

async fn place(scene: &Scene, orders: u32) -> Result<Outcome, Error> {
    let taken_before = scene.database.taken().await?;
    tokio::try_join!(load(scene), disturb(scene, orders))?;
    scene.processes.faults.clear();
    let expected = orders.into();
    wait_for_events(scene, expected).await?;
    let prefix = &scene.settings.prefix;
    let taken = scene.database.taken().await? - taken_before;
    let statements = scene.database.statements().await?;
    let line = |name, expected, (found, different)| Line {
        name,
        expected,
        found,
        different,
    };
    Ok(Outcome {
        lines: vec![
            line("orders", expected, scene.database.orders(prefix).await?),
            line(
                "events consumed",
                expected,
                scene.database.payments(prefix).await?,
            ),
            line("charges", expected, scene.bank.charges(prefix).await?),
            // A piece knows no order.
            line("stock taken", expected, (taken, taken.min(expected))),
            // One for each hour that was billed, and there was at least one.
            line("statements", statements.1.max(1), statements),
        ],
        troubles: TROUBLES
            .map(|(_, process, what)| (process, what))
            .into_iter()
            .collect::<BTreeSet<_>>()
            .into_iter()
            .map(|(process, what)| (process, what, scene.processes.timeline.count(process, what)))
            .collect(),
    })
}

async fn load(scene: &Scene) -> Result<(), Error> {
    match scene.processes.keep(Role::Load, &scene.settings).await? {
        Some(status) if !status.success() => Err(format!("the load has failed: {status}").into()),
        _ => Ok(()),
    }
}

/// Waits until the events of all orders are consumed and settled, for up to a minute.
async fn wait_for_events(scene: &Scene, orders: i64) -> Result<(), Error> {
    let (database, end) = (&scene.database, Instant::now() + LAST_EVENTS);
    while database.payments(&scene.settings.prefix).await?.1 < orders
        || database.pending_events().await? > 0
    {
        if Instant::now() >= end {
            break;
        }
        time::sleep(POLL).await;
    }
    Ok(())
}

/// Something that goes wrong.
#[derive(Clone, Copy)]
enum Trouble {
    Kill(Role),
    /// A fault that happens to the next request.
    Once(Fault),
    /// A fault that is on for a while.
    For(Fault, Duration),
}

/// Lets each trouble happen in its turn, spread over the orders. Those of the next turn wait
/// for it, so that each trouble meets orders.
async fn disturb(scene: &Scene, orders: u32) -> Result<(), Error> {
    let rounds = (orders / ORDERS_IN_ROUND).max(1);
    let turns = std::iter::repeat_n(TROUBLES, rounds as usize).flatten();
    let count = rounds * TROUBLES.len() as u32;
    for (turn, (trouble, process, what)) in (1..).zip(turns) {
        let due = |turn: u32| (orders * turn).div_ceil(count + 1);
        let Processes {
            faults,
            timeline,
            pace,
            ..
        } = &scene.processes;
        pace.allow(due(turn));
        while scene.database.orders(&scene.settings.prefix).await?.1 < due(turn).into() {
            time::sleep(POLL).await;
        }
        let before = timeline.count(process, what);
        let happened = async {
            while timeline.count(process, what) == before {
                time::sleep(POLL).await;
            }
        };
        match trouble {
            Trouble::Kill(role) => scene.processes.kill(role),
            Trouble::Once(fault) | Trouble::For(fault, _) => faults.switch(fault, true),
        }
        pace.allow(due(turn + 1));
        // It stays among the troubles that have not happened if no request comes for it.
        let _ = time::timeout(NEXT_REQUEST, happened).await;
        if let Trouble::For(fault, time) = trouble {
            time::sleep(time).await;
            faults.switch(fault, false);
        }
    }
    Ok(())
}

/// Each trouble, and the event that says that it has happened. The load is first, which
/// ends before the others.
const TROUBLES: [(Trouble, &str, &str); 14] = [
    (Trouble::Kill(Role::Load), "load", "died"),
    (
        Trouble::Once(Fault::DropResponse),
        "network",
        "response lost",
    ),
    (Trouble::Kill(Role::Shop), "shop", "died"),
    (
        Trouble::Once(Fault::ProviderUnavailable),
        "network",
        "charge answered 503",
    ),
    (Trouble::Kill(Role::Provider), "provider", "died"),
    (Trouble::Kill(Role::Consumer), "consumer", "died"),
    (Trouble::Kill(Role::Billing), "billing", "died"),
    (Trouble::Once(Fault::KillRelay), "relay", "died"),
    (Trouble::Once(Fault::KillConsumer), "consumer", "died"),
    (Trouble::Kill(Role::Relay), "relay", "died"),
    (
        Trouble::For(Fault::SlowProvider, HALF_A_SECOND),
        "network",
        "charge delayed",
    ),
    (Trouble::Once(Fault::KillShop), "shop", "died"),
    (
        Trouble::For(Fault::RelayStopped, HALF_A_SECOND),
        "relay",
        "died",
    ),
    (
        Trouble::For(Fault::DatabaseDown, LONGER_THAN_STORE_TIMEOUT),
        "database",
        "stalled",
    ),
];

/// Each trouble needs an order after it.
const FEWEST: u32 = 50;

/// For each of these many orders, all troubles happen once.
const ORDERS_IN_ROUND: u32 = 250;

/// Longer than the lease and the pauses of the relay.
const LAST_EVENTS: Duration = Duration::from_secs(60);

/// How long a fault waits for a request.
const NEXT_REQUEST: Duration = Duration::from_secs(10);

const HALF_A_SECOND: Duration = Duration::from_millis(500);
const LONGER_THAN_STORE_TIMEOUT: Duration = Duration::from_millis(1_500);
const POLL: Duration = Duration::from_millis(10);
