//! A rank that opens many connections to the rendezvous before it joins, while the others join normally: `t-flood
//! RANK CONNECTIONS`.

use std::collections::VecDeque;
use std::os::unix::net::UnixStream;

use mgpu::{ReduceOp, World};

/// Number of connections open at a time: below the limit of descriptors of a process.
const HELD: usize = 500;

fn main() -> mgpu::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [culprit, connections] = &arguments[..] else { panic!("usage: t-flood RANK CONNECTIONS") };
    let variable = |name| std::env::var(name).expect("started by mgpurun");
    let mut held = VecDeque::new();
    if variable("RANK") == *culprit {
        let path = variable("MGPU_RENDEZVOUS").replace("unix:", "");
        for _ in 0..connections.parse().expect("CONNECTIONS is a number") {
            held.push_back(UnixStream::connect(&path).expect("the launcher answers"));
            if held.len() > HELD {
                held.pop_front();
            }
        }
    }
    let mut ranks = [1u8];
    World::from_env()?.communicator()?.all_reduce_slice(&mut ranks, ReduceOp::Sum)?;
    println!("{} ranks are here", ranks[0]);
    Ok(())
}
