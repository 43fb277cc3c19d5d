//! Ranks as threads.

use mgpu::World;

/// Runs `body` on every rank of a world of `size` threads. Returns the results in rank order.
///
/// # Panics
/// If the world cannot be created, or a rank panics.
pub fn run<R: Send>(size: u32, body: impl Fn(World) -> R + Sync) -> Vec<R> {
    run_all(World::threads(size).expect("a world of threads"), body)
}

/// The same, with ranks that believe to be on several hosts, which have this many ranks each.
///
/// # Panics
/// As [`run`].
pub fn run_on_hosts<R: Send>(hosts: &[u32], body: impl Fn(World) -> R + Sync) -> Vec<R> {
    let first_ranks: Vec<u32> = hosts
        .iter()
        .scan(0, |next, ranks| {
            *next += ranks;
            Some(*next - ranks)
        })
        .collect();
    run_all(World::threads_on_hosts(&first_ranks, hosts.iter().sum()).expect("a world of threads"), body)
}

fn run_all<R: Send>(worlds: Vec<World>, body: impl Fn(World) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let ranks: Vec<_> = worlds.into_iter().map(|world| scope.spawn(|| body(world))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank without panic")).collect()
    })
}
