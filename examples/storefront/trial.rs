//! Many orders under all faults, while each process is killed in turn, and a count of what
//! came of them.

use std::time::Duration;

use tokio::time;

use crate::{Error, faults::Fault, outcome::Outcome, role::Role, scene::Scene};

pub(crate) async fn run(orders: &str) -> Result<(), Error> {
    let orders = orders.parse()?;
    let scene = Scene::open(0, orders).await?;
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
    let (load, disturbed) = tokio::join!(
        scene.processes.keep(Role::Load, &scene.settings),
        disturb(scene, orders)
    );
    disturbed?;
    if let Some(status) = load?
        && !status.success()
    {
        return Err(format!("the load has failed: {status}").into());
    }
    let prefix = &scene.settings.prefix;
    Ok(Outcome {
        expected: orders.into(),
        orders: scene.database.orders(prefix).await?,
        charges: scene.bank.charges(prefix).await?,
        taken: scene.database.taken().await? - taken_before,
        troubles: HAPPENED
            .map(|(process, what)| (process, what, scene.processes.timeline.count(process, what)))
            .into(),
    })
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

/// Lets each trouble happen in its turn, spread over the orders.
async fn disturb(scene: &Scene, orders: u32) -> Result<(), Error> {
    let rounds = (orders / ORDERS_IN_ROUND).max(1) as usize;
    let turns = rounds * TROUBLES.len();
    for turn in 0..turns {
        let due = i64::from(orders) * (turn as i64 + 1) / (turns as i64 + 1);
        while scene.database.orders(&scene.settings.prefix).await?.1 < due {
            time::sleep(POLL).await;
        }
        let faults = &scene.processes.faults;
        match TROUBLES[turn % TROUBLES.len()] {
            Trouble::Kill(role) => scene.processes.kill(role).await,
            Trouble::Once(fault) => faults.switch(fault, true),
            Trouble::For(fault, time) => {
                faults.switch(fault, true);
                time::sleep(time).await;
                faults.switch(fault, false);
            }
        }
    }
    Ok(())
}

/// The load is first: it may end before the last ones happen.
const TROUBLES: [Trouble; 8] = [
    Trouble::Kill(Role::Load),
    Trouble::Once(Fault::DropResponse),
    Trouble::Kill(Role::Shop),
    Trouble::Once(Fault::ProviderUnavailable),
    Trouble::Kill(Role::Provider),
    Trouble::For(Fault::DatabaseDown, Duration::from_millis(1_500)),
    Trouble::Once(Fault::KillShop),
    Trouble::For(Fault::SlowProvider, Duration::from_millis(500)),
];

/// The events of the timeline that say so.
const HAPPENED: [(&str, &str); 7] = [
    ("load", "died"),
    ("shop", "died"),
    ("provider", "died"),
    ("network", "response lost"),
    ("network", "charge answered 503"),
    ("network", "charge delayed"),
    ("database", "stalled"),
];

/// For each of these many orders, all troubles happen once.
const ORDERS_IN_ROUND: u32 = 250;

const POLL: Duration = Duration::from_millis(10);
