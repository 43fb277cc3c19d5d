//! Ranks as threads.

use mgpu::World;

/// Runs `body` on every rank of a world of `size` threads. Returns the results in rank order.
///
/// # Panics
/// If the world cannot be created, or a rank panics.
pub fn run<R: Send>(size: u32, body: impl Fn(World) -> R + Sync) -> Vec<R> {
    let worlds = World::threads(size).expect("a world of threads");
    std::thread::scope(|scope| {
        let ranks: Vec<_> = worlds.into_iter().map(|world| scope.spawn(|| body(world))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank without panic")).collect()
    })
}
